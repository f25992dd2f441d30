"""The page of a survey."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from oversmooth.errors import BrokenFile, MissingDependency
from oversmooth.output.charts import Axis, Chart, Line, Panel, extent, numbers
from oversmooth.output.render import WIDTHS, drawn_at, own, page_style, script_safe
from oversmooth.output.run_pages import sparse
from oversmooth.results import Row
from oversmooth.results.base import signed
from oversmooth.results.inspection import CLEARLY
from oversmooth.surveys.table import ABOUT, SurveyTable

# --- the picture of a survey as one self-contained HTML file: plain lists in, a page with filters out ---

FIRST = 100
"""Models in the table of a page without script."""
SUMMARY = (
    "The excess of a layer is log(ρ_dc / ρ_dc by chance). ρ_dc = max |1 + λ| over the eigenvalues λ of its value map is how "
    "much the layer strengthens what all tokens share; chance turns maps of the same singular values at random. ρ_dc alone "
    "lies above 1 in random layers too. Facts about weights: they predict no features."
)
GRID = 11
"""Points of relative depth at which the excess of a model is known to the page."""


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
    mean_excess: float | None
    mean_excess_spread: float | None
    """By chance."""
    above_chance_share: float | None
    """Of its layers."""
    mean_positivity: float | None
    norm_negative_share: float | None
    """Largest share of negative weights in a norm of attention, over its layers."""
    excess: tuple[float | None, ...] = ()
    """At `GRID` points of relative depth, between layers by interpolation."""


def render_atlas(models: Sequence[AtlasModel], *, folder: str, versions: str) -> str:
    """The page; every name in it is escaped, in the HTML and in the data that its script reads."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise MissingDependency("jinja2", "report", "an atlas") from error
    ranked = sorted(models, key=lambda model: (model.mean_excess is None, -(model.mean_excess or 0.0)))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(own("atlas.html.j2")).render(
        folder=folder,
        versions=versions,
        count=len(models),
        read=sum(model.status == "read" for model in models),
        verdict=atlas_words(models),
        summary=SUMMARY,
        ranks=Markup(drawn_at(_ranks(ranked), WIDTHS)),
        first=ranked[:FIRST],
        style=Markup(page_style() + own("atlas.css")),
        script=Markup(own("atlas.js")),
        data=Markup(script_safe(_columns(models))),
    )


def atlas_words(models: Sequence[AtlasModel]) -> str:
    """What the weights of all models together say, beyond chance."""
    if not any(model.status == "read" for model in models):
        return f"None of {len(models):,} models could be read."
    known = [(m.mean_excess, m.mean_excess_spread or 0.0) for m in models if m.mean_excess is not None]
    if not known:
        return "What chance gives was worked out for no layer of these models."
    above, below = (sum(side * excess > CLEARLY * spread for excess, spread in known) for side in (1, -1))
    middle = signed(median(excess for excess, _ in known)).replace("-", "\N{MINUS SIGN}")
    if len(known) == 1:
        how = "more than chance would" if above else "less than chance would" if below else "as chance would"
        return f"This model's weights strengthen what tokens share {how} (excess {middle})."
    return (
        f"The weights of {above:,} of {len(known):,} models strengthen what tokens share more than chance would, of "
        f"{below:,} less (median excess {middle})."
    )


def _ranks(ranked: Sequence[AtlasModel]) -> Chart:
    """All models from the largest mean excess to the smallest: what is there before the script draws dots."""
    known = [(float(k), model.mean_excess) for k, model in enumerate(ranked) if model.mean_excess is not None]
    shown = sparse(known) or [(0.0, 0.0)]
    x, y = zip(*shown, strict=True)
    axis = Axis(low=0.0, high=max(x[-1], 1.0), ticks=(), title=f"{len(known)} models, sorted")
    title = "Mean excess over chance"
    panel = Panel(title=title, y=numbers(*extent(y, zero=True)), marks=(Line(name="", x=x, y=y),), height=240)
    return Chart(id="ranks-drawn", alt=f"{title} of {len(known)} models, sorted.", x=axis, panels=(panel,))


def _columns(models: Sequence[AtlasModel]) -> dict[str, Any]:
    """Columns rather than rows, and no more digits than a screen shows: thousands of models in a few megabytes."""
    rows = [asdict(model) for model in models]
    names = tuple(AtlasModel.__dataclass_fields__)
    return {name: [_short(row[name]) for row in rows] for name in names}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.3g}") if math.isfinite(value) else None
    return [_short(item) for item in value] if isinstance(value, tuple | list) else value


# --- `atlas`: the table of a survey as the few numbers per model that its page needs ---

MODEL = (
    *("target", "status", "reason", "family", "year", "d_model", "n_layers", "block_parameters", "mean_excess"),
    *("mean_excess_spread", "above_chance_share", "mean_positivity", "oversmooth"),
)
LAYER = ("target", "stack", "relative_depth", "excess", "norm_negative_share")


def atlas_of(folder: str | Path) -> tuple[list[AtlasModel], str]:
    """The models of a survey in the order of their names, and which versions wrote it."""
    place = Path(folder)
    if not (place / ABOUT).is_file():
        advice = "Make one: oversmooth survey LIST -o FOLDER"
        raise BrokenFile(str(folder), "the folder of a survey", f"no {ABOUT}", advice)
    table = SurveyTable.to_read(place)
    for level in ("model", "layer"):
        table.files(level)  # each is as it was written
    rows = table.models(MODEL)
    models = sorted(_models(table), key=lambda model: model.target)
    if not models:
        raise BrokenFile(str(folder), "a survey with models", "none", "Run oversmooth survey LIST -o FOLDER first.")
    return models, ", ".join(sorted({str(row["oversmooth"]) for row in rows if row["oversmooth"]})) or "no model read"


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
    return {
        "norm_negative_share": max(signs, default=None),
        "excess": _over_depth(layers),
    }


def _over_depth(layers: Sequence[Row]) -> tuple[float | None, ...]:
    """Excess at points of relative depth, of every stack by interpolation between its layers, then their mean."""
    import numpy as np

    stacks: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in layers:
        if row["excess"] is not None:
            stacks[row["stack"]].append((row["relative_depth"], row["excess"]))
    if not stacks:
        return ()
    grid = np.linspace(0, 1, GRID)
    curves = [np.interp(grid, *np.array(sorted(points)).T) for points in stacks.values()]
    return tuple(np.mean(curves, axis=0).tolist())
