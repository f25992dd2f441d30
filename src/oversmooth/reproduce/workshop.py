"""Where checks get their analyses and runs from; what several claims need is made once, and kept on the disk.

A run that is there is not trained again, and one that was killed goes on from its last checkpoint, so that
`reproduce` can be stopped and started at any time.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from oversmooth.analyze import Stage, analyze
from oversmooth.recipes.kinds import train
from oversmooth.recipes.manifest import Manifest
from oversmooth.recipes.runner import Asked
from oversmooth.results import Analysis, no_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One training run."""

    recipe: str
    variant: str
    seed: int
    fraction: float = 1.0
    overrides: tuple[str, ...] = ()
    label: str = ""
    """Says what the overrides are for, in the name of its folder."""

    @property
    def folder(self) -> str:
        parts = [self.recipe, self.label, self.variant, f"seed{self.seed}"]
        return "-".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A finished run: its results and the analysis of its model."""

    folder: str
    manifest: Manifest
    analysis: Analysis

    def last(self, metric: str) -> float:
        """A metric after the last layer."""
        assert self.analysis.measurement is not None, "a trained model can be run"
        mean = self.analysis.measurement.curve(metric)[-1].mean
        assert mean is not None, f"{metric} has a value"
        return mean


@dataclass
class Workshop:
    """What the checks of one `reproduce` share."""

    out: Path
    targets: tuple[str, ...]
    """Pretrained models, for the survey."""
    seeds: tuple[int, ...] = (0, 1, 2)
    train: Callable[[Asked], object] = field(default=train)
    stage: Stage = lambda name: no_progress
    _analyses: dict[str, Analysis] = field(default_factory=dict)

    def surveyed(self) -> list[tuple[str, Analysis]]:
        """Every pretrained model by a short name, analysed once."""
        return [(_short(target), self._analysed(target)) for target in self.targets]

    def _analysed(self, target: str) -> Analysis:
        if target not in self._analyses:
            self.stage(f"Analysing {_short(target)}")
            self._analyses[target] = analyze(target, max_samples=8, solve=2)
        return self._analyses[target]

    def trained(self, wanted: Wanted) -> Trained:
        """The run, from the disk where it is there."""
        folder = self.out / "runs" / wanted.folder
        command = ["oversmooth", "train", wanted.recipe, "--variant", wanted.variant, "--seed", str(wanted.seed)]
        command += ["--fraction", str(wanted.fraction)] if wanted.fraction != 1 else []
        for override in wanted.overrides:
            command += ["--set", override]
        folder.parent.mkdir(parents=True, exist_ok=True)
        asked = Asked(
            name=wanted.recipe,
            out=folder,
            variant=wanted.variant,
            seed=wanted.seed,
            fraction=wanted.fraction,
            overrides=wanted.overrides,
            resume=True,
            command=shlex.join(command),
        )
        self.stage(f"Training {wanted.folder}")
        self.train(asked)
        return Trained(
            folder=f"runs/{wanted.folder}",
            manifest=Manifest.model_validate_json((folder / "manifest.json").read_text(encoding="utf-8")),
            analysis=Analysis.from_dict(json.loads((folder / "analysis.json").read_text(encoding="utf-8"))),
        )


def _short(target: str) -> str:
    parts = [part for part in target.rstrip("/").split("/") if part]
    return "/".join(parts[-2:])
