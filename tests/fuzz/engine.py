"""Runs cases in forked workers, so that torch is imported once, and watches their time and memory from outside."""

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

SECONDS = 20.0
"""A case that takes longer hangs; where more processes want the cores than there are, it has so many times as long."""
BYTES = 2**30
"""A case that needs more memory than this, beside what the process has already, has no measure."""
PER_WORKER = 100
"""Cases after which a worker is replaced by a new one."""


@dataclass(frozen=True)
class Result:
    index: int
    kind: str
    outcome: str
    failure: str = ""
    note: str = ""


@dataclass
class _Lane:
    """One worker and what it was told to do."""

    pid: int
    pipe: int
    waiting: list[int]
    running: int | None = None
    since: float = field(default_factory=time.monotonic)
    buffer: bytes = b""
    is_over: bool = False


Judge = Callable[[int], Result]


def run(judge: Judge, indices: list[int], jobs: int) -> Iterator[Result]:
    """The results of all cases as they come; `judge` runs in the workers."""
    batches = [indices[start : start + PER_WORKER] for start in range(0, len(indices), PER_WORKER)]
    lanes: list[_Lane] = []
    while batches or lanes:
        while batches and len(lanes) < jobs:
            lanes.append(_started(judge, batches.pop(0)))
        ready, _, _ = select.select([lane.pipe for lane in lanes], [], [], 0.2)
        for lane in list(lanes):
            if lane.pipe in ready:
                yield from _heard(lane)
            if lane.running is not None and time.monotonic() - lane.since > SECONDS * _crowding():
                os.kill(lane.pid, signal.SIGKILL)
                yield Result(lane.running, "", "hung", f"more than {SECONDS:g} seconds")
                lane.running = None
            if lane.is_over:
                os.waitpid(lane.pid, 0)
                if lane.running is not None:
                    yield Result(lane.running, "", "died", "the worker died")
                os.close(lane.pipe)
                lanes.remove(lane)
                if lane.waiting:
                    batches.insert(0, lane.waiting)


def _crowding() -> float:
    """How many processes share a core of this machine, at least one."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _started(judge: Judge, batch: list[int]) -> _Lane:
    read, write = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        status = 1
        try:
            _work(judge, batch, write)
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    os.set_blocking(read, False)
    return _Lane(pid, read, list(batch))


def _work(judge: Judge, batch: list[int], pipe: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    protect = before + 4 * BYTES  # the machine is protected; what counts is what was really used
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (protect, protect))
    for index in batch:
        os.write(pipe, json.dumps({"start": index}).encode() + b"\n")
        try:
            result = judge(index)
        except BaseException as error:  # whatever escapes is what is looked for
            last = traceback.format_exc().strip().splitlines()
            places = [line.strip() for line in last if "/oversmooth/" in line][-1:]
            is_full = isinstance(error, MemoryError) or "allocate memory" in str(error)
            what = [f"over {protect / 2**20:.0f} MB of memory"] if is_full else []
            result = Result(index, "", "raised", " ".join([*what, *places, last[-1]])[:500])
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        if used > BYTES and not result.failure:
            result = Result(index, result.kind, result.outcome, f"{used / 2**20:.0f} MB of memory", result.note)
        os.write(pipe, json.dumps({"done": vars(result)}).encode() + b"\n")
        if used > BYTES:
            return


def _heard(lane: _Lane) -> Iterator[Result]:
    with contextlib.suppress(BlockingIOError):
        while not lane.is_over:
            part = os.read(lane.pipe, 2**16)
            lane.buffer += part
            lane.is_over = not part
    *lines, lane.buffer = lane.buffer.split(b"\n")
    for line in lines:
        said = json.loads(line)
        if "start" in said:
            lane.running, lane.since = said["start"], time.monotonic()
            lane.waiting.remove(said["start"])
        else:
            lane.running = None
            yield Result(**said["done"])
