"""What one piece of work asks of servers: how often, how much, and with how much patience.

One inspection needs none of this. A survey of thousands of models does: it waits for its turn before every request, obeys
a server that asks it to come back later, and counts what it fetched. `with traffic(...)` says so for everything that is
opened inside, so that nothing between a target and its bytes has to pass it on.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

RESET = re.compile(r";\s*t=(?P<seconds>\d{1,9})")
"""Seconds until a window of the `RateLimit` header begins anew, as the hub writes it."""


def _at_once() -> float:
    return 0.0


def _for_itself(seconds: float) -> None:
    """Nobody else has to know."""


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Manners and counters of the requests that one piece of work makes."""

    permit: Callable[[], float] = _at_once
    """Seconds to wait before one more request to the place that was named; storage it redirects to has no limit."""
    told_to_wait: Callable[[float], None] = _for_itself
    """Called when a server says how long everybody should wait."""
    tries: int | None = None
    """How often one read is tried; `None` for the usual number."""
    patience_seconds: float | None = None
    """How long one read may take, waits included; `None` for the usual time."""
    gap_bytes: int = 0
    """Bytes that may be read in vain to save a request."""
    requests: int = 0
    """Requests that were sent, those to storage included."""
    bytes_received: int = 0

    def wait_for_permit(self) -> None:
        while (seconds := self.permit()) > 0:
            time.sleep(seconds)

    def count(self, requests: int, received: int = 0) -> None:
        self.requests += requests
        self.bytes_received += received


_CURRENT: ContextVar[Traffic | None] = ContextVar("traffic", default=None)


def current_traffic() -> Traffic:
    return _CURRENT.get() or Traffic()


@contextmanager
def traffic(given: Traffic) -> Iterator[Traffic]:
    """Everything that is opened inside asks servers with these manners."""
    token = _CURRENT.set(given)
    try:
        yield given
    finally:
        _CURRENT.reset(token)


def asked_to_wait(headers: Mapping[str, str] | None) -> float | None:
    """Seconds after which a server wants to be asked again: `Retry-After`, or the end of a `RateLimit` window."""
    if headers is None:
        return None
    said = str(headers.get("Retry-After", "")).strip()
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", said):
        return float(said)
    if said:
        return _until_date(said)
    found = RESET.search(str(headers.get("RateLimit", "")))
    return float(found["seconds"]) if found else None


def _until_date(said: str) -> float | None:
    from email.utils import parsedate_to_datetime

    try:
        return max(parsedate_to_datetime(said).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None
