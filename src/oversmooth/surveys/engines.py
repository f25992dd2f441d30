"""Who runs the one function: this process, or worker processes beside it. Both yield what became of each target."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for
from multiprocessing.managers import BaseManager
from typing import Any

from oversmooth.surveys.desk import Desk, Shared
from oversmooth.surveys.reading import Listed, Options, Outcome, survey_target
from oversmooth.surveys.rows import row_without_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What all workers together keep to."""

    requests_per_second: float | None
    known: tuple[str, ...] = ()
    """Contents that are in the table already."""

    def desk(self) -> Desk:
        return Desk(self.requests_per_second, known=self.known)


Engine = Callable[[Sequence[Listed], Options, Limits, int], Iterator[Outcome]]
"""Targets, what is computed, limits and the number of workers -> outcomes as they come."""


def serial(targets: Sequence[Listed], options: Options, limits: Limits, workers: int = 1) -> Iterator[Outcome]:
    """One target after the other, in this process."""
    desk = limits.desk()
    for listed in targets:
        yield survey_target(listed, options, desk)


# --- worker processes -----------------------------------------------------------------------------------------------


class _Manager(BaseManager):
    """Serves the one desk to all workers."""


_Manager.register("Desk", Desk)
_worker: dict[str, Any] = {}
"""What a worker process was started with."""


def processes(targets: Sequence[Listed], options: Options, limits: Limits, workers: int) -> Iterator[Outcome]:
    """Targets side by side in worker processes, few more of them under way than there are workers.

    A worker that dies (killed for its memory, say) takes nothing with it: what was under way is tried again one by one, and
    a target that kills a worker alone is a row.
    """
    context = get_context("spawn")
    manager = _Manager(ctx=context)
    manager.start(_watch_parent)
    with manager:
        desk = manager.Desk(limits.requests_per_second, 4, limits.known)  # type: ignore[attr-defined]
        remaining, suspects = deque(targets), deque[Listed]()
        while remaining or suspects:
            under_way: dict[Future[Outcome], Listed] = {}
            one_by_one = bool(suspects)
            pool = ProcessPoolExecutor(1 if one_by_one else workers, context, _begin, (desk, options))
            try:
                yield from _run(
                    pool, suspects if one_by_one else remaining, under_way, 1 if one_by_one else 2 * workers
                )
            except BrokenProcessPool:
                if one_by_one:
                    yield died(next(iter(under_way.values())), options)
                else:
                    suspects.extend(under_way.values())
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def _run(
    pool: ProcessPoolExecutor, queue: deque[Listed], under_way: dict[Future[Outcome], Listed], most: int
) -> Iterator[Outcome]:
    while queue or under_way:
        while queue and len(under_way) < most:
            listed = queue.popleft()
            under_way[_submit(pool, listed, queue)] = listed
        for future in wait(under_way, return_when=FIRST_COMPLETED).done:
            outcome = future.result()
            del under_way[future]
            yield outcome


def _submit(pool: ProcessPoolExecutor, listed: Listed, queue: deque[Listed]) -> Future[Outcome]:
    try:
        return pool.submit(_one, listed)
    except BrokenProcessPool:
        queue.appendleft(listed)
        raise


def _begin(desk: Shared, options: Options) -> None:
    """In a worker, of which there are several: one thread for each."""
    import torch

    torch.set_num_threads(1)
    _worker.update(desk=desk, options=options)
    _watch_parent()


def _watch_parent() -> None:
    """Ends this process when the one that started it ends, even by SIGKILL, which gives nobody time to say so."""
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


def _one(listed: Listed) -> Outcome:
    return survey_target(listed, _worker["options"], _worker["desk"])


def died(listed: Listed, options: Options) -> Outcome:
    """The row of a target that ends the process it is read in."""
    known = {"target": listed.target, "year": listed.year, "extremes": options.extremes, "copied": False}
    reason = "the worker process died, most likely for want of memory"
    return Outcome(
        listed=listed, rows=(row_without_numbers(known, status="failed", error="WorkerDied", reason=reason),)
    )
