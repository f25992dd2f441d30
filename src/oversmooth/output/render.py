"""Renders a page as HTML, Markdown or a model card, or serves it while it changes.

`/` is the page and `/figures.json` its numbers and sentences, which the page asks for every few seconds and shows in
place. Nothing else is served, to nobody but this machine: the server listens on the loopback address and refuses other
host names, so that a page on the web cannot read it by pointing a name of its own at 127.0.0.1.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from oversmooth.environment.files import write_whole
from oversmooth.environment.markdown import code_text, line_text, plain_text, table_text
from oversmooth.errors import BadValue, MissingDependency, OversmoothError
from oversmooth.output.blocks import Bars, Block, Items, Page, Pair, Plot, Strip, Table, Words
from oversmooth.results import Analysis, Measurement
from oversmooth.results.wording import headline

# --- A `Page` as one self-contained HTML file ---


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


def write_page(page: Page, path: Path) -> None:
    """Writes the page as one self-contained HTML file."""
    html = render(page)
    write_whole(path, lambda partial: partial.write_text(html, encoding="utf-8"))


# --- A page as Markdown, for pull requests and model cards ---


def markdown_of(page: Page) -> str:
    """The whole page, headings from the second level on."""
    parts = [f"## {line_text(page.title)}", f"**{line_text(page.verdict)}**", line_text(page.summary)]
    parts.append("\n".join(f"- {line_text(finding.text)}" for finding in page.findings))
    parts.append("\n".join(f"- {line_text(name)}: {line_text(value)}" for name, value in page.facts))
    for section in page.sections:
        parts += [f"### {line_text(section.title)}" if section.title else "", line_text(section.lead)]
        parts += [text for block in section.blocks for text in _block(block)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield table_text([column.name for column in block.columns], [[c.shown for c in row] for row in block.rows])
    elif isinstance(block, Plot):
        yield f"*{line_text(block.alt)}*"
    elif isinstance(block, Pair):
        yield from (f"*{line_text(plot.alt)}*" for plot in block.plots)
    elif isinstance(block, Strip):
        yield "\n".join(
            f"- {line_text(i.title)}: {line_text(i.word)}; {line_text('; '.join(i.lines))}" for i in block.items
        )
    elif isinstance(block, Bars):
        rows = [[row.title, *(bar.shown for bar in row.bars), row.words] for row in block.rows]
        yield table_text(["", *block.columns, ""], rows)
    elif isinstance(block, Items):
        yield "\n".join(f"- {line_text(item)}" for item in block.items)
    elif isinstance(block, Words):
        yield (f"[{block.mark}] " if block.mark else "") + line_text(block.text)


# --- A section for a model card: the hub's evaluation results as YAML, and the same for readers ---

SHOWN = {"cosine": "mean cosine between tokens", "hfc_lfc": "HFC/LFC", "effective_rank_share": "effective rank share"}
"""Metrics of a card, with what they are called there."""


def card(analysis: Analysis, name: str) -> str:
    """Front matter with `model-index`, and a Markdown section; `name` is that of the model."""
    return f"{model_index(analysis, name)}\n{card_section(analysis)}"


def model_index(analysis: Analysis, name: str) -> str:
    """The metadata block that the hub reads; every string is quoted as JSON is, which YAML understands."""
    lines = ["---", "model-index:", f"- name: {json.dumps(name)}", "  results:"]
    measurement = analysis.measurement
    results = _last(measurement) if measurement is not None else {}
    if measurement is None or not results:
        return "\n".join([*lines[:-1], "  results: []", "---", ""])
    lines += ["  - task:", "      type: feature-extraction", "      name: smoothing of token features"]
    lines += ["    dataset:", "      type: own", f"      name: {json.dumps(measurement.data.description)}"]
    lines += [f"      revision: {json.dumps(measurement.data.sha256)}", "    metrics:"]
    for metric, value in results.items():
        lines += [
            f"    - type: {json.dumps(metric)}",
            f"      name: {json.dumps(SHOWN[metric] + ' after the last block')}",
        ]
        lines += [f"      value: {value:.6g}"]
    return "\n".join([*lines, "---", ""])


def card_section(analysis: Analysis) -> str:
    """What a reader of the card should know, and how to repeat it."""
    parts = ["## Oversmoothing", line_text(headline(analysis))]
    if analysis.measurement is not None:
        parts.append(_over_depth(analysis.measurement))
        data = analysis.measurement.data
        sequences = f"{data.sequences} sequence{'s' * (data.sequences != 1)}"
        parts.append(f"Measured on {sequences}, {data.tokens:,} tokens: {plain_text(data.description)}.")
    version = dict(analysis.inspection.provenance.versions).get("oversmooth", "")
    made = f"Made with oversmooth {plain_text(version)}"
    parts.append(made + (f": {code_text(analysis.command)}." if analysis.command else "."))
    return "\n\n".join(parts) + "\n"


def _over_depth(measurement: Measurement) -> str:
    """First, middle and last block."""
    rows = []
    for metric in [name for name, _ in measurement.definitions if name in SHOWN]:
        curve = [point.mean for point in measurement.curve(metric) if point.mean is not None]
        if curve:
            rows.append([SHOWN[metric], *(f"{curve[i]:.3f}" for i in (0, len(curve) // 2, -1))])
    return table_text(["", "embedding", "half way", "after the last block"], rows)


def _last(measurement: Measurement) -> dict[str, float]:
    found = {}
    for metric in [name for name, _ in measurement.definitions if name in SHOWN]:
        curve = [point.mean for point in measurement.curve(metric) if point.mean is not None]
        if curve:
            found[metric] = curve[-1]
    return found


# --- A page that is made anew whenever it is asked for, on this machine only: `oversmooth watch` ---

LOOPBACK = "127.0.0.1"
UPDATES = "figures.json"


def page_server(make: Callable[[], Page], port: int = 0) -> ThreadingHTTPServer:
    """A server on the loopback address; port 0 takes a free one. It serves when `serve_forever` is called."""
    try:
        server = ThreadingHTTPServer((LOOPBACK, port), _handler(make))
    except (OSError, OverflowError) as error:
        raise BadValue("--port", port, f"a free port ({error})") from error
    server.daemon_threads = True
    return server


def _handler(make: Callable[[], Page]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.headers.get("Host", "").rpartition(":")[0]
            if name not in (LOOPBACK, "localhost"):
                self._answer(403, "text/plain", "This page is for this machine only.\n")
            elif self.path == "/":
                self._made(lambda page: ("text/html", render(page)))
            elif self.path == f"/{UPDATES}":
                self._made(lambda page: ("application/json", json.dumps(_news(page), allow_nan=False)))
            else:
                self._answer(404, "text/plain", "There is only one page: /\n")

        def _made(self, text_of: Callable[[Page], tuple[str, str]]) -> None:
            try:
                kind, text = text_of(replace(make(), updates=UPDATES))
            except OversmoothError as error:  # a file that is being replaced; the page asks again
                self._answer(503, "text/plain", f"{error}\n")
                return
            self._answer(200, kind, text)

        def _answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            with suppress(ConnectionError, TimeoutError):  # the browser went away: nobody is left to answer
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing: the terminal belongs to the user."""

    return Handler


def _news(page: Page) -> dict[str, Any]:
    """What changes on a page while a run trains; `parts` tells whether it still has the same ones."""
    return {
        "parts": page.parts,
        "verdict": page.verdict,
        "facts": [list(fact) for fact in page.facts],
        "findings": [asdict(finding) for finding in page.findings],
        "tables": {table.id: [[asdict(cell) for cell in row] for row in table.rows] for table in page.tables},
        "figures": figures_of(page),
    }
