"""From one target to its rows, and the permits for requests that all workers share.

One object, in the process that runs the survey, behind a manager for worker processes, or as a named actor of Ray: the
calls are the same.
"""

import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, runtime_checkable

from oversmooth.errors import OversmoothError, RemoteUnavailable, whole_message
from oversmooth.models.open import open_source
from oversmooth.models.source import Source, Stack
from oversmooth.models.stores.remote import RateLimiter, traffic
from oversmooth.models.stores.store import ReadLog
from oversmooth.results import Row
from oversmooth.spectra.inspect import inspect
from oversmooth.surveys.rows import row_without_numbers, rows_of

LONGEST_PAUSE_SECONDS = 900.0
"""Three windows of the hub's limits. A server that asks for longer is not waited for: its targets are rows that say so."""


@runtime_checkable
class CoordinatorCalls(Protocol):
    """The calls of a desk, wherever it is."""

    def permit(self, host: str) -> float: ...

    def pause(self, host: str, seconds: float) -> None: ...

    def claim(self, content: str, target: str) -> bool: ...

    def release(self, content: str, target: str) -> None: ...


class Coordinator:
    """A token bucket and a list of claims.

    The bucket holds at most `burst` permits and gains `requests_per_second` of them: in any window of W seconds no more
    than `burst + W * requests_per_second` are given out.
    """

    def __init__(
        self,
        requests_per_second: float | None = None,
        burst: int = 4,
        known: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self._interval = 0.0 if requests_per_second is None else 1.0 / requests_per_second
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        self._next = -math.inf
        """When the bucket will have gained the permit after the last one given out."""
        self._paused_until: dict[str, float] = {}
        """By host: what one server asks for is no matter of another."""
        self._claims: dict[str, str] = dict.fromkeys(known, "")

    def permit(self, host: str) -> float:
        """0 where one more request may be sent to a host now; else the seconds after which to ask again."""
        with self._lock:
            now = self._clock()
            paused = self._paused_until.get(host, -math.inf) - now
            if paused > 0:
                return paused
            earliest = now - (self._burst - 1) * self._interval
            wait = max(self._next, earliest) - now
            if wait > 0:
                return wait
            self._next = max(self._next, earliest) + self._interval
            return 0.0

    def pause(self, host: str, seconds: float) -> None:
        """Nobody gets a permit for a host for so long: it asked for it."""
        with self._lock:
            until = self._clock() + seconds
            self._paused_until[host] = max(self._paused_until.get(host, until), until)

    def claim(self, content: str, target: str) -> bool:
        """Whether this target is the one that reads a content; every other one waits for its rows."""
        with self._lock:
            return self._claims.setdefault(content, target) == target

    def release(self, content: str, target: str) -> None:
        """Gives a content back that could not be read after all, for the next target that has it."""
        with self._lock:
            if self._claims.get(content) == target:
                del self._claims[content]


# --- the one function of a survey: from a target to its rows. Whatever happens, the answer is rows ---

GAP_BYTES = 2**20
"""Read in vain to save a request: about what 0.1 s of waiting is worth."""
TRIES = 6
ON_THIS_MACHINE = ("folder", "safetensors", "pickle", "gguf")
"""Kinds of sources whose tensors can be read twice for little."""
PATIENCE_SECONDS = 900.0
"""How long one read may wait in all: three windows of the hub's limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is computed; one table has one answer."""

    spectrum: str = "extremes"
    heads: bool = False
    precision: str = "auto"


@dataclass(frozen=True, slots=True)
class SurveyTarget:
    """One entry of a list."""

    target: str
    year: int | None = None

    def known(self, options: Options) -> Row:
        """The columns that its rows have in any case."""
        return {"target": self.target, "year": self.year, "extremes": options.spectrum == "extremes", "copied": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutcome:
    """What became of one target."""

    listed: SurveyTarget
    rows: tuple[tuple[str, Row], ...] = ()
    """Level and row; empty while the target waits."""
    waits_for: str | None = None
    """A content that another target reads, or has read."""
    own: Row | None = None
    """Of a target that waits: the columns that its copied rows do not take from the other."""
    requests: int = 0
    bytes_received: int = 0


def survey_target(listed: SurveyTarget, options: Options, desk: CoordinatorCalls) -> TargetOutcome:
    """Rows of the model, its layers and its heads; one row with the reason where it cannot be read."""
    start = time.monotonic()
    manners = RateLimiter(
        permit=desk.permit,
        told_to_wait=desk.pause,
        longest_wait_seconds=LONGEST_PAUSE_SECONDS,
        tries=TRIES,
        patience_seconds=PATIENCE_SECONDS,
        gap_bytes=GAP_BYTES,
    )
    known = listed.known(options)

    def cost() -> Row:
        """Rows are made when the work is done, and with what it took."""
        spent = {"requests": manners.requests, "bytes_received": manners.bytes_received}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {**spent, "seconds": time.monotonic() - start, "surveyed_at": now}

    claimed: list[str] = []
    try:
        with traffic(manners):
            outcome = _read(listed, options, desk, known, cost, claimed)
    except Exception as error:  # a survey of thousands ends for none of them: what happened is its row
        for content in claimed:
            desk.release(content, listed.target)
        row = row_without_numbers({**known, **cost()}, **_what_happened(error))
        outcome = {"rows": (row,)}
    return TargetOutcome(listed=listed, requests=manners.requests, bytes_received=manners.bytes_received, **outcome)


def _read(
    listed: SurveyTarget,
    options: Options,
    desk: CoordinatorCalls,
    known: Row,
    cost: Callable[[], Row],
    claimed: list[str],
) -> dict[str, Any]:
    source = open_source(listed.target)
    known = known | {"commit": getattr(source.store, "commit", None)}
    content = content_of(source, source.stacks(), options)
    if content is not None:
        if not desk.claim(content, listed.target):
            own = {**known, "file_sha256": content, "source": source.kind, **cost()}
            return {"waits_for": content, "own": own}
        claimed.append(content)
    inspection = inspect(source, spectrum=options.spectrum, heads=options.heads, precision=options.precision)
    return {"rows": tuple(rows_of(inspection, {**known, "file_sha256": content, **cost()}))}


def content_of(source: Source, stacks: tuple[Stack, ...], options: Options) -> str | None:
    """What decides every number of a model, as a hash: its weights, how they are laid out, and what is computed.

    Of weights: the hash of their files where the server tells it, as the hub does, without a tensor being read; on this
    machine that of the tensors, which are read twice then and cost far less than their eigenvalues; else `None`.
    """
    weights = getattr(source.store, "content_sha256", lambda: None)()
    if weights is None and source.kind in ON_THIS_MACHINE:
        log = ReadLog(source.store)
        for name in (name for stack in stacks for block in stack.names.blocks for name in block):
            log.read(name)  # one tensor in memory at a time
        weights = log.sha256
    if weights is None:
        return None
    layout = [(stack.label, stack.arch.name, stack.sizes, stack.branch_gain, stack.passes) for stack in stacks]
    return hashlib.sha256(f"{weights} {source.model_type} {layout} {options}".encode()).hexdigest()


def _what_happened(error: Exception) -> dict[str, str]:
    """Refused: the same answer another time. Failed: the network, the machine, or a fault of ours."""
    is_ours = isinstance(error, OversmoothError)
    status = "refused" if is_ours and not _may_pass(error) else "failed"
    reason = error.problem if isinstance(error, OversmoothError) else whole_message(error)
    return {"status": status, "error": type(error).__name__, "reason": reason}


def _may_pass(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, RemoteUnavailable) and error.may_pass:
            return True
        error = error.__cause__
    return False
