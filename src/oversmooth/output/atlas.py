"""The page of a survey."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from oversmooth.errors import BrokenFile, MissingDependency
from oversmooth.output.render import script_safe
from oversmooth.results import Row
from oversmooth.surveys.table import ABOUT, SurveyTable

# --- the picture of a survey as one self-contained HTML file: plain lists in, a page with filters out ---

GRID = 21
"""Points of relative depth at which the tendency of a model is known to the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasModel:
    """What the page knows of one model; lists are empty where it was not read."""

    target: str
    status: str
    reason: str | None
    family: str | None
    year: int | None
    d_model: int | None
    n_layers: int | None
    block_parameters: int | None
    mean_tendency: float | None
    sharpening_share: float | None
    norm_negative_share: float | None
    """Largest share of negative weights in a norm of attention, over its layers."""
    tendency: tuple[float | None, ...] = ()
    """At `GRID` points of relative depth, between layers by interpolation."""
    dominating: tuple[float, ...] = ()
    """Real part of the dominating eigenvalue of every layer."""


def render_atlas(models: Sequence[AtlasModel], *, folder: str, versions: str) -> str:
    """The page; every name in it is escaped, in the HTML and in the data that its script reads."""
    try:
        import jinja2
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingDependency("plotly and jinja2", "report", "an atlas") from error
    own = files(__package__)

    def text(name: str) -> Markup:
        return Markup((own / name).read_text(encoding="utf-8"))

    style = (files("oversmooth.output") / "page.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(str(text("atlas.html.j2"))).render(
        folder=folder,
        versions=versions,
        count=len(models),
        read=sum(model.status == "read" for model in models),
        style=Markup(style) + text("atlas.css"),
        script=text("atlas.js"),
        plotly=Markup(get_plotlyjs()),
        data=Markup(script_safe(_columns(models))),
    )


def _columns(models: Sequence[AtlasModel]) -> dict[str, Any]:
    """Columns rather than rows, and no more digits than a screen shows: thousands of models in a few megabytes."""
    rows = [asdict(model) for model in models]
    names = tuple(AtlasModel.__dataclass_fields__)
    return {name: [_short(row[name]) for row in rows] for name in names}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return [_short(item) for item in value] if isinstance(value, tuple | list) else value


# --- `atlas`: the table of a survey as the few numbers per model that its page needs ---

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
    for level in ("model", "layer"):
        table.files(level)  # each is as it was written
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
