"""The monitor as a callback of the Hugging Face Trainer."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oversmooth.data.batches import Batch
from oversmooth.measurement.metrics import Choice
from oversmooth.training.monitor import MONITOR_METRICS, Monitor

if TYPE_CHECKING:
    from transformers import TrainerCallback

PRINTERS = ("ProgressCallback", "PrinterCallback", "NotebookProgressCallback")
"""Callbacks that print to the screen, where dozens of numbers per layer would bury the loss."""


def _siblings() -> tuple[Any, ...]:
    """The other callbacks of the Trainer that is calling.

    The Trainer tells a callback nothing about the others; the handler that calls us, a few frames up, knows them. Where
    it is not found the numbers still reach the file and the log history.
    """
    frame = sys._getframe(1)
    while frame is not None:
        handler = frame.f_locals.get("self")
        if handler is not None and hasattr(handler, "callbacks") and hasattr(handler, "call_event"):
            return tuple(handler.callbacks)
        frame = frame.f_back  # type: ignore[assignment]
    return ()


def smoothing_callback(
    every: int = 100,
    batches: Sequence[Batch] = (),
    *,
    metrics: Choice | Iterable[Choice] = MONITOR_METRICS,
    file: str | Path | None = None,
) -> "TrainerCallback":
    """A callback that measures `batches` before training, every `every` steps, and at the end.

    The numbers go to whatever the Trainer reports to (TensorBoard, W&B, ...), to its `log_history`, and to a JSONL
    `file` that `oversmooth report --run FILE` turns into curves over training.
    """
    from transformers import TrainerCallback

    class SmoothingCallback(TrainerCallback):
        monitor: Monitor | None = None
        reporters: tuple[Any, ...] = ()

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.reporters = tuple(c for c in _siblings() if c is not self and type(c).__name__ not in PRINTERS)
            self.monitor = Monitor(getattr(model, "module", model), batches, every=every, metrics=metrics, file=file)
            self._measure_when_due(args, state, control)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._measure_when_due(args, state, control)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % every:
                self._measure(args, state, control)

        def _measure_when_due(self, args: Any, state: Any, control: Any) -> None:
            if state.global_step % every == 0:  # a resumed run begins between two measurements
                self._measure(args, state, control)

        def _measure(self, args: Any, state: Any, control: Any) -> None:
            if self.monitor is None or not state.is_world_process_zero:
                return
            numbers = self.monitor.measure(state.global_step)
            state.log_history.append({"step": state.global_step, **numbers})
            for reporter in self.reporters:
                reporter.on_log(args, state, control, logs=dict(numbers), model=self.monitor.model)

    return SmoothingCallback()
