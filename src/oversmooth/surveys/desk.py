"""What all workers of a survey share: permits for requests, and which contents somebody reads already.

One object, in the process that runs the survey, behind a manager for worker processes, or as a named actor of Ray: the
calls are the same.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

LONGEST_PAUSE_SECONDS = 900.0
"""However long a server asks everybody to wait, they look again after this."""


@runtime_checkable
class Shared(Protocol):
    """The calls of a desk, wherever it is."""

    def permit(self) -> float: ...

    def pause(self, seconds: float) -> None: ...

    def claim(self, content: str, target: str) -> bool: ...

    def release(self, content: str, target: str) -> None: ...


class Desk:
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
        self._paused_until = -math.inf
        self._claims: dict[str, str] = dict.fromkeys(known, "")

    def permit(self) -> float:
        """0 where one more request may be sent now; else the seconds after which to ask again."""
        with self._lock:
            now = self._clock()
            if now < self._paused_until:
                return self._paused_until - now
            earliest = now - (self._burst - 1) * self._interval
            wait = max(self._next, earliest) - now
            if wait > 0:
                return wait
            self._next = max(self._next, earliest) + self._interval
            return 0.0

    def pause(self, seconds: float) -> None:
        """Nobody gets a permit for so long: a server asked for it."""
        with self._lock:
            self._paused_until = max(self._paused_until, self._clock() + min(seconds, LONGEST_PAUSE_SECONDS))

    def claim(self, content: str, target: str) -> bool:
        """Whether this target is the one that reads a content; every other one waits for its rows."""
        with self._lock:
            return self._claims.setdefault(content, target) == target

    def release(self, content: str, target: str) -> None:
        """Gives a content back that could not be read after all, for the next target that has it."""
        with self._lock:
            if self._claims.get(content) == target:
                del self._claims[content]
