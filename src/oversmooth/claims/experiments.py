"""The training runs that claims rest on, and the processes that train them.

Every run is what `oversmooth train` does, on one thread, as many at once as there are cores: the command in its manifest
gives the same weights.

On digits a unit is a fold: its own seed and its own fifth of the images to be tested on, so that five units test every image
once. On text it is a seed. `quick` is the same with so few steps that nothing has converged: it shows that everything runs.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch

from oversmooth.environment.versions import end_with_parent
from oversmooth.errors import OversmoothError, RunFailed
from oversmooth.recipes.train import RunRequest, load_recipe, train
from oversmooth.results import Progress


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
        return [*found, "--output", str(out / self.folder), "--resume"]


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


def train_all(planned: Sequence[PlannedRun], out: Path, progress: Progress) -> None:
    """Every run on one thread, as many at once as there are cores, in processes that stay for the runs that follow."""
    pool = ProcessPoolExecutor(os.cpu_count() or 1, get_context("spawn"), end_with_parent)
    try:
        waiting = {pool.submit(train_one, each, out): each for each in planned}
        for done, future in enumerate(as_completed(waiting), 1):
            if (words := future.result()) is not None:
                raise RunFailed(shlex.join(["oversmooth", *waiting[future].arguments(out)]), words.splitlines()[0])
            progress(done, len(planned))
    finally:
        pool.shutdown(cancel_futures=True)  # what is under way ends first, and is not lost


# --- the training runs that claims rest on: recipes under conditions ---

FOLDS = SEEDS = 5
"""Units of every condition that decides."""
TREND_SEEDS = 3
"""Units of conditions that decide nothing."""
FRESH = 10
"""The first seed of every run that is judged, and the split of its folds: lower ones were looked at while rules took form."""
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
"""Learning rates that every variant tries, each in a run that is judged on what is held out of the training data."""
Rates = Mapping[str, Mapping[str, float | None]]
"""The rate that was chosen, by the experiment that chose it and the variant; `None` for the recipe's own."""
EARLY_EPOCH = 5
"""When early speed is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One recipe under one condition."""

    name: str
    recipe: str
    units: int
    fraction: float = 1.0
    overrides: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    """More overrides for a smoke check."""
    is_in_quick: bool = True
    """Whether a smoke check runs it at all."""
    is_folded: bool = False
    first_seed: int = FRESH
    """Of its units; on digits also the seed of the split into folds."""
    score: Literal["accuracy", "loss"] = "accuracy"
    """What its runs are judged by: the highest accuracy, or the lowest loss."""
    tuned_by: "Experiment | None" = None
    """Whose runs choose the learning rate of each variant; the recipe's own without one."""

    def planned(self, variant: str, unit: int, rate: float | None = None) -> PlannedRun:
        overrides = self.overrides
        if self.is_folded:
            overrides += (f"data.folds={FOLDS}", f"data.fold={unit}")
            overrides += (f"data.split_seed={self.first_seed}",) if self.first_seed else ()
        if rate is not None:
            overrides += (f"optimizer.learning_rate={rate:g}",)
        return PlannedRun(
            recipe=self.recipe,
            variant=variant,
            seed=self.first_seed + unit,
            fraction=self.fraction,
            overrides=overrides,
            label=self.name,
        )

    def for_scale(self, is_quick: bool) -> "Experiment":
        if not is_quick:
            return self
        units = min(2, self.units) if self.is_in_quick else 0
        return replace(self, overrides=self.overrides + self.quick, units=units)


_SMALL = ("model.depth=6", "training.epochs=25", f"watch.evaluate_every={EARLY_EPOCH}", "watch.save_every=25")
_DEEP = ("training.epochs=20", f"watch.evaluate_every={EARLY_EPOCH}", "watch.save_every=20", "watch.monitor_every=20")
_BRIEF = ("training.epochs=2", "watch.evaluate_every=1", "watch.save_every=2", "training.warmup_epochs=0.5")
_VALIDATED = "data.validation_images=288"
TUNING = Experiment(
    name="digits-rates",
    recipe="digits",
    units=1,
    overrides=(*_SMALL, "watch.monitor_every=25", _VALIDATED),
    quick=("training.epochs=1", "watch.evaluate_every=1", "watch.save_every=1", "training.warmup_epochs=0.5"),
    is_folded=True,
    first_seed=0,
)
DEEP_TUNING = replace(
    TUNING, name="digits-12-layers-rates", overrides=(*_DEEP, _VALIDATED), quick=(), is_in_quick=False
)
DIGITS = Experiment(
    name="digits",
    recipe="digits",
    units=FOLDS,
    overrides=(*_SMALL, "watch.monitor_every=25", "evaluation.corruptions=true", "evaluation.corruption_images=60"),
    quick=(*_BRIEF, "evaluation.corruption_images=10"),
    is_folded=True,
    tuned_by=TUNING,
)
_HUNDRED = ("training.epochs=100", *(f"watch.{what}_every=100" for what in ("evaluate", "save", "monitor")))
TENTH = replace(
    DIGITS, name="digits-tenth", fraction=0.1, overrides=("model.depth=6", *_HUNDRED), quick=(), is_in_quick=False
)
DEEP = replace(DIGITS, name="digits-12-layers", overrides=_DEEP, quick=_BRIEF, tuned_by=DEEP_TUNING)
_POSITIVE_NORMS = (*_DEEP, "variant.positive_norms=true")
POSITIVE = replace(DEEP, name="digits-12-layers-positive-norms", overrides=_POSITIVE_NORMS, is_in_quick=False)
FOLDED = frozenset(each.name for each in (DIGITS, TENTH, DEEP, POSITIVE))
"""Settings whose units share training images: every image is for training in four folds of five."""


BUDGETS = (150, 300, 600)


def _steps(steps: int) -> tuple[str, ...]:
    return (f"training.steps={steps}", *(f"watch.{what}_every={steps}" for what in ("monitor", "evaluate", "save")))


TEXT_TUNING = Experiment(
    name="mini-bert-rates",
    recipe="mini-bert",
    units=1,
    overrides=(*_steps(BUDGETS[-1]), "data.tuning_sequences=256"),
    is_in_quick=False,
    first_seed=0,
    score="loss",
)


MINI_BERT = tuple(
    Experiment(
        name=f"mini-bert-{steps}",
        recipe="mini-bert",
        units=SEEDS if steps == BUDGETS[-1] else TREND_SEEDS,
        overrides=_steps(steps),
        quick=("training.steps=30",),
        is_in_quick=steps == BUDGETS[-1],
        tuned_by=TEXT_TUNING,
    )
    for steps in BUDGETS
)
"""Three budgets: the trend says more than one of them, the last decides."""
TUNINGS = (TUNING, DEEP_TUNING, TEXT_TUNING)


def runs_of(experiment: Experiment, variants: Sequence[str], rates: Rates | None = None) -> list[PlannedRun]:
    """Every unit of every variant, each at its own rate where the experiment is tuned.

    A variant whose rate could not be chosen, because a run that chooses it is missing, has no runs yet.
    """
    chosen = (rates or {}).get(experiment.tuned_by.name) if experiment.tuned_by else None
    there = variants if chosen is None else [variant for variant in variants if variant in chosen]
    return [
        experiment.planned(variant, unit, (chosen or {}).get(variant))
        for unit in range(experiment.units)
        for variant in there
    ]
