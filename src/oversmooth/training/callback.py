"""`SmoothingCallback` for the Trainer of transformers, and trackers.

`tracker("wandb")` and the like write into the run that is active in this process, whoever began it: the loop itself, the
Hugging Face Trainer or Lightning. TensorBoard has no such thing; there the writer of the loop is given, or a folder.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from oversmooth.environment.versions import without_kernel_hint
from oversmooth.errors import MissingDependency, UnknownName
from oversmooth.training.monitor import WatchesTraining

Logger = Callable[[dict[str, float], int], object]
"""Called with flat names and numbers, and the step."""


def tensorboard(place: Any) -> Logger:
    """To a `SummaryWriter`, or to a new one in a folder; TensorBoard shows all files of a folder as one run."""
    writer = place
    if isinstance(place, str | Path):
        writer = _module("torch.utils.tensorboard", package="tensorboard").SummaryWriter(log_dir=str(place))

    def log(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


TRACKERS: dict[str, Callable[..., object]] = {
    # The axis that the Trainer's curves have too.
    "wandb": lambda module, numbers, step: module.log({**numbers, "train/global_step": step}),
    "mlflow": lambda module, numbers, step: module.log_metrics(numbers, step=step),
    "trackio": lambda module, numbers, step: module.log(numbers, step=step),
}
"""Those that know which run is active: the name of the module, and how it takes numbers."""


def tracker(name: str) -> Logger:
    """The function of a tracker by its name."""
    if name not in TRACKERS:
        raise UnknownName("tracker", name, tuple(TRACKERS))
    return partial(TRACKERS[name], _module(name))


def folder_of_own_events(root: Path) -> Path | None:
    """The folder below `root` in which this process has begun a TensorBoard file last, if it has."""
    # Names are events.out.tfevents.SECONDS.HOST.PROCESS.COUNT
    own = [path for path in root.rglob("events.out.tfevents.*") if path.name.split(".")[-2] == str(os.getpid())]
    return max(own, key=lambda path: path.stat().st_mtime_ns).parent if own else None


def _module(name: str, package: str | None = None) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = package or name
        raise MissingDependency(package, package, f"logging to {package}") from error


# --- the monitor as a callback of the Hugging Face Trainer, and of every trainer made from it ---

try:
    with without_kernel_hint():
        from transformers import TrainerCallback
except ImportError as error:
    raise MissingDependency("transformers", "hf", "SmoothingCallback") from error


class SmoothingCallback(WatchesTraining, TrainerCallback):
    """Measures `batches` before training, every `every` steps, and at the end.

    The numbers go to the trackers that the Trainer reports to (TensorBoard, Weights & Biases, MLflow, Trackio), to its
    `log_history`, and to a JSONL `file` that `oversmooth report FILE` turns into curves over training. `rules`,
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
