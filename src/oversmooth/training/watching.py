"""What the callbacks of all trainers share: options, checked when they are given, and a monitor once training begins."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from torch import nn

from oversmooth.data.batches import Batch
from oversmooth.errors import BadValue
from oversmooth.measurement.limits import limits_of
from oversmooth.measurement.metrics import Choice
from oversmooth.training.monitor import MONITOR_METRICS, Monitor


class WatchOptions(TypedDict, total=False):
    """Keywords of every callback; `Monitor` says what each means."""

    metrics: Choice | Iterable[Choice]
    file: str | Path | None
    rules: Mapping[str, object] | None
    patience: int
    on_collapse: str


class WatchesTraining:
    """Measures `batches` every `every` steps; the other options are those of `Monitor`."""

    def __init__(
        self,
        every: int = 100,
        batches: Sequence[Batch] = (),
        *,
        metrics: Choice | Iterable[Choice] = MONITOR_METRICS,
        file: str | Path | None = None,
        rules: Mapping[str, object] | None = None,
        patience: int = 1,
        on_collapse: str = "warn",
    ):
        limits_of(rules or {})  # a mistake is told now, and not after the data have been prepared
        if every < 1:
            raise BadValue("every", every, "at least 1")
        self.every = every
        self.monitor: Monitor | None = None
        self._batches = batches
        self._options: dict[str, Any] = {
            "every": every,
            "metrics": metrics,
            "file": file,
            "rules": rules,
            "patience": patience,
            "on_collapse": on_collapse,
        }

    def begin(self, model: nn.Module) -> None:
        """Training begins: from now on there is a monitor of this model."""
        self.monitor = Monitor(model, self._batches, **self._options)

    def note_loss(self, loss: object) -> None:
        """A loss of training, where the trainer tells of one."""
        if self.monitor is not None and loss is not None:
            self.monitor.note_loss(float(loss))  # type: ignore[arg-type]  # a number, or a tensor of one

    def measure(self, step: int) -> tuple[dict[str, float] | None, bool]:
        """The numbers, which only the first process has, and whether training should stop, which all of them learn."""
        assert self.monitor is not None, "training has begun"
        return self.monitor.measure(step), self.monitor.should_stop
