"""Where checks get their analyses and runs from; what several claims need is made once, and kept on the disk.

Every run is an `oversmooth train` of its own on one thread, as many at once as there are cores: the command in its
manifest gives the same weights. A run that is there is not trained again and one that was killed goes on from its last
checkpoint, so that `reproduce` can be stopped and started at any time.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from oversmooth.analysis import Stage, analyze
from oversmooth.errors import RunFailed
from oversmooth.models.opening import open_source
from oversmooth.output.whole_files import make_folder
from oversmooth.results import Analysis, no_progress
from oversmooth.training.recipes.manifest import Manifest, read_manifest


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
        """Relative to the output folder."""
        parts = [self.recipe, self.label, self.variant, f"seed{self.seed}"]
        return "runs/" + "-".join(part for part in parts if part)

    def arguments(self, out: Path) -> list[str]:
        """Of `oversmooth`."""
        found = ["train", self.recipe, "--variant", self.variant, "--seed", str(self.seed)]
        found += ["--fraction", str(self.fraction)] if self.fraction != 1 else []
        for override in self.overrides:
            found += ["--set", override]
        return [*found, "--out", str(out / self.folder), "--resume"]


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


def run_command(arguments: Sequence[str]) -> None:
    """`oversmooth` with these arguments, in a process of its own on one thread."""
    done = subprocess.run(
        [sys.executable, "-m", "oversmooth", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise RunFailed(shlex.join(["oversmooth", *arguments]), (done.stderr.strip().splitlines() or ["nothing"])[-1])


@dataclass
class Workshop:
    """What the checks of one `reproduce` share."""

    out: Path
    targets: tuple[str, ...]
    """Pretrained models, for the survey."""
    seeds: tuple[int, ...] = (0, 1, 2)
    command: Callable[[Sequence[str]], None] = run_command
    stage: Stage = lambda name: no_progress
    _analyses: dict[str, Analysis] = field(default_factory=dict)
    _trained: dict[Wanted, Trained] = field(default_factory=dict)

    def surveyed(self) -> list[tuple[str, Analysis]]:
        """Every pretrained model by a short name, analysed once."""
        return [(short_name(target), self._analysed(target)) for target in self.targets]

    def _analysed(self, target: str) -> Analysis:
        if target not in self._analyses:
            self.stage(f"Analysing {short_name(target)}")
            self._analyses[target] = analyze(target, max_samples=8, solve=2)
        return self._analyses[target]

    def require_targets(self) -> None:
        """Refuses a model that is not there or not declared, before anything is trained."""
        for target in self.targets:
            open_source(target).stacks()

    def hashes(self) -> dict[str, str]:
        """Of the weights of every model that was analysed."""
        return {
            short_name(target): found.inspection.provenance.weights_sha256 for target, found in self._analyses.items()
        }

    def train(self, wanted: Sequence[Wanted]) -> None:
        """Trains what is not there yet."""
        missing = [each for each in dict.fromkeys(wanted) if not self._is_finished(each)]
        if not missing:
            return
        make_folder(self.out / "runs")
        progress = self.stage("Training")
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for done, _ in enumerate(pool.map(lambda each: self.command(each.arguments(self.out)), missing), 1):
                progress(done, len(missing))

    def _is_finished(self, wanted: Wanted) -> bool:
        manifest = read_manifest(self.out / wanted.folder)
        return manifest is not None and manifest.finished

    def trained(self, wanted: Wanted) -> Trained:
        """The run, from the disk where it is there; read once, because several claims look at it."""
        if wanted not in self._trained:
            self.train([wanted])
            self._trained[wanted] = self._read(wanted)
        return self._trained[wanted]

    def _read(self, wanted: Wanted) -> Trained:
        folder = self.out / wanted.folder
        manifest = read_manifest(folder)
        assert manifest is not None, "a finished run has one"
        saved = json.loads((folder / "analysis.json").read_text(encoding="utf-8"))
        return Trained(folder=wanted.folder, manifest=manifest, analysis=Analysis.from_dict(saved))


def short_name(target: str) -> str:
    """The last two parts of a path or hub id."""
    parts = [part for part in target.rstrip("/").split("/") if part]
    return "/".join(parts[-2:])
