"""SmoothingCallback of Lightning, where its users look."""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from torch import nn

from oversmooth.data.batches import Batch
from oversmooth.errors import MissingDependency
from oversmooth.training.monitor import WatchesTraining, WatchOptions

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise MissingDependency("lightning", "lightning", "oversmooth.lightning") from error


class SmoothingCallback(WatchesTraining, Callback):
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
        **options: Unpack[WatchOptions],
    ):
        super().__init__(every, batches, **options)
        self.model = model
        self._measured_at = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin(self._measured(pl_module))
        if trainer.global_step % self.every == 0:
            self._measure(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note_loss(outputs.get("loss") if isinstance(outputs, dict) else outputs)
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
        if trainer.global_step == self._measured_at:
            return
        self._measured_at = trainer.global_step
        numbers, is_enough = self.measure(trainer.global_step)
        if is_enough:
            trainer.should_stop = True
        if numbers is not None:
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)
