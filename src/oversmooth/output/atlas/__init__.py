"""The picture of a survey as one self-contained HTML file: plain lists in, a page with filters out."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from oversmooth.errors import MissingDependency
from oversmooth.output.report.render import script_safe

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

    style = (files("oversmooth.output.report") / "page.css").read_text(encoding="utf-8")
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
