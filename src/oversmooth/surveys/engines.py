"""Engines of a survey: this process, worker processes, Ray.

Five things of Ray that this is written around. Actors that take every CPU leave none for the rest of the pipeline,
which then waits forever: a local cluster has one logical CPU more than workers, and on another one that many have to be
free. Threads follow `num_cpus`: every worker asks for one and has one. A dataset that runs again reads all of its input:
finished targets are taken out before it is made, and blocks are small, so that what is finished arrives soon. A local
cluster starts workers before it answers, and waits forever where they take longer than a minute to start, as on a busy
machine (ray-project/ray#40131): none are started before they are needed, and they have ten minutes. Ray Data starts a
worker that died again without end, with the target that it died of, and says on the terminal that this may not work
(ray-project/ray#57733): workers are not restarted.
"""

import logging
import os
import pickle
import socket
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from typing import Any

from oversmooth.environment.versions import end_with_parent
from oversmooth.errors import BadValue, ClusterUnavailable, MissingDependency, first_line
from oversmooth.surveys.rows import row_without_numbers
from oversmooth.surveys.worker import Coordinator, CoordinatorCalls, Options, SurveyTarget, TargetOutcome, survey_target


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What all workers together keep to."""

    requests_per_second: float | None
    known: tuple[str, ...] = ()
    """Contents that are in the table already."""


Engine = Callable[[Sequence[SurveyTarget], Options, RequestLimits, int], Iterator[TargetOutcome]]
"""Targets, what is computed, limits and the number of workers -> outcomes as they come."""


def serial(
    targets: Sequence[SurveyTarget], options: Options, limits: RequestLimits, workers: int = 1
) -> Iterator[TargetOutcome]:
    """One target after the other, in this process."""
    desk = Coordinator(limits.requests_per_second, known=limits.known)
    for listed in targets:
        yield survey_target(listed, options, desk)


class _Manager(BaseManager):
    """Serves the one desk to all workers."""


_Manager.register("Desk", Coordinator)
_worker: dict[str, Any] = {}
"""What a worker process was started with."""


def processes(
    targets: Sequence[SurveyTarget], options: Options, limits: RequestLimits, workers: int
) -> Iterator[TargetOutcome]:
    """Targets side by side in worker processes, few more of them under way than there are workers.

    A worker that dies (killed for its memory, say) takes nothing with it: what was under way is tried again one by one, and
    a target that kills a worker alone is a row.
    """
    context = get_context("spawn")
    manager = _Manager(ctx=context)
    manager.start(end_with_parent)
    with manager:
        desk = manager.Desk(limits.requests_per_second, known=limits.known)  # type: ignore[attr-defined]
        remaining, suspects = deque(targets), deque[SurveyTarget]()
        while remaining or suspects:
            under_way: dict[Future[TargetOutcome], SurveyTarget] = {}
            one_by_one = bool(suspects)
            size, queue, most = (1, suspects, 1) if one_by_one else (workers, remaining, 2 * workers)
            pool = ProcessPoolExecutor(size, context, _begin, (desk, options))
            try:
                yield from _run(pool, queue, under_way, most)
            except BrokenProcessPool:
                if one_by_one:
                    yield died(next(iter(under_way.values())), options)
                else:
                    suspects.extend(under_way.values())
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def _run(
    pool: ProcessPoolExecutor,
    queue: deque[SurveyTarget],
    under_way: dict[Future[TargetOutcome], SurveyTarget],
    most: int,
) -> Iterator[TargetOutcome]:
    while queue or under_way:
        while queue and len(under_way) < most:
            under_way[pool.submit(_one, queue[0])] = queue[0]  # a broken pool raises, and it stays in the queue
            queue.popleft()
        for future in wait(under_way, return_when=FIRST_COMPLETED).done:
            outcome = future.result()
            del under_way[future]
            yield outcome


def _begin(desk: CoordinatorCalls, options: Options) -> None:
    """In a worker, of which there are several: one thread for each."""
    import torch

    torch.set_num_threads(1)
    _worker.update(desk=desk, options=options)
    end_with_parent()


def _one(listed: SurveyTarget) -> TargetOutcome:
    return survey_target(listed, _worker["options"], _worker["desk"])


def died(listed: SurveyTarget, options: Options) -> TargetOutcome:
    """The row of a target that ends the process it is read in."""
    reason = "the worker process died, most likely for want of memory"
    row = row_without_numbers(listed.known(options), status="failed", error="WorkerDied", reason=reason)
    return TargetOutcome(listed=listed, rows=(row,))


# --- the same function on Ray Data: on this machine or on a cluster, the desk as a named actor ---

NAMESPACE = "oversmooth"
TARGETS_PER_BLOCK = 4
"""Small enough that results arrive soon, large enough that scheduling does not count."""
LONGEST_CONNECTION_SECONDS = 10.0
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_register_timeout_seconds": "600",
}
"""Of Ray, by its environment, unless the user has set them."""


class RayEngine:
    """An engine with the address of a cluster; without one, a cluster of this machine for as long as it runs."""

    def __init__(self, address: str | None = None):
        self._address = address

    def __call__(
        self, targets: Sequence[SurveyTarget], options: Options, limits: RequestLimits, workers: int
    ) -> Iterator[TargetOutcome]:
        if not targets:
            return
        ray = _import_ray()
        was_running = ray.is_initialized()
        if not was_running:
            self._connect(ray, workers)
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if workers >= cpus:
            raise BadValue(
                "workers", workers, f"less than the {cpus} CPUs of the cluster: the dataset needs one itself"
            )
        name = f"oversmooth-desk-{uuid.uuid4().hex[:8]}"
        # No CPU of its own: it answers questions. Many of them at once, because nobody should wait for another's answer.
        desk = ray.remote(Coordinator).options(name=name, namespace=NAMESPACE, num_cpus=0, max_concurrency=32)
        handle = desk.remote(limits.requests_per_second, known=limits.known)
        try:
            yield from _whatever_dies(ray, targets, options, name, workers)
        finally:
            ray.kill(handle)
            if not was_running:
                ray.shutdown()

    def _connect(self, ray: Any, workers: int) -> None:
        where = {"address": self._address} if self._address else {"num_cpus": workers + 1, "include_dashboard": False}
        try:
            _require_listener(self._address)
            ray.init(**where, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray raises a bare Exception where its processes do not start in time
            name = f"The cluster of Ray at {self._address!r}" if self._address else "A cluster of Ray on this machine"
            raise ClusterUnavailable(name, first_line(error)) from error


def _require_listener(address: str | None) -> None:
    """Raises where nobody listens at host:port; Ray itself would try for a quarter of an hour."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), LONGEST_CONNECTION_SECONDS).close()


