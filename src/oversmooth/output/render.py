"""Renders a page as HTML, Markdown or a model card, or serves it while it changes.

`/` is the page and `/figures.json` its numbers and sentences, which the page asks for every few seconds and shows in
place. Nothing else is served, to nobody but this machine: the server listens on the loopback address and refuses other
host names, so that a page on the web cannot read it by pointing a name of its own at 127.0.0.1.
"""

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from oversmooth.environment.files import code_text, line_text, plain_text, table_text, write_whole
from oversmooth.errors import BadValue, MissingDependency, OversmoothError
from oversmooth.output.blocks import FOOTER, Block, Card, Figure, Items, Page, Pair, Table, Words
from oversmooth.output.card import told_of
from oversmooth.output.charts import FONT, HALF, WIDTHS, HeatMap, style, svg, variables
from oversmooth.results import Analysis, Measurement
from oversmooth.results.answer import Told
from oversmooth.results.wording import headline

# --- A `Page` as one self-contained HTML file ---

SHORT = 28
"""Letters of a name that fits on one line of a headline."""
TERMS = {
    "mean cosine": "Cosine of the angle between two tokens of one text, mean over all pairs: 0 unrelated, 1 the same.",
    "shared": "The part of a token's squared length that lies in what all tokens of its text have in common.",
    "untrained copy": "The same architecture with fresh random weights, on the same inputs.",
    "95% interval": "Where the mean would lie in 95 of 100 samples of as many inputs (Student's t).",
    "effective rank": "How many directions tokens differ in, once their mean is taken away (exponential of the entropy).",
    "HFC/LFC": "What differs between tokens over what they share, as lengths; 0 means fully smoothed.",
    "feed-forward": "The two-layer network of each block that acts on every token by itself.",
    "final norm": "The normalization behind the last block, before heads and users read the features.",
    "ρ_dc": "Growth per repetition of what all tokens share: the largest |1 + λ|.",
    "ρ_ac": "Growth per repetition of what differs between tokens, at the measured attention.",
    "sink": "A position that gets a large share of a head's attention whatever the text says.",
    "exponent": "log ρ_ac - log ρ_dc: negative smooths, positive sharpens, per repetition of the layer.",
    "acting map": "The value map as the block uses it: with the norms that act before the sum multiplied in.",
    "rung": "A step from the theorem (0) to the measurement; each adds one thing that the theorem leaves out.",
}
"""What a reader who points at a term is told."""


