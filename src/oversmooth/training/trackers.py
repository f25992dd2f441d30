"""Numbers of the monitor to experiment trackers: one function each, made to be given as `log=` of `Monitor`.

`tracker("wandb")` and the like write into the run that is active in this process, whoever began it: the loop itself, the
Hugging Face Trainer or Lightning. TensorBoard has no such thing; there the writer of the loop is given, or a folder.
"""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from oversmooth.errors import MissingDependency, UnknownName

Logger = Callable[[dict[str, float], int], None]
"""Called with flat names and numbers, and the step."""


def tensorboard(place: Any) -> Logger:
    """To a `SummaryWriter`, or to a new one in a folder; TensorBoard shows all files of a folder as one run."""
    writer = _writer(place) if isinstance(place, str | Path) else place

    def log(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def wandb() -> Logger:
    """To the active run of Weights & Biases; `train/global_step` is the axis that the Trainer's curves have too."""
    module = _module("wandb")
    return lambda numbers, step: module.log({**numbers, "train/global_step": step})


def mlflow() -> Logger:
    """To the active run of MLflow."""
    module = _module("mlflow")
    return lambda numbers, step: module.log_metrics(numbers, step=step)


def trackio() -> Logger:
    """To the active run of Trackio."""
    module = _module("trackio")
    return lambda numbers, step: module.log(numbers, step=step)


TRACKERS: dict[str, Callable[[], Logger]] = {"wandb": wandb, "mlflow": mlflow, "trackio": trackio}
"""Those that know which run is active."""


def tracker(name: str) -> Logger:
    """The function of a tracker by its name."""
    if name not in TRACKERS:
        raise UnknownName("tracker", name, tuple(TRACKERS))
    return TRACKERS[name]()


def folder_of_own_events(root: Path) -> Path | None:
    """The folder below `root` in which this process has begun a TensorBoard file last, if it has."""
    # Names are events.out.tfevents.SECONDS.HOST.PROCESS.COUNT
    own = [path for path in root.rglob("events.out.tfevents.*") if path.name.split(".")[-2] == str(os.getpid())]
    return max(own, key=lambda path: path.stat().st_mtime_ns).parent if own else None


def _writer(folder: str | Path) -> Any:
    return _module("torch.utils.tensorboard", package="tensorboard").SummaryWriter(log_dir=str(folder))


def _module(name: str, package: str | None = None) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = package or name
        raise MissingDependency(package, package, f"logging to {package}") from error