def _import_ray() -> Any:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingDependency("ray", "survey", "--engine ray") from error
    return ray


def _whatever_dies(
    ray: Any, targets: Sequence[SurveyTarget], options: Options, desk: str, workers: int
) -> Iterator[TargetOutcome]:
    """All outcomes. A worker that dies fails its dataset: what is left is tried in halves, until the target is alone that
    kills workers, and is a row."""
    left = {listed.target: listed for listed in targets}
    try:
        for outcome in _outcomes(ray, targets, options, desk, workers):
            del left[outcome.listed.target]
            yield outcome
        return
    except ray.exceptions.RayActorError:
        if len(targets) == 1:
            yield died(targets[0], options)
            return
    rest = list(left.values())
    middle = len(rest) // 2
    for half in (rest[:middle], rest[middle:]):
        if half:
            yield from _whatever_dies(ray, half, options, desk, workers)


def _outcomes(
    ray: Any, targets: Sequence[SurveyTarget], options: Options, desk: str, workers: int
) -> Iterator[TargetOutcome]:
    ray.data.DataContext.get_current().enable_progress_bars = False
    # Its plan and its counts are not the survey's, and what it raises it need not print as well.
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    at_once = min(workers, len(targets))
    blocks = max(-(-len(targets) // TARGETS_PER_BLOCK), at_once)
    items = [{"target": listed.target, "year": listed.year or 0} for listed in targets]
    # Ray 2.60 says that `max_restarts` will need another name in 2.64, which is not allowed yet.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ray.util.annotations.RayDeprecationWarning)
        dataset = ray.data.from_items(items, override_num_blocks=blocks).map(
            Worker,
            fn_constructor_args=(options, desk),
            compute=ray.data.ActorPoolStrategy(size=at_once),
            num_cpus=1,
            max_restarts=0,
        )
    for row in dataset.iter_rows():
        yield pickle.loads(row["outcome"])


class Worker:
    """One actor of the pool; it asks the desk by its name, wherever in the cluster that is."""

    def __init__(self, options: Options, desk: str):
        import ray
        import torch

        torch.set_num_threads(1)
        self._options = options
        self._desk: Any = RayCoordinator(ray.get_actor(desk, namespace=NAMESPACE))

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        outcome = survey_target(SurveyTarget(row["target"], row["year"] or None), self._options, self._desk)
        return {"outcome": pickle.dumps(outcome)}


class RayCoordinator:
    """The calls of a coordinator (`CoordinatorCalls`), each sent to the actor that it is."""

    def __init__(self, actor: Any):
        self._actor = actor

    def __getattr__(self, call: str) -> Any:
        import ray

        method = getattr(self._actor, call)
        return lambda *words: ray.get(method.remote(*words))
