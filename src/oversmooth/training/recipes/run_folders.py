"""The folder of a run, read as it is: finished, running or left behind by a run that was killed."""

from pathlib import Path

from oversmooth.errors import BrokenFile
from oversmooth.models.stores.files import LARGEST_JSON, LocalFolder, read_small
from oversmooth.output.report.runs import TrainedRun
from oversmooth.output.report.training import Point, read_run
from oversmooth.results import Analysis
from oversmooth.results.json_text import json_object
from oversmooth.training.recipes.log_state import METRICS
from oversmooth.training.recipes.manifest import NAME as MANIFEST
from oversmooth.training.recipes.manifest import read_manifest
from oversmooth.training.recipes.variants import FORMS

ANALYSIS = "analysis.json"

FOLD = "data.fold="
"""Which part is tested on is drawn like a seed: folds of one variant belong together."""


def is_run_folder(path: Path) -> bool:
    """Whether a folder is that of a run, rather than of a model."""
    return (path / MANIFEST).is_file()


def read_run_folder(folder: Path, *, with_analysis: bool = True) -> TrainedRun:
    """What a run was to do, what it logged so far, and what became of it."""
    manifest = read_manifest(folder)
    if manifest is None:
        advice = "Give the folder that `oversmooth train` printed."
        raise BrokenFile(str(folder), f"the folder of a run, with {MANIFEST}", "none", advice)
    form = FORMS.get(manifest.variant)
    return TrainedRun(
        where=str(folder),
        recipe=manifest.name,
        variant=manifest.variant,
        seed=manifest.seed,
        settings=tuple(override for override in manifest.overrides if not override.startswith(FOLD)),
        intends=intention(manifest.variant),
        eigenvalues=form.words if form is not None and form.scale == "plain" else "",
        steps=manifest.steps,
        is_finished=manifest.finished,
        points=_points(folder / METRICS),
        results=manifest.results,
        analysis=_analysis(folder / ANALYSIS) if with_analysis else None,
    )


def intention(variant: str) -> str:
    """What a form of H is made for, where it can have one sign only."""
    form = FORMS.get(variant)
    if form is None or form.low < 0 < form.high:
        return ""
    return "sharpening" if form.high <= 0 else "smoothing"


def _points(path: Path) -> list[Point]:
    """Nothing before the first line is written."""
    return read_run(path) if path.is_file() and path.stat().st_size else []


def _analysis(path: Path) -> Analysis | None:
    if not path.is_file():
        return None
    content = read_small(LocalFolder(path.parent), path.name, LARGEST_JSON)
    return Analysis.from_dict(json_object(content, str(path), "the analysis of a run"), where=str(path))
