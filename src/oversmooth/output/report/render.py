"""A `Page` as one self-contained HTML file."""

import json
from importlib.resources import files
from typing import Any

from oversmooth.errors import MissingDependency
from oversmooth.output.report.blocks import Page, Pair, Plot


def render(page: Page) -> str:
    """The page as HTML, with Plotly, styles, script and data inside; everything that is not ours is escaped."""
    try:
        import jinja2
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingDependency("plotly and jinja2", "report", "a report") from error
    folder = files(__package__)

    def own(name: str) -> Markup:
        return Markup((folder / name).read_text(encoding="utf-8"))

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(str(own("template.html.j2")))
    return template.render(
        page=page,
        css=own("page.css"),
        script=own("page.js"),
        plotly=Markup(get_plotlyjs()),
        figures=Markup(script_safe(figures_of(page))),
    )


def figures_of(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for block in (block for section in page.sections for block in section.blocks):
        plots = block.plots if isinstance(block, Pair) else (block,) if isinstance(block, Plot) else ()
        found |= {plot.id: plot.figure for plot in plots}
    return found


def script_safe(value: Any) -> str:
    """JSON inside a script element: no `<`, `>` or `&` that HTML could take for markup."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
