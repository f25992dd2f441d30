"""`atlas`: the table of a survey as the few numbers per model that its page needs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from oversmooth.errors import BrokenFile
from oversmooth.output.atlas import GRID, AtlasModel, render_atlas
from oversmooth.results import Row
from oversmooth.surveys.table import ABOUT, SurveyTable

MODEL = (
    *("target", "status", "reason", "family", "year", "d_model", "n_layers", "block_parameters", "mean_tendency"),
    *("sharpening_share", "oversmooth"),
)
LAYER = (
    *("target", "stack", "relative_depth", "tendency", "dominating_real", "folded_dominating_real"),
    "norm_negative_share",
)


def atlas_html(folder: str | Path) -> str:
    """The page of a survey; models are in the order of their names."""
    place = Path(folder)
    if not (place / ABOUT).is_file():
        advice = "Make one: oversmooth survey LIST --out FOLDER"
        raise BrokenFile(str(folder), "the folder of a survey", f"no {ABOUT}", advice)
    table = SurveyTable(place)
    rows = table.models(MODEL)
    models = sorted(_models(table), key=lambda model: model.target)
    if not models:
        raise BrokenFile(str(folder), "a survey with models", "none", "Run oversmooth survey LIST --out FOLDER first.")
    versions = ", ".join(sorted({str(row["oversmooth"]) for row in rows if row["oversmooth"]})) or "no model read"
    return render_atlas(models, folder=str(folder), versions=versions)


def _models(table: SurveyTable) -> Iterator[AtlasModel]:
    """Part by part, so that the layers of all models are never in memory together."""
    for part in table.parts():
        layers: dict[str, list[Row]] = defaultdict(list)
        for row in table.part_rows(part, "layer", LAYER):
            layers[row["target"]].append(row)
        for model in table.part_rows(part, "model", MODEL):
            known = {name: model[name] for name in MODEL if name != "oversmooth"}
            yield AtlasModel(**known, **_of_layers(layers[model["target"]]))


def _of_layers(layers: Sequence[Row]) -> dict[str, Any]:
    signs = [row["norm_negative_share"] for row in layers if row["norm_negative_share"] is not None]
    folded = [(row["folded_dominating_real"], row["dominating_real"]) for row in layers]
    dominating = [plain if first is None else first for first, plain in folded]
    return {
        "norm_negative_share": max(signs, default=None),
        "tendency": _over_depth(layers),
        "dominating": tuple(value for value in dominating if value is not None),
    }


def _over_depth(layers: Sequence[Row]) -> tuple[float | None, ...]:
    """Tendency at points of relative depth, of every stack by interpolation between its layers, then their mean."""
    import numpy as np

    stacks: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in layers:
        if row["tendency"] is not None:
            stacks[row["stack"]].append((row["relative_depth"], row["tendency"]))
    if not stacks:
        return ()
    grid = np.linspace(0, 1, GRID)
    curves = [np.interp(grid, *np.array(sorted(points)).T) for points in stacks.values()]
    return tuple(np.mean(curves, axis=0).tolist())
