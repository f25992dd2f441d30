"""Runs cases in forked workers, so that torch is imported once, and watches their time and memory from outside."""

import contextlib
import json
import math
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

PROCESSOR_SECONDS = 20
"""A case that computes for longer hangs, however busy the machine is: the kernel counts, and ends the worker."""
WALL_SECONDS = 120.0
"""A case that is not over by then waits for something that never comes."""
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
            if lane.running is not None and time.monotonic() - lane.since > WALL_SECONDS:
                os.kill(lane.pid, signal.SIGKILL)
                yield Result(lane.running, "", "hung", f"not over after {WALL_SECONDS:g} seconds")
                lane.running = None
            if lane.is_over:
                _, status = os.waitpid(lane.pid, 0)
                if lane.running is not None:
                    yield _cut_short(lane.running, status)
                os.close(lane.pipe)
                lanes.remove(lane)
                if lane.waiting:
                    batches.insert(0, lane.waiting)


def _cut_short(index: int, status: int) -> Result:
    """What became of a case whose worker ended in the middle of it."""
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return Result(index, "", "hung", f"more than {PROCESSOR_SECONDS} seconds of processor time")
    return Result(index, "", "died", f"the worker died (wait status {status})")


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
        until = math.ceil(time.process_time()) + PROCESSOR_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
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
