"""A training run as it is planned, and the processes that train many of them.

Every run is what `oversmooth train` does, on one thread, as many at once as there are cores: the command in its manifest
gives the same weights.
"""

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from oversmooth.errors import OversmoothError, RunFailed
from oversmooth.results import Progress
from oversmooth.training.recipes.runner import RunRequest
from oversmooth.training.recipes.train import load_recipe, train


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One training run."""

    recipe: str
    variant: str
    seed: int
    fraction: float = 1.0
    overrides: tuple[str, ...] = ()
    data: str | None = None
    """What to train on instead of the recipe's own source."""
    label: str = ""
    """Names the condition, in the name of its folder; without it the recipe does."""
    analyzes: bool = True
    """Whether its model is analysed at the end; nobody looks at those of runs that choose a learning rate."""

    @property
    def folder(self) -> str:
        """Relative to the output folder."""
        return f"runs/{self.label or self.recipe}-{self.variant}-seed{self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides its bits; a manifest says the same of the run that was made (`settings_of`)."""
        recipe = load_recipe(self.recipe, self.overrides).model_dump(mode="json")
        return {"variant": self.variant, "seed": self.seed, "fraction": self.fraction, "recipe": recipe}

    def arguments(self, out: Path) -> list[str]:
        """Of `oversmooth`."""
        found = ["train", self.recipe, "--variant", self.variant, "--seed", str(self.seed)]
        found += ["--data", self.data] if self.data else []
        found += ["--fraction", str(self.fraction)] if self.fraction != 1 else []
        for override in self.overrides:
            found += ["--set", override]
        found += [] if self.analyzes else ["--no-analyze"]
        return [*found, "--out", str(out / self.folder), "--resume"]


def settings_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Of a finished run, as those of a planned one."""
    return {name: manifest[name] for name in ("variant", "seed", "fraction", "recipe")}


def train_one(planned: PlannedRun, out: Path) -> str | None:
    """One run, in this process on one thread; what went wrong, if something did."""
    torch.set_num_threads(1)
    request = RunRequest(
        name=planned.recipe,
        out=out / planned.folder,
        variant=planned.variant,
        seed=planned.seed,
        fraction=planned.fraction,
        overrides=planned.overrides,
        resume=True,
        analyzes=planned.analyzes,
        command=shlex.join(["oversmooth", *planned.arguments(Path())]),
    )
    try:
        train(request, planned.data)
    except OversmoothError as error:
        return str(error)
    return None


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent, which may have been killed before it could say so."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def train_all(planned: Sequence[PlannedRun], out: Path, progress: Progress) -> None:
    """Every run on one thread, as many at once as there are cores, in processes that stay for the runs that follow."""
    pool = ProcessPoolExecutor(
        os.cpu_count() or 1, mp_context=get_context("spawn"), initializer=_end_with, initargs=(os.getpid(),)
    )
    try:
        waiting = {pool.submit(train_one, each, out): each for each in planned}
        for done, future in enumerate(as_completed(waiting), 1):
            if (words := future.result()) is not None:
                raise RunFailed(shlex.join(["oversmooth", *waiting[future].arguments(out)]), words.splitlines()[0])
            progress(done, len(planned))
    finally:
        pool.shutdown(cancel_futures=True)  # what is under way ends first, and is not lost
