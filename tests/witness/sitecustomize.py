"""Python imports this by itself in every process whose PYTHONPATH has this folder: workers, managers, actors of Ray.

A hub sees when a request arrives, not when its sender was permitted to send it, nor when a 429 was told to everybody. In
processes whose environment names a log, every request says in a header which permit it was sent with and when that was
asked for, and the log says when every pause had been told. Both times are of the one monotonic clock of the machine.
"""

import importlib.abc
import importlib.util
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

LOG, RUN, SABOTAGE = "OVERSMOOTH_WITNESS_LOG", "OVERSMOOTH_WITNESS_RUN", "OVERSMOOTH_WITNESS_SABOTAGE"
"""Where the log is, the name of the run, and what is not done in it: `pauses` are not told, `permits` not waited for."""
DEADLY = "OVERSMOOTH_WITNESS_DEADLY"
"""A target that ends the process it is opened in, as one that is too large for the memory does."""
HEADER = "X-Witness"
WATCHED = "oversmooth.surveys.worker"


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls the witness once the one module is there."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def then_watch(module: Any) -> None:
            run(module)
            _watch(module)

        spec.loader.exec_module = then_watch  # type: ignore[method-assign]
        return spec


def _watch(reading: Any) -> None:
    import aiohttp

    send, make, opened = aiohttp.ClientSession._request, reading.RateLimiter, reading.open_source
    run, numbers, sent_with = os.environ[RUN], itertools.count(), ["none"]

    def permitted(permit: Callable[[str], float], host: str) -> float:
        asked = time.monotonic()
        wait = permit(host)
        if wait <= 0:
            sent_with[0] = f"{os.getpid()}-{next(numbers)} {asked!r}"
        return wait

    def told(pause: Callable[[str, float], None], host: str, seconds: float) -> None:
        if os.environ.get(SABOTAGE) != "pauses":
            pause(host, seconds)
        line = f"{run} {seconds!r} {time.monotonic()!r}\n".encode()
        place = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(place, line)
        os.close(place)

    def traffic(*, permit: Any, told_to_wait: Any, **rest: Any) -> Any:
        rest["told_to_wait"] = lambda host, seconds: told(told_to_wait, host, seconds)
        if os.environ.get(SABOTAGE) != "permits":
            rest["permit"] = lambda host: permitted(permit, host)
        return make(**rest)

    async def request(self: Any, *arguments: Any, headers: Any = None, **options: Any) -> Any:
        marked = {**(headers or {}), HEADER: f"{run} {sent_with[0]}"}
        return await send(self, *arguments, headers=marked, **options)

    def deadly(target: str) -> Any:
        if target == os.environ.get(DEADLY):
            os.kill(os.getpid(), signal.SIGKILL)
        return opened(target)

    reading.RateLimiter, reading.open_source = traffic, deadly
    aiohttp.ClientSession._request = request  # type: ignore[method-assign]


if LOG in os.environ:
    sys.meta_path.insert(0, _WhenImported())
