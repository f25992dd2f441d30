"""The one function of a survey: from a target to its rows. Whatever happens, the answer is rows; nothing is raised."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from oversmooth.errors import OversmoothError, RemoteUnavailable, whole_message
from oversmooth.models.opening import open_source
from oversmooth.models.source import Source, Stack
from oversmooth.models.stores.store import ReadLog
from oversmooth.models.stores.traffic import Traffic, traffic
from oversmooth.results import Row
from oversmooth.spectra.inspection import inspect
from oversmooth.surveys.desk import Shared
from oversmooth.surveys.rows import row_without_numbers, rows_of

GAP_BYTES = 2**20
"""Read in vain to save a request: about what 0.1 s of waiting is worth."""
TRIES = 6
ON_THIS_MACHINE = ("folder", "safetensors", "pickle", "gguf")
"""Kinds of sources whose tensors can be read twice for little."""
PATIENCE_SECONDS = 900.0
"""How long one read may wait in all: three windows of the hub's limits."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry of a list."""

    target: str
    year: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is computed; one table has one answer."""

    extremes: bool = True
    heads: bool = False
    dtype: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one target."""

    listed: Listed
    rows: tuple[tuple[str, Row], ...] = ()
    """Level and row; empty while the target waits."""
    waits_for: str | None = None
    """A content that another target reads, or has read."""
    own: Row | None = None
    """Of a target that waits: the columns that its copied rows do not take from the other."""
    requests: int = 0
    bytes_received: int = 0


def survey_target(listed: Listed, options: Options, desk: Shared) -> Outcome:
    """Rows of the model, its layers and its heads; one row with the reason where it cannot be read."""
    start = time.monotonic()
    manners = Traffic(
        permit=desk.permit,
        told_to_wait=desk.pause,
        tries=TRIES,
        patience_seconds=PATIENCE_SECONDS,
        gap_bytes=GAP_BYTES,
    )
    known: Row = {"target": listed.target, "year": listed.year, "extremes": options.extremes, "copied": False}

    def cost() -> Row:
        """Rows are made when the work is done, and with what it took."""
        spent = {"requests": manners.requests, "bytes_received": manners.bytes_received}
        return {**spent, "seconds": time.monotonic() - start, "surveyed_at": _now()}

    claimed: list[str] = []
    try:
        with traffic(manners):
            outcome = _read(listed, options, desk, known, cost, claimed)
    except Exception as error:  # a survey of thousands ends for none of them: what happened is its row
        for content in claimed:
            desk.release(content, listed.target)
        row = row_without_numbers({**known, **cost()}, **_what_happened(error))
        outcome = {"rows": (row,)}
    return Outcome(listed=listed, requests=manners.requests, bytes_received=manners.bytes_received, **outcome)


def _read(
    listed: Listed, options: Options, desk: Shared, known: Row, cost: Callable[[], Row], claimed: list[str]
) -> dict[str, Any]:
    source = open_source(listed.target)
    known = known | {"commit": getattr(source.store, "commit", None)}
    content = content_of(source, source.stacks(), options)
    if content is not None:
        if not desk.claim(content, listed.target):
            own = {**known, "file_sha256": content, "source": source.kind, **cost()}
            return {"waits_for": content, "own": own}
        claimed.append(content)
    inspection = inspect(source, extremes=options.extremes, heads=options.heads, dtype=options.dtype)
    return {"rows": tuple(rows_of(inspection, {**known, "file_sha256": content, **cost()}))}


def content_of(source: Source, stacks: tuple[Stack, ...], options: Options) -> str | None:
    """What decides every number of a model, as a hash: its weights, how they are laid out, and what is computed.

    Of weights: the hash of their files where the server tells it, as the hub does, without a tensor being read; on this
    machine that of the tensors, which are read twice then and cost far less than their eigenvalues; else `None`.
    """
    weights = getattr(source.store, "content_sha256", lambda: None)()
    if weights is None and source.kind in ON_THIS_MACHINE:
        weights = _tensors_sha256(source, stacks)
    if weights is None:
        return None
    layout = [(stack.label, stack.arch.name, stack.sizes, stack.branch_gain, stack.passes) for stack in stacks]
    return hashlib.sha256(f"{weights} {source.model_type} {layout} {options}".encode()).hexdigest()


def _tensors_sha256(source: Source, stacks: tuple[Stack, ...]) -> str:
    """The hash of every tensor that will be read, one of them in memory at a time."""
    log = ReadLog(source.store)
    for name in (name for stack in stacks for block in stack.names.blocks for name in block):
        log.read(name)
    return log.sha256


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


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
