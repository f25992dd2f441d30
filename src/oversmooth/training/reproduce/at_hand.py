"""The survey of everything at hand, beside claims 1 and 2: what weights alone say of the pretrained models and of every
finished run. It is shown, and no verdict rests on it: their rules were written before it.

OUT/survey/   the table, as `oversmooth survey` writes it; `oversmooth atlas OUT/survey` shows it
"""

import re
from pathlib import Path

from oversmooth.errors import MissingDependency
from oversmooth.surveys.survey import survey
from oversmooth.surveys.table import SurveyTable
from oversmooth.training.recipes.manifest import read_manifest
from oversmooth.training.reproduce.experiments import TUNINGS
from oversmooth.training.reproduce.materials import Materials, Row

TABLE = "survey"
COLUMNS = ("target", "status", "n_layers", "sharpening_share", "smoothing_share", "mean_tendency")
SEED = re.compile(r"-seed\d+$")


def weights_at_hand(materials: Materials) -> list[Row]:
    """A row per pretrained model and per condition of the runs that are there; none where Parquet cannot be written.

    A table that a stopped run left is continued: what it holds is not computed again.
    """
    names = {target: ("pretrained", materials.names[target]) for target in materials.targets}
    names |= {str(run / "model"): ("trained", SEED.sub("", run.name)) for run in _finished_runs(materials.out)}
    if not names:
        return []
    try:
        survey(tuple(names), materials.out / TABLE, engine="serial")
    except MissingDependency:
        return []
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in SurveyTable(materials.out / TABLE).models(COLUMNS):
        if row["target"] in names and row["mean_tendency"] is not None:
            groups.setdefault(names[row["target"]], []).append(row)
    return [_summary(kind, name, groups[kind, name]) for kind, name in sorted(groups)]


def _finished_runs(out: Path) -> list[Path]:
    """All but those that only chose a learning rate."""
    choosing = tuple(f"{tuning.name}-" for tuning in TUNINGS)
    runs = (path for path in (out / "runs").glob("*") if not path.name.startswith(choosing))
    folders = sorted(path for path in runs if (path / "model" / "config.json").is_file())
    manifests = {folder: read_manifest(folder) for folder in folders}
    return [folder for folder, manifest in manifests.items() if manifest is not None and manifest.finished]


def _summary(kind: str, name: str, rows: list[Row]) -> Row:
    """Of models that differ in their seed only: how many of their layers sharpen or smooth by their weights, how much."""
    layers = sum(row["n_layers"] for row in rows)
    shares = {
        name: round(sum(row[name] * row["n_layers"] for row in rows) / layers, 4)
        for name in ("sharpening_share", "smoothing_share")
    }
    return {
        "model": name,
        "kind": kind,
        "models": len(rows),
        "layers": layers,
        **shares,
        "mean_tendency": round(sum(row["mean_tendency"] for row in rows) / len(rows), 4) + 0.0,  # never -0.0
    }
