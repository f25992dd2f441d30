"""The monitor as a callback of the Hugging Face Trainer, and of every trainer made from it (SFTTrainer, ...)."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oversmooth.environment.kernel_hint import without_kernel_hint
from oversmooth.errors import MissingDependency
from oversmooth.training.trackers import TRACKERS, Logger, folder_of_own_events, tensorboard, tracker
from oversmooth.training.watching import WatchesTraining

try:
    with without_kernel_hint():
        from transformers import TrainerCallback
except ImportError as error:
    raise MissingDependency("transformers", "hf", "SmoothingCallback") from error


class SmoothingCallback(WatchesTraining, TrainerCallback):
    """Measures `batches` before training, every `every` steps, and at the end.

    The numbers go to the trackers that the Trainer reports to (TensorBoard, Weights & Biases, MLflow, Trackio), to its
    `log_history`, and to a JSONL `file` that `oversmooth report --run FILE` turns into curves over training. `rules`,
    `patience` and `on_collapse` are those of `Monitor`: with "stop", a collapse ends the training.
    """

    loggers: tuple[Logger, ...] = ()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.loggers = tuple(_loggers(args)) if state.is_world_process_zero else ()
        self.begin(model)
        if state.global_step % self.every == 0 and not _measured_before(state):  # a resumed run begins anywhere
            self._measure(state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.note_loss((logs or {}).get("loss"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._measure(state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every:
            self._measure(state, control)

    def _measure(self, state: Any, control: Any) -> None:
        numbers, is_enough = self.measure(state.global_step)
        if is_enough:
            control.should_training_stop = True
        if numbers is None:  # another process than the first
            return
        state.log_history.append({"step": state.global_step, **numbers})
        for log in self.loggers:
            log(numbers, state.global_step)


def _measured_before(state: Any) -> bool:
    """Whether this step was measured by the run that is continued."""
    names = (name for line in state.log_history if line.get("step") == state.global_step for name in line)
    return any(name.startswith("smoothing/") for name in names)


def _loggers(args: Any) -> Iterable[Logger]:
    """One for each tracker that the Trainer reports to, which has begun its run before us."""
    for name in args.report_to:
        if name == "tensorboard":
            root = os.environ.get("TENSORBOARD_LOGGING_DIR") or args.output_dir
            folder = folder_of_own_events(Path(root).expanduser())
            if folder is not None:
                yield tensorboard(folder)
        elif name in TRACKERS:
            yield tracker(name)
