"""How much of the budget is spent, by steps or by the clock, and what depends on it: the rate and the batch."""

import json
import time
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Protocol, runtime_checkable

CLOCK_FILE = "clock.json"
Batch = tuple[int, int]
"""The place of its first sequence in the run, and how many there are."""


def triangle(share: float, *, peak: float, start_share: float = 0.25, peak_at: float = 0.75) -> float:
    """Linear from `start_share * peak` to `peak` at `peak_at` of the budget, then linear to 0 at its end.

    >>> [triangle(s, peak=1.0) for s in (0.0, 0.375, 0.75, 0.875, 1.0)]
    [0.25, 0.625, 1.0, 0.5, 0.0]
    """
    if share < peak_at:
        return peak * (start_share + (1 - start_share) * share / peak_at)
    return peak * max(0.0, (1 - share) / (1 - peak_at))


def ramped_batch(share: float, *, batch: int, ramp: float, quantum: int) -> int:
    """The batch at a share of the budget: grows by `quantum` sequences and reaches `batch` at `ramp` of the budget.

    >>> [ramped_batch(s, batch=8192, ramp=0.6, quantum=128) for s in (0.0, 0.3, 0.59, 0.6, 1.0)]
    [128, 4224, 8064, 8192, 8192]
    """
    if share >= ramp:
        return batch
    return min(batch, (int(batch * share / ramp / quantum) + 1) * quantum)


@runtime_checkable
class Plan(Protocol):
    """What a training run asks at every step."""

    def share(self, step: int) -> float:
        """Of the budget, spent before this step."""
        ...

    def batch_of(self, step: int) -> Batch: ...


class StepPlan:
    """A budget of steps: everything is a function of the step, so that a run can be repeated and taken up anywhere."""

    def __init__(self, steps: int, *, batch: int, ramp: float, quantum: int):
        self.steps = steps
        sizes = (ramped_batch(s / steps, batch=batch, ramp=ramp, quantum=quantum) for s in range(steps))
        self.firsts = [0, *accumulate(sizes)]
        """Sequences before each step, and at the end those of the whole run."""

    def share(self, step: int) -> float:
        return step / self.steps

    def batch_of(self, step: int) -> Batch:
        return self.firsts[step], self.firsts[step + 1] - self.firsts[step]

    def step_of(self, sequence: int) -> int:
        """The step that reads a sequence."""
        return bisect_right(self.firsts, sequence) - 1


class ClockPlan:
    """A budget of hours: the time is looked at once per step, in the first process, and shared with the others.

    `save` and `load` carry the spent time and the place in the corpus over an interruption.
    """

    def __init__(
        self, hours: float, *, batch: int, ramp: float, quantum: int, now: Callable[[], float] = time.monotonic
    ):
        self.seconds = hours * 3600
        self.batch, self.ramp, self.quantum = batch, ramp, quantum
        self.spent = 0.0
        self.place = 0
        self._now = now
        self._began: float | None = None

    def begin(self) -> None:
        self._began = self._now() - self.spent

    def measured(self) -> float:
        """Seconds that are spent by now, over all sessions; `tick` makes them count."""
        return self.spent if self._began is None else self._now() - self._began

    def tick(self, spent: float) -> None:
        self.spent = spent

    @property
    def is_over(self) -> bool:
        return self.spent >= self.seconds

    def share(self, step: int) -> float:
        return min(1.0, self.spent / self.seconds)

    def batch_of(self, step: int) -> Batch:
        size = ramped_batch(self.share(step), batch=self.batch, ramp=self.ramp, quantum=self.quantum)
        first = self.place
        self.place += size
        return first, size

    def save(self, folder: Path) -> None:
        text = json.dumps({"spent": self.spent, "place": self.place})
        (folder / CLOCK_FILE).write_text(text, encoding="utf-8")

    def load(self, folder: Path) -> None:
        saved = json.loads((folder / CLOCK_FILE).read_text(encoding="utf-8"))
        self.spent, self.place = float(saved["spent"]), int(saved["place"])