def render(page: Page) -> str:
    """The page as HTML, with styles, script and charts inside; everything that is not ours is escaped."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise MissingDependency("jinja2", "report", "a report") from error

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(own("template.html.j2"))
    shown: set[str] = set()
    return template.render(
        page=page,
        css=Markup(page_style()),
        script=Markup(own("page.js")),
        chart_style=Markup(style(0)),
        footer=FOOTER,
        WIDTHS=WIDTHS,
        HALF=HALF,
        drawn_at=lambda chart, widths: Markup(drawn_at(chart, widths)),
        hover_data=lambda chart: Markup(f" data-heat='{in_quotes(heat)}'") if (heat := heat_of(chart)) else "",
        kind_of=_kind_of,
        unbroken=lambda text: Markup(unbroken(text)),
        terms=lambda text: Markup(with_terms(text, shown)),
        explained=lambda name: Markup(f' title="{escape(TERMS[name], quote=True)}"') if name in TERMS else "",
        data_uri=lambda text: "data:image/svg+xml;base64," + base64.b64encode(text.encode()).decode(),
    )


def own(name: str) -> str:
    """A file beside this module."""
    return (files(__package__) / name).read_text(encoding="utf-8")


def page_style() -> str:
    """Letters and colours of both themes, of charts too; paper is white."""
    dark = f"{variables(1)}color-scheme:dark;"
    return (
        f":root{{--letters:{FONT};{variables(0)}}}"
        f'@media (prefers-color-scheme:dark){{:root:not([data-theme="light"]){{{dark}}}}}'
        f':root[data-theme="dark"]{{{dark}}}\n{style(scope=".chart ")}\n{own("page.css")}'
        f"@media print{{:root:root:root{{{variables(0)}color-scheme:light}}}}"
    )


def drawn_at(chart: Figure, widths: Mapping[str, int]) -> str:
    """The chart at every width, of which CSS shows one."""
    return "".join(svg(chart, width, name, again=k > 0) for k, (name, width) in enumerate(widths.items()))


def heat_of(chart: Figure) -> str:
    """What pointing at the cells of a heat map says."""
    if not isinstance(chart, HeatMap):
        return ""
    values = [[None if value is None else float(f"{value:.2g}") for value in row] for row in chart.values]
    heat = {"rows": chart.rows, "columns": chart.columns, "row": chart.row_title, "column": chart.column_title}
    return json.dumps({**heat, "values": values}, separators=(",", ":"), allow_nan=False)


def in_quotes(text: str) -> str:
    """JSON inside an attribute with single quotes."""
    return text.replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;")


def _kind_of(block: Block) -> str:
    kinds = {Pair: "pair", Table: "table", Items: "items", Words: "words"}
    return kinds.get(type(block), "figure")


def unbroken(text: str) -> str:
    """The text as HTML, names with hyphens on one line."""
    words = [escape(word) for word in text.split()]
    return " ".join(f"<span>{word}</span>" if "-" in word and len(word) < SHORT else word for word in words)


def with_terms(text: str, shown: set[str]) -> str:
    """The text as HTML, each term explained where it stands for the first time."""
    found = escape(text)
    for term, meaning in TERMS.items():
        pattern = re.compile(rf"(?<![\w-]){re.escape(escape(term))}(?![\w-])(?![^<]*</abbr>)(?![^<]*>)", re.IGNORECASE)
        if term not in shown and (match := pattern.search(found)):
            shown.add(term)
            abbr = f'<abbr title="{escape(meaning, quote=True)}">{match.group()}</abbr>'
            found = found[: match.start()] + abbr + found[match.end() :]
    return found


def figures_of(page: Page) -> dict[str, tuple[str, str]]:
    """Every chart below the card, drawn, and what its cells say."""
    halves = {c.id for s in page.sections for b in s.blocks if isinstance(b, Pair) for c in b.charts}
    return {c.id: (drawn_at(c, HALF if c.id in halves else WIDTHS), heat_of(c)) for c in page.figures}


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
    parts += [line_text(page.subject), *(_card(page.card) if page.card else ())]
    for brief in page.briefs:
        parts += [f"**{line_text(brief.name)}: {line_text(brief.headline)}**", line_text(brief.deck), _told(brief.told)]
    parts.append("\n".join(f"- {line_text(finding.text)}" for finding in page.findings))
    parts.append("\n".join(f"- {line_text(name)}: {line_text(value)}" for name, value in page.facts))
    for section in page.sections:
        parts += [f"### {line_text(section.title)}" if section.title else "", line_text(section.lead)]
        parts += [text for block in section.blocks for text in _block(block)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _card(card: Card) -> Iterator[str]:
    yield _told(card.told)
    figures: list[Figure] = [*card.gauges, *([card.chart] if card.chart else [])]
    yield from (f"*{line_text(figure.alt)}*" for figure in figures)
    yield line_text(card.yardstick)


def _told(told: tuple[tuple[str, Told], ...]) -> str:
    return "\n".join(
        f"- {line_text(heading)}: **{line_text(found.title)}** {line_text(found.text)}".rstrip()
        + (f" {code_text(found.command)}" if found.command else "")
        for heading, found in told
    )


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield table_text([column.name for column in block.columns], [[c.shown for c in row] for row in block.rows])
    elif isinstance(block, Items):
        yield "\n".join(f"- {line_text(item)}" for item in block.items)
    elif isinstance(block, Words):
        text = line_text(block.text)
        yield f"#### {text}" if block.kind == "heading" else (f"[{block.mark}] " if block.mark else "") + text
    else:
        charts = block.charts if isinstance(block, Pair) else (block,)
        yield from (f"*{line_text(chart.alt)}*" for chart in charts)


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
    if (answer := analysis.answer) is not None:
        parts += [line_text(answer.deck), _told(told_of(answer)[:3])]
    if analysis.measurement is not None:
        data = analysis.measurement.data
        sequences = f"{data.sequences} sequence{'s' * (data.sequences != 1)}"
        parts.append(f"Measured on {sequences}, {data.tokens:,} tokens: {plain_text(data.description)}.")
    version = dict(analysis.inspection.provenance.versions).get("oversmooth", "")
    made = f"Made with oversmooth {plain_text(version)}"
    parts.append(made + (f": {code_text(analysis.command)}." if analysis.command else "."))
    return "\n\n".join(parts) + "\n"


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
