"""The monitor as a callback of Lightning."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from oversmooth.data.batches import Batch
from oversmooth.errors import MissingDependency
from oversmooth.measurement.limits import limits_of
from oversmooth.measurement.metrics import Choice
from oversmooth.training.monitor import MONITOR_METRICS, Monitor

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise MissingDependency("lightning", "lightning", "oversmooth.lightning") from error


class SmoothingCallback(Callback):
    """Measures `batches` before training, every `every` optimizer steps, and at the end; logs to the Trainer's loggers.

    `model` names the part of the LightningModule that is measured, as an attribute or a function of it; without it, its own
    `forward` is run. The other options are those of `Monitor`: with `on_collapse="stop"`, a collapse ends the training.
    """

    def __init__(
        self,
        every: int = 100,
        batches: Sequence[Batch] = (),
        *,
        model: str | Callable[[Any], nn.Module] | None = None,
        metrics: Choice | Iterable[Choice] = MONITOR_METRICS,
        file: str | Path | None = None,
        rules: Mapping[str, object] | None = None,
        patience: int = 1,
        on_collapse: str = "warn",
    ):
        limits_of(rules or {})  # a mistake is told now, and not after the data have been prepared
        self.every = every
        self.model = model
        self.monitor: Monitor | None = None
        self._batches = batches
        self._measured_at = -1
        self._options: dict[str, Any] = {
            "every": every,
            "metrics": metrics,
            "file": file,
            "rules": rules,
            "patience": patience,
            "on_collapse": on_collapse,
        }

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.monitor = Monitor(self._measured(pl_module), self._batches, **self._options)
        if trainer.global_step % self.every == 0:
            self._measure(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.monitor is not None, "training has begun"
        loss = outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else outputs
        if loss is not None:
            self.monitor.note_loss(float(loss))
        if trainer.global_step % self.every == 0:
            self._measure(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._measure(trainer)

    def _measured(self, pl_module: Any) -> nn.Module:
        if callable(self.model) and not isinstance(self.model, str):
            return self.model(pl_module)
        found: nn.Module = getattr(pl_module, self.model) if self.model else pl_module
        return found

    def _measure(self, trainer: Any) -> None:
        """Once per step: with accumulated gradients several batches end at one."""
        assert self.monitor is not None, "training has begun"
        if trainer.global_step == self._measured_at:
            return
        self._measured_at = trainer.global_step
        numbers = self.monitor.measure(trainer.global_step)
        if self.monitor.should_stop:
            trainer.should_stop = True
        if numbers is not None:
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)
