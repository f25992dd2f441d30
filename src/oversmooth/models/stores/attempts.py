"""Remote reads, tried again where that can help, and their failures in words."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

from oversmooth.errors import OversmoothError, RemoteUnavailable
from oversmooth.models.stores.traffic import Traffic, asked_to_wait, current_traffic

T = TypeVar("T")
TRIES = 3
"""How often a remote read is tried before it is given up; waits of 1 and 2 seconds lie between."""
LONGEST_PAUSE = 60
"""Seconds; a server may ask for longer."""
BUSY = (429, 503)
"""Statuses of a server that may say when to come back."""
COPY_IT = "Download the file and inspect the local copy."


def retried(label: str, read: Callable[[], T], until: float = math.inf, manners: Traffic | None = None) -> T:
    """Calls `read`, again after a pause when the network fails; no attempt begins after `until` (monotonic seconds).

    A server that says when to come back is obeyed. A file that does not exist, and what `read` refused itself, are not
    tried again.
    """
    manners = manners or current_traffic()
    tries = manners.tries or TRIES
    for attempt in range(tries):
        try:
            return read()
        except OversmoothError:
            raise
        except ValueError as error:  # no address at all, or fsspec: a range was answered with something else
            raise RemoteUnavailable(label, str(error) or "it is no valid address", COPY_IT) from error
        except Exception as error:  # aiohttp, requests and OS errors have no common base
            status = _status(error)
            # fsspec says "not found" of any failure; what really happened is its cause.
            if isinstance(error, FileNotFoundError) and (status == 404 or error.__cause__ is None):
                raise
            pause = _pause(error, attempt)
            if status in BUSY and pause > 0:
                manners.told_to_wait(pause)
            is_late = time.monotonic() + pause > until
            if attempt == tries - 1 or is_late or status in (401, 403):
                raise _unavailable(label, error) from error
            time.sleep(pause)
    raise AssertionError("the loop returns or raises")


def _pause(error: BaseException, attempt: int) -> float:
    """Seconds before the next attempt: what the server asks for, and otherwise twice as long each time."""
    asked = asked_to_wait(getattr(error, "headers", None)) if _status(error) in BUSY else None
    return float(min(2**attempt, LONGEST_PAUSE)) if asked is None else asked


def _status(error: BaseException | None) -> int | None:
    """The HTTP status behind an error, if a server answered at all."""
    while error is not None:
        if isinstance(status := getattr(error, "status", None), int):
            return status
        error = error.__cause__
    return None


def _unavailable(label: str, error: BaseException) -> RemoteUnavailable:
    if (status := _status(error)) in (401, 403):
        advice = "The model may not exist, or may need `hf auth login` and its owner's permission."
        return RemoteUnavailable(label, f"access was refused ({status})", advice)
    cause = (error.__cause__ if isinstance(error, FileNotFoundError) else None) or error
    if isinstance(cause, TimeoutError):
        advice = "Try again later, or use a local copy."
        return RemoteUnavailable(label, "the server did not answer in time", advice, may_pass=True)
    return RemoteUnavailable(label, f"{type(cause).__name__}: {cause}".rstrip(": "), may_pass=True)
