"""Every result as a terminal table."""

import csv
import html
import io
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from oversmooth.output.console import MarkdownConsole, new_table, show_heading, writes_markdown
from oversmooth.results import (
    Analysis,
    Comparison,
    Control,
    DataFacts,
    EndOfDepth,
    FinetuneResult,
    Inspection,
    LayerInspection,
    LengthCurves,
    Measurement,
    Null,
    PlaceValue,
    ReadBack,
    Row,
    SavedResult,
    Spectrum,
    Verification,
)
from oversmooth.results.answer import Answer
from oversmooth.results.base import SHOWN_DIGITS, format_cell, signed
from oversmooth.results.changes import Ablation, EditCurve, Loss, Pruning, TaskLoss
from oversmooth.results.prediction import Asymptotic, LayerPrediction, Prediction
from oversmooth.results.reading import BANDS, shown_layers
from oversmooth.results.wording import (
    ablation_words,
    change_words,
    findings,
    first_large,
    first_of,
    headline,
    how_made,
    how_much,
    level,
    no_answer_words,
    stack_words,
    stream_words,
    weights_words,
)

# --- the answer: twelve lines at most, for the terminal, a print and a notebook ---

ANSWER_LINES, ANSWER_WIDTH, INDENT = 12, 88, 12
GAUGE = 46
"""Characters of the gauge from 0 to 1."""


def answer_lines(answer: Answer, width: int = 80) -> list[str]:
    """The answer as text; where it would be too long, sentences of Who, How sure and Where are left out."""
    width = min(width, ANSWER_WIDTH)
    told = [("Where", answer.where), ("Who", answer.who), ("How sure", answer.sure), ("What now", answer.now)]
    texts = {name: [each.title, *_sentences(each.text)] for name, each in told}
    while True:
        lines = [line for name, each in told for line in _told_lines(name, texts[name], each.command, width)]
        head = [f"{answer.model}  {answer.subject}"[:width], "", *_wrapped(answer.headline, width, 2)]
        lines = [*head, *gauge_lines(answer), *lines]
        shortened = next((name for name in ("Who", "How sure", "Where") if len(texts[name]) > 1), None)
        if len(lines) <= ANSWER_LINES or shortened is None:
            return [*lines, *_wrapped(answer.note, width, 2)]  # a note is never the reason to say less
        texts[shortened].pop(0 if shortened == "Who" else -1)  # who does it is in the numbers as well


def _sentences(text: str) -> list[str]:
    return [f"{part.rstrip('.')}." for part in text.split(". ") if part]


def _told_lines(name: str, texts: Sequence[str], command: str, width: int) -> list[str]:
    joined = " ".join(text if text[-1] in ".:" else f"{text}." for text in texts)
    lines = _wrapped(joined, width, INDENT)
    lines[0] = f"  {name}".ljust(INDENT) + lines[0].strip()
    return [*lines, *([" " * INDENT + command] if command else [])]


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent)


def gauge_lines(answer: Answer) -> list[str]:
    """A line from 0 to 1 with input and output, and below it the names of the bands."""
    marks = ["·"] * (GAUGE + 1)
    for band in BANDS[1:]:
        marks[_column(band.start)] = "┊"
    first, last = _column(answer.input), _column(answer.output)
    for at in range(min(first, last), max(first, last) + 1):
        marks[at] = "━"
    marks[first], marks[last] = "○", "●"
    names = " " * (GAUGE + 3)
    for band in BANDS:
        at = _column(max(band.start, 0.0))
        names = names[:at] + band.state + names[at + len(band.state) :]
    state = answer.state if answer.is_sure else f"{answer.state}, not sure"
    return [f"  0 {''.join(marks)} 1   {answer.output:.2f} {state}", f"    {names.rstrip()}"]


def _column(level: float) -> int:
    return round(GAUGE * min(max(level, 0.0), 1.0))


def show_answer(console: Console, answer: Answer) -> None:
    if isinstance(console, MarkdownConsole):  # or its kin for HTML
        console.print(escape(f"{answer.model}: {answer.headline}"), style="bold")
        console.print(escape(answer.deck))
        for name in ("where", "who", "sure", "now"):
            told = getattr(answer, name)
            title = {"sure": "How sure", "now": "What now"}.get(name, name.capitalize())
            text = " ".join(part for part in (told.title, told.text, told.command) if part)
            console.print(escape(f"{title}: {text}"))
        return
    first, last = 2, 2 + len(_wrapped(answer.headline, min(console.width, ANSWER_WIDTH), 2))
    for number, line in enumerate(answer_lines(answer, console.width)):
        console.print(escape(line), style="bold" if first <= number < last else None, soft_wrap=True)


def show_answers(console: Console, answers: Sequence[Answer]) -> None:
    """The one that speaks for the model last, where it is read; of the others the headline."""
    first = first_of(answers)
    for answer in answers:
        if answer is not first:
            console.print(escape(f"{stack_name(answer.stack)}: {answer.headline}"), soft_wrap=True)
    if first is not None:
        console.print("")
        show_answer(console, first)


def stack_name(stack: str) -> str:
    return first_large(stack_words(stack).removeprefix("the "))


# --- a row per layer: the mean cosine, what changed it, and the other metrics ---

GAP = 2
"""Columns between two columns of a table."""
SHORT_PARTS = {
    "attention": "attention",
    "norm after attention": "its norm",
    "cross-attention": "cross",
    "norm after cross-attention": "its norm",
    "feed-forward": "feed-fwd",
    "norm after feed-forward": "its norm",
    "other blocks": "other",
    "between blocks": "between",
    "final norm": "final norm",
}


def curve_table(answer: Answer, title: str = "") -> Table:
    """The mean cosine at the input, after each layer and after the final norm, with what each part adds."""
    parts = [part.part for part in answer.parts if part.part != "final norm"]
    has_untrained = any(point.untrained is not None for point in answer.points)
    table = new_table()
    if title:
        table.title, table.title_justify = title, "left"
    names = ["layer", "mean cosine", "change", *(SHORT_PARTS[part] for part in parts)]
    for name in (*names, *(["untrained"] if has_untrained else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for point, layer in zip(answer.points, (None, *shown_layers(answer.points, answer.layers)), strict=True):
        changes: dict[str, float] = {}
        for part, change in layer.parts if layer else ():
            changes[part] = round(changes.get(part, 0.0) + change, SHOWN_DIGITS)
        cells = [change_words(changes[part]) if part in changes else "" for part in parts]
        fresh = [level(point.untrained) if point.untrained is not None else ""] if has_untrained else []
        table.add_row(
            point.label, level(point.mean), "" if layer is None else change_words(layer.change), *cells, *fresh
        )
    return table


def metric_tables(result: Measurement, stack: str, width: int) -> Iterator[Table]:
    """The metrics other than the mean cosine after each layer; each table has those that fit beside each other."""
    cells: dict[str, dict[str, str]] = {}
    names = [name for name in _metrics_of_layers(result, stack) if name != "cosine"]
    for name in names:
        final = result.final(name, stack)
        for value in (*result.curve(name, stack), *([final] if final else [])):
            label = "final norm" if value is final else "input" if value.depth == 0 else str(value.depth - 1)
            cells.setdefault(label, {})[name] = _mean_cell(value)
    for group in _fitting(names, cells.values(), width - len("final norm") - GAP):
        table = new_table()
        for name in ("layer", *group):
            table.add_column(escape(name), justify="right", no_wrap=True)
        for label, row in cells.items():
            table.add_row(label, *(row.get(name, "-") for name in group))
        yield table


def place_tables(result: Measurement, stack: str, width: int) -> Iterator[Table]:
    """Metrics of sub-blocks, attention and places off the stream, which have no value after each layer."""
    of_layers = _metrics_of_layers(result, stack)
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for value in result.values:
        if value.stack == stack and (value.metric not in of_layers or not value.on_stream):
            label = "input" if value.depth == 0 else str(value.depth - 1)
            cells.setdefault((label, value.place), {})[value.metric] = _mean_cell(value)
    names = [name for name, _ in result.definitions if any(name in row for row in cells.values())]
    room = width - len("input") - max((len(place) for _, place in cells), default=0) - 2 * GAP
    for group in _fitting(names, cells.values(), room):
        table = new_table()
        for name in ("layer", "place", *group):
            table.add_column(escape(name), justify="left" if name == "place" else "right", no_wrap=True)
        for (label, place), row in cells.items():
            if any(name in row for name in group):
                table.add_row(label, place, *(row.get(name, "-") for name in group))
        yield table


def _metrics_of_layers(result: Measurement, stack: str) -> list[str]:
    """Metrics of states; one of a sub-block has no value at the input."""
    found = {value.metric for value in result.values if value.stack == stack and value.depth == 0 and value.on_stream}
    return [name for name, _ in result.definitions if name in found]


def _mean_cell(value: PlaceValue) -> str:
    error = "" if value.standard_error is None else f" ±{value.standard_error:.2g}"
    return "-" if value.mean is None else f"{value.mean:.4g}{error}"


def _fitting(names: Sequence[str], rows: Iterable[Mapping[str, str]], room: int) -> Iterator[list[str]]:
    """Columns in groups that are no wider than there is room."""
    shown = list(rows)
    widths = {name: max(len(name), *(len(row.get(name, "-")) for row in shown)) + GAP for name in names}
    group: list[str] = []
    for name in names:
        if group and sum(widths[other] for other in (*group, name)) > room:
            yield group
            group = []
        group.append(name)
    if group:
        yield group


# --- results as tables for the terminal and as CSV ---

PIPE_WIDTH = 160
"""Columns assumed where the output is not a terminal, so that a pipe or a file gets whole tables."""
INSPECTION_COLUMNS = (
    *("layer", "rho_dc", "chance", "excess", "positivity", "Re(lambda)", "folded", "norm weights"),
    *("at lambda", "Re<0", "asym", "|bias|"),
)
WIDE_COLUMNS = 4
"""How many of the last columns need more than an 80-column terminal."""


def open_console() -> Console:
    """The terminal, or where text, HTML or Markdown is asked for, a console that writes it."""
    if (asked := _ASKED.get()) is not None:
        return asked
    if writes_markdown():
        return MarkdownConsole(width=PIPE_WIDTH)
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


_ASKED: ContextVar[Console | None] = ContextVar("console that is asked for", default=None)
PRINT_WIDTH = 80
"""Columns of `print(result)` where there is no terminal."""


class HtmlConsole(MarkdownConsole):
    """Tables become tables of HTML, and every other print a paragraph."""

    def print(self, *objects: Any, style: Any = None, **_: Any) -> None:
        for item in objects:
            if isinstance(item, Table):
                self.file.write(_html_table(item))
                continue
            text = html.escape(Text.from_markup(str(item), emoji=False).plain)
            tag = "b" if "bold" in str(style or "") else "span"
            self.file.write(f"<p><{tag}>{text}</{tag}></p>" if text.strip() else "")


def _html_table(table: Table) -> str:
    columns = [[Text.from_markup(str(cell), emoji=False).plain for cell in column.cells] for column in table.columns]
    head = "".join(f"<th>{html.escape(str(column.header))}</th>" for column in table.columns)
    rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in zip(*columns, strict=True))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    caption = f"<caption>{html.escape(str(table.title))}</caption>" if table.title else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Recorder(Console):
    """Keeps what is printed, for a console that prints it later."""

    def __init__(self, width: int):
        super().__init__(width=width, file=io.StringIO())
        self.kept: list[RenderableType] = []

    def print(self, *objects: Any, style: Any = None, **_: Any) -> None:
        for item in objects:
            is_text = isinstance(item, str)  # wrapped at the other console's width, which would cut what is longer
            self.kept.append(Text.from_markup(item, style=style or "", emoji=False) if is_text else item)


@dataclass(frozen=True, slots=True)
class Shown:
    """A result as rich prints it, at the width of whatever console that is."""

    result: SavedResult

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        recorder = Recorder(options.max_width)
        yield from recorder.kept if _show_on(recorder, self.result) else [repr(self.result)]


def printed(result: SavedResult, *, as_html: bool = False) -> str:
    """What the terminal shows of a result, as text or for a notebook; its one line where there is no more."""
    terminal, buffer = Console(), io.StringIO()
    width = terminal.width if terminal.is_terminal else PRINT_WIDTH
    kind = HtmlConsole if as_html else Console
    console = kind(file=buffer, width=width, highlight=False, color_system=None, force_terminal=False)
    if not _show_on(console, result):
        return html.escape(repr(result)) if as_html else repr(result)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def _show_on(console: Console, result: SavedResult) -> bool:
    """Prints a result there; false where there is nothing but its one line."""
    show = next((show for kind, show in SHOWS.items() if isinstance(result, kind)), None)
    if show is None:
        return False
    token = _ASKED.set(console)
    try:
        show(result)
    finally:
        _ASKED.reset(token)
    return True


def csv_text(rows: Sequence[Row]) -> str:
    """Rows as CSV, with a line of names."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def show_inspection(result: Inspection, *, heads: bool) -> None:
    console = open_console()
    stack_names = {layer.stack for layer in result.layers}
    show_heading(console, result.provenance)
    for facts in result.stacks:
        size = f"{facts.n_heads} heads of {facts.d_head}" if facts.n_heads else "heads unknown"
        size += f", {facts.n_kv} value heads" if facts.n_kv != facts.n_heads else ""
        blocks = f"{facts.blocks} layers"
        if facts.blocks != facts.blocks_in_model:
            blocks = f"{facts.blocks} of {facts.blocks_in_model} blocks (the others have no softmax attention)"
        name = f"{facts.name}: " if facts.name else ""
        console.print(
            f"{escape(name)}{escape(facts.family)}, {blocks}, width {facts.d_model}, {size}, "
            f"{facts.residual}-norm ({facts.norm})"
        )
        if facts.form:
            console.print(f"  {escape(facts.form)}")
    if result.provenance.found:
        console.print(f"No family is declared for it: its value path was {result.provenance.found}")
    for part in result.missing:
        console.print(escape(f"{part.field}: left out, {part.reason}"), style="bold red")
    table = new_table()
    if len(stack_names) > 1:
        table.add_column("stack")
    shown = len(INSPECTION_COLUMNS) - (WIDE_COLUMNS if console.width < 112 else 0)
    for name in INSPECTION_COLUMNS[:shown]:
        table.add_column(name, justify="right", no_wrap=True)
    for layer in result.layers:
        cells = _inspection_cells(layer)
        table.add_row(*([escape(layer.stack)] if len(stack_names) > 1 else []), *cells[:shown])
    console.print(table)
    console.print(_legend(result), style="dim")
    for layer in result.layers:
        if layer.unreadable:
            console.print(f"[bold red]layer {layer.layer} unreadable:[/] {escape(layer.unreadable)}")
        elif layer.plain and layer.plain.is_defective:
            console.print(f"layer {layer.layer}: H is not diagonalizable to working precision; fewer digits are exact")
    if heads:
        console.print(_head_table(result))


def _inspection_cells(layer: LayerInspection) -> list[str]:
    index = str(layer.layer) if len(layer.passes) == 1 else f"{layer.layer} (x{len(layer.passes)})"
    plain = layer.plain
    if plain is None:
        return [index, *["-"] * (len(INSPECTION_COLUMNS) - 1)]
    low = min((norm.smallest for norm in layer.norms if norm.role.startswith("attn")), default=None)
    high = max((norm.largest for norm in layer.norms if norm.role.startswith("attn")), default=None)
    negative = max((norm.negative_share for norm in layer.norms if norm.role.startswith("attn")), default=0.0)
    norms = (
        "-" if low is None or high is None else f"{low:.2f}..{high:.2f}" + (f" {negative:.0%}<0" if negative else "")
    )
    null = layer.null or Null()
    return [
        index,
        f"{plain.rho_dc:.3f}",
        "-" if null.rho_dc is None else f"{null.rho_dc:.3f}",
        "-" if null.excess is None else signed(null.excess),
        "-" if null.positivity is None else signed(null.positivity),
        f"{plain.min_real:.2f}..{plain.max_real:.2f}",
        "-" if layer.folded is None else f"{layer.folded.rho_dc:.3f}",
        norms,
        _complex(plain),
        "-" if plain.negative_share is None else f"{plain.negative_share:.0%}",
        "-" if layer.asymmetry is None else f"{layer.asymmetry:.2f}",
        "-" if layer.bias_norm is None else f"{layer.bias_norm:.2f}",
    ]


def _complex(spectrum: Spectrum) -> str:
    real, imaginary = spectrum.dominating
    return f"{real:.2f}" if abs(imaginary) < 5e-3 else f"{real:.2f}±{abs(imaginary):.2f}i"


def _legend(result: Inspection) -> str:
    nulls = [layer.null for layer in result.layers if layer.null is not None]
    excess = max((null.excess_spread for null in nulls if null.excess_spread is not None), default=None)
    positivity = max((null.positivity_spread for null in nulls if null.positivity_spread is not None), default=None)
    by_excess = "" if excess is None else f", by chance within ±{2 * excess:.2f}"
    by_positivity = "" if positivity is None else f", by chance within ±{2 * positivity:.2f}"
    return (
        "chance: rho_dc of maps of the same singular values in random directions. "
        f"excess: log(rho_dc / chance){by_excess}. "
        f"positivity: +1 only smooths, -1 only sharpens{by_positivity}.\n{weights_words(result)}"
    )


def _head_table(result: Inspection) -> Table:
    table = new_table()
    rows = result.head_rows()
    for name in rows[0] if rows else ():
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(escape(format_cell(value)) for value in row.values()))
    return table


def show_verification(result: Verification) -> None:
    console = open_console()
    show_heading(console, result.provenance)
    table = new_table()
    for name in ("stack", "layer", "error", "tokens"):
        table.add_column(name, justify="right")
    for layer in result.layers:
        table.add_row(escape(layer.stack), str(layer.layer), f"{layer.error:.2e}", str(layer.tokens))
    console.print(table)
    word = "[bold green]fits[/]" if result.passed else "[bold red]does not fit[/]"
    families = ", ".join(result.provenance.families)
    console.print(
        f"The declaration {families} {word} this model: largest relative error {result.largest_error:.2e} "
        f"(allowed {result.tolerance:g}) in the equal-token identity."
    )
    if result.stream is not None:
        console.print(escape(stream_words(result.stream)))


def show_measurement(result: Measurement) -> None:
    """A row per layer, metrics that have no such row, what stands out, and last the answer."""
    console = open_console()
    show_heading(console, result.provenance)
    partial = " (interrupted: partial)" if result.is_partial else ""
    prefix = "" if result.prefix_tokens == "none" else f", prefix tokens {result.prefix_tokens}"
    show_data(console, result.data, f"{prefix}{partial}")
    if result.stream is not None and result.stream.partial:
        console.print(f"[bold red]{escape(first_large(result.stream.partial))}.[/]")
    answers = result.answers
    for answer in answers:
        console.print(curve_table(answer, stack_name(answer.stack) if len(answers) > 1 else ""))
    for stack in dict.fromkeys(value.stack for value in result.values):
        for table in (*metric_tables(result, stack, console.width), *place_tables(result, stack, console.width)):
            console.print(table)
    for finding in findings(result):
        console.print(escape(finding.text), style="dim", soft_wrap=True)
    for problem in result.problems:
        console.print(f"[bold red]{escape(problem)}[/]")
    if answers:
        show_answers(console, answers)
    else:
        console.print(escape(no_answer_words(result)))


def show_analysis(result: Analysis) -> None:
    """The answer; of a model that was not run, its weights and why."""
    console = open_console()
    if result.answers:
        show_answers(console, result.answers)
        return
    show_inspection(result.inspection, heads=False)
    console.print(escape(headline(result)), soft_wrap=True)


def show_data(console: Console, data: DataFacts, ending: str) -> None:
    """What the model was run on, with everything that a reader of the numbers has to know."""
    console.print(escape(how_much(data) + ending), soft_wrap=True)
    for line in how_made(data):
        console.print(escape(line), style="dim", soft_wrap=True)
    for warning in data.warnings:
        console.print(escape(f"Warning: {warning}"), style="bold yellow", soft_wrap=True)


def show_control(result: Control) -> None:
    console = open_console()
    show_heading(console, result.provenance)
    count = len(result.layers)
    console.print(f"{escape(result.change)}, in {count} layer{'s' * (count != 1)}")
    has_stacks = len({layer.stack for layer in result.layers}) > 1
    table = new_table()
    names = ("layer", "H moved", "heads moved", "Re(lambda) before", "after", "rho_dc", "after", "bias moved", "signs")
    for name in (*(["stack"] if has_stacks else []), *names):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in result.layers:
        moves = [head.moved for head in layer.heads if head.moved is not None]
        table.add_row(
            *([escape(layer.stack)] if has_stacks else []),
            str(layer.layer),
            "-" if layer.moved is None else f"{layer.moved:.2f}",
            f"{min(moves):.2f}..{max(moves):.2f}" if moves else "-",
            f"{layer.before.min_real:.2f}..{layer.before.max_real:.2f}",
            f"{layer.after.min_real:.2f}..{layer.after.max_real:.2f}",
            f"{layer.before.rho_dc:.3f}",
            f"{layer.after.rho_dc:.3f}",
            "-" if layer.constant_moved is None else f"{layer.constant_moved:.2f}",
            str(layer.norm_signs_changed) if layer.norm_signs_changed else "-",
        )
    console.print(table)
    console.print(
        "Moves are relative to the norm: 1 is as far as setting H to zero. bias moved: the vector that biases add to every "
        "token; signs: norm weights whose sign changed.",
        style="dim",
    )
    if result.out is not None:
        show_written(result.out, result.read_back, result.left_out)


def show_written(out: str, read_back: ReadBack | None, left_out: tuple[str, ...]) -> None:
    """Where a checkpoint is, how it was read back, and what of the original is not in it."""
    console = open_console()
    if left_out:
        console.print(
            f"Not copied, because they are links out of the folder or to nowhere: {escape(', '.join(left_out))}"
        )
    if read_back is not None:
        console.print(escape(read_back.words), soft_wrap=True)
    console.print(f"Written to {escape(out)}", soft_wrap=True)


def show_list(rows: Sequence[Row]) -> None:
    """Rows of one kind, a column per field."""
    table = new_table()
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(escape(format_cell(value)) for value in row.values()))
    open_console().print(table)


# --- A prediction as tables for the terminal: the theorem, the ladder beside the measurement ---

LEAK_WORDS = (
    "leak: how much of what all tokens share is turned into differences, because a gate, a sink or a norm on heads "
    "lets every token write with a gain of its own; it works against smoothing."
)
COLOURS = {
    "no clear change": "dim",
    "smoothing": "blue",
    "sharpening": "dark_orange",
    "undecided": "bold red",
    "mixed": "magenta",
}


def show_prediction(result: Prediction, *, heads: bool = False) -> None:
    """Prints everything the prediction holds; details of every layer's verdict are in the JSON."""
    console = open_console()
    show_heading(console, result.provenance)
    partial = " (interrupted: partial)" if result.is_partial else ""
    show_data(console, result.data, f"; eigenvalue problems solved for {result.solved}{partial}")
    stacks = list(dict.fromkeys(layer.stack for layer in result.layers))
    for stack in stacks:
        layers = [layer for layer in result.layers if layer.stack == stack]
        console.print(_ladder_table(result, stack, layers))
        console.print(_rung_words(layers), style="dim")
        if any(layer.leak for layer in layers):
            console.print(LEAK_WORDS, style="dim")
        console.print(_theorem_table(stack, layers))
    _details(console, result, heads=heads)
    console.print("Verdict", style="bold")
    for statement in result.verdict:
        console.print(escape(f"  {_capitalised(statement.text)} [{statement.basis}]"))
    for layer in result.layers:
        for text in _remarks(layer):
            where = f"{layer.stack} " if layer.stack else ""
            console.print(escape(f"  {where}layer {_layer_name(layer)}: {text}"))
    for problem in result.problems:
        console.print(f"[bold red]{escape(problem)}[/]")


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _remarks(layer: LayerPrediction) -> list[str]:
    """Where theory and measurement disagree, where nothing could be decided, and what is guaranteed."""
    return [f"{item.text} [{item.basis}]" for item in layer.verdict if item.is_remark]


def _theorem_table(stack: str, layers: Sequence[LayerPrediction]) -> Table:
    """Infinite repetition of each layer with its norms, and where a norm follows the sum also without it."""
    table = new_table()
    title = "iterated at fixed attention, with the norms of the layer"
    table.title, table.title_justify = f"{stack + ': ' if stack else ''}{title}", "left"
    has_both = any(layer.acting == "plain" and layer.folded is not None for layer in layers)
    names = ("layer", "rho_dc", "rho_ac", "exponent", "half-life", "if repeated")
    for name in (*names, *(["without norm"] if has_both else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in layers:
        without = [_coloured(layer.plain.regime)] if has_both else []
        table.add_row(*_theorem_cells(layer, layer.whole), *without)
    return table


def _theorem_cells(layer: LayerPrediction, found: Asymptotic) -> list[str]:
    error = "" if found.standard_error is None else f" ±{found.standard_error:.1g}"
    bounds = f"{found.rho_ac:.3f}"
    if found.regime == "undecided":
        bounds = f"{found.rho_ac_low:.3g}..{found.rho_ac_high:.3g}"
    return [
        _layer_name(layer),
        f"{found.rho_dc:.3f}",
        bounds,
        "-" if found.exponent is None else f"{signed(found.exponent, 3)}{error}",
        "-" if found.half_life is None else f"{found.half_life:.3g}",
        _coloured(found.regime),
    ]


def _layer_name(layer: LayerPrediction) -> str:
    """The layer whose weights act; of a shared one also the pass."""
    return f"{layer.layer}" if layer.depth == layer.layer + 1 else f"{layer.layer}, pass {layer.depth - 1}"


def _ladder_table(result: Prediction, stack: str, layers: Sequence[LayerPrediction]) -> Table:
    """What was measured of each layer's attention, and the rungs from the theorem to it."""
    table = new_table()
    title = "change of log(HFC/LFC) across attention; below 0 smooths"
    table.title, table.title_justify = f"{stack + ': ' if stack else ''}{title}", "left"
    longest = max((layer.rungs for layer in layers), key=len)
    leaks = any(layer.leak for layer in layers)
    numbers = [str(rung.rung) for rung in longest]
    for name in ("layer", "one pass", "measured", *numbers, *(["leak"] if leaks else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in layers:
        table.add_row(
            _layer_name(layer),
            _coloured(layer.direction, ONE_PASS.get(layer.direction, "not measured")),
            "-" if layer.measured is None else signed(layer.measured),
            *("-" if rung.mean is None else signed(rung.mean) for rung in layer.rungs),
            *[""] * (len(longest) - len(layer.rungs)),
            *(["-" if layer.leak is None else f"{layer.leak:.0%}"] if leaks else []),
        )
    rows = [item for item in result.agreements if item.stack == stack]
    table.add_section()
    for label, shown in (("sign right", "sign_agreement"), ("rank corr.", "rank_correlation")):
        values = [getattr(item, shown) for item in rows]
        cells = ["-" if value is None else f"{value:.0%}" if "sign" in label else f"{value:+.2f}" for value in values]
        table.add_row("", label, "", *cells, style="dim")
    return table


ONE_PASS = {"smoothing": "smooths", "sharpening": "sharpens", "no clear change": "not clear"}


def _rung_words(layers: Sequence[LayerPrediction]) -> str:
    longest = max((layer.rungs for layer in layers), key=len)
    named = ", ".join(f"{rung.rung} {rung.name}" for rung in longest)
    return f"Rungs, from the theorem to the measurement: {named}."


def _coloured(word: str, shown: str = "") -> str:
    colour = COLOURS.get(word)
    return f"[{colour}]{shown or word}[/]" if colour else shown or word


def _details(console: Console, result: Prediction, *, heads: bool) -> None:
    """Heads, what-ifs and simulations, where they were asked for."""
    if heads:
        _show_rows(console, "one head at a time", result.head_rows(), skip=("missing", "depth"))
    if any(layer.what_ifs for layer in result.layers):
        _show_what_ifs(console, result)
    if any(layer.simulation for layer in result.layers):
        title = "repeated at fixed attention, on the first sequence"
        _show_rows(console, title, result.simulation_rows(), skip=("depth",))


def _show_what_ifs(console: Console, result: Prediction) -> None:
    """What each change would do when repeated, and to one pass; changes that mean nothing here are named below."""
    has_stacks = len({layer.stack for layer in result.layers}) > 1
    rows, reasons = [], {}
    for layer in result.layers:
        for change in layer.what_ifs:
            if change.not_applicable:
                reasons[change.name] = change.not_applicable
                continue
            rows.append(
                {
                    **({"stack": layer.stack} if has_stacks else {}),
                    "layer": _layer_name(layer),
                    "what if": change.name,
                    "rho_dc": None if change.rho_dc is None else f"{change.rho_dc:.3f}",
                    "rho_ac": None if change.rho_ac is None else f"{change.rho_ac:.3f}",
                    "if repeated": change.regime,
                    "one pass": None if change.rungs[-1].mean is None else signed(change.rungs[-1].mean),
                    "as it is": None if layer.measured is None else signed(layer.measured),
                }
            )
    if rows:
        _show_rows(console, "what if: change of log(HFC/LFC) across attention in one pass", rows)
    for name, reason in reasons.items():
        console.print(escape(f"{name}: {reason}"), style="dim")


KEYS = ("stack", "layer", "part", "head", "step", "what if")
"""Columns that say what a row is about; they come again where a table is cut into several."""


def _show_rows(console: Console, title: str, rows: Sequence[Row], skip: Sequence[str] = ()) -> None:
    """Rows as tables that fit the terminal."""
    every = dict.fromkeys(name for row in rows for name in row if name not in skip)
    names = [name for name in every if any(row.get(name) not in (None, "") for row in rows)]
    cells = [{name: _cell(row.get(name)) for name in names} for row in rows]
    keys = [name for name in names if name in KEYS]
    room = console.width - sum(max(len(key), *(len(row[key]) for row in cells)) + GAP for key in keys)
    for number, group in enumerate(_fitting([name for name in names if name not in keys], cells, room)):
        table = new_table()
        if number == 0:
            table.title, table.title_justify = title, "left"
        for name in (*keys, *group):
            table.add_column(escape(name), justify="right", no_wrap=True)
        for row in cells:
            table.add_row(*(escape(row[name]) for name in (*keys, *group)))
        console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, tuple):
        real, imaginary = value
        return f"{real:.3g}" if abs(imaginary) < 5e-4 else f"{real:.3g}±{imaginary:.2g}i"
    return format_cell(value)


# --- curves over length as tables for the terminal ---


def show_lengths(result: LengthCurves) -> None:
    """A row per length: every metric behind the last block, what the stack does, and what the theory says of it."""
    console = open_console()
    show_heading(console, result.provenance)
    show_data(console, result.data, "")
    short = f"; {result.left_out} shorter ones left out" if result.left_out else ""
    console.print(f"{result.texts} texts of at least {result.lengths[-1]} tokens{short}")
    metrics = list(dict.fromkeys(value.metric for value in result.values))
    stacks = list(dict.fromkeys(value.stack for value in result.values))
    table = new_table()
    theory = ("layers that would smooth",) if result.predictions else ()
    for name in (*(["stack"] if len(stacks) > 1 else []), "tokens", *metrics, "log(HFC/LFC) changes by", *theory):
        table.add_column(name, justify="right", no_wrap=True)
    for stack in stacks:
        for length in result.lengths:
            values = [result.last(metric, length, stack) for metric in metrics]
            cells = [format_cell(None if value is None else value.mean) for value in values]
            changes = [c.change for c in result.changes if (c.length, c.stack) == (length, stack)]
            cells.append(format_cell(changes[0] if changes else None))
            layers = [p.regime for p in result.predictions if (p.length, p.stack) == (length, stack)]
            cells += [f"{layers.count('smoothing')} of {len(layers)}"] if layers else ["-"] * len(theory)
            table.add_row(*([escape(stack)] if len(stacks) > 1 else []), str(length), *cells)
    console.print(table)
    console.print(result.verdict)
    console.print(
        "Metrics behind the last block; the change of log(HFC/LFC) is from embedding to output, at unit length.",
        style="dim",
    )


# --- losses, ablations and pruned checkpoints as tables for the terminal ---

SHOWN = ("influence", "contribution", "ceiling", "influence_differing", "smoothing_change")


def loss_words(task: str, found: Loss) -> str:
    """One sentence: the loss and what goes with it."""
    if task == "similarity":
        return f"similarity: rank correlation with the original's {1 - found.loss:.4f}, loss {found.loss:.4f}"
    error = "" if found.standard_error is None else f" ±{found.standard_error:.2g}"
    more = "" if found.perplexity is None else f", perplexity {found.perplexity:.4g}"
    more += "" if found.accuracy is None else f", accuracy {found.accuracy:.1%}"
    return f"{task}: loss {found.loss:.4f}{error}{more}"


def show_loss(result: TaskLoss) -> None:
    console = open_console()
    show_heading(console, result.provenance)
    show_data(console, result.data, "")
    console.print(loss_words(result.task, result.found))


def show_ablation(result: Ablation, *, details: bool = False) -> None:
    """What each layer's parts are worth, and which are cheapest and dearest; details: cheap numbers and how they rank."""
    console = open_console()
    show_heading(console, result.provenance)
    show_data(console, result.data, "")
    console.print(f"whole model, {loss_words(result.task, result.whole)}")
    for stack in dict.fromkeys(item.stack for item in result.removals):
        console.print(_removal_table(result, stack))
    if details:
        cheap = [
            {"stack": one.stack, "layer": one.layer, "part": one.part, **dict(one.cheap)} for one in result.removals
        ]
        _show_rows(console, "cheap numbers of each part", [_picked(row) for row in cheap])
        _show_predictors(console, result)
    for line in ablation_words(result):
        console.print(escape(line))


def _removal_table(result: Ablation, stack: str) -> Table:
    """One row per layer: by how much the loss grows without each of its parts."""
    removals = [item for item in result.removals if item.stack == stack]
    parts = list(dict.fromkeys(item.part for item in removals))
    table = new_table()
    title = f"loss grows by, without the {', the '.join(parts)} of a layer"
    table.title, table.title_justify = f"{stack + ': ' if stack else ''}{title}", "left"
    for name in ("layer", *parts):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in dict.fromkeys(item.layer for item in removals):
        grows = {item.part: item.increase for item in removals if item.layer == layer}
        cells = (grows.get(part) for part in parts)
        table.add_row(str(layer), *("-" if value is None else signed(value, 4) for value in cells))
    return table


def _picked(row: Row) -> Row:
    return {name: row.get(name) for name in ("stack", "layer", "part", *SHOWN)}


def _show_predictors(console: Console, result: Ablation) -> None:
    predictors = new_table()
    for name in ("removed", "cheap number", "rank correlation", "95% interval", "parts"):
        predictors.add_column(name, justify="left" if name in ("removed", "cheap number") else "right", no_wrap=True)
    for one in sorted(result.predictors, key=lambda one: (one.part, -abs(one.rank_correlation))):
        interval = "-" if one.interval is None else f"{one.interval[0]:+.2f} to {one.interval[1]:+.2f}"
        predictors.add_row(one.part, one.name, f"{one.rank_correlation:+.2f}", interval, str(one.parts))
    console.print(predictors)
    text = "Rank correlation of each cheap number with what removal costs; an interval that holds 0 says nothing."
    console.print(text, style="dim")


def show_pruning(result: Pruning) -> None:
    console = open_console()
    show_heading(console, result.provenance)
    removed = ", ".join(str(number) for number in result.removed)
    console.print(f"removed blocks {removed} of {result.blocks_before}, chosen by {result.by}")
    console.print(f"before, {loss_words(result.task, result.before)}")
    console.print(f"after, {loss_words(result.task, result.after)}")
    show_written(result.out, result.read_back, result.left_out)


def show_edit_curve(result: EditCurve) -> None:
    console = open_console()
    show_heading(console, result.provenance)
    show_data(console, result.data, "")
    console.print(f"{escape(result.change_words)}; {loss_words(result.task, result.points[0].loss)} as it is")
    show_edit_points(result)


def show_edit_points(result: EditCurve) -> None:
    """Loss and features over strength, and what they say."""
    console = open_console()
    table = new_table()
    for name in ("strength", "loss", "grows by", "mean cosine", "log(HFC/LFC) changes by", "H moved"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in result.points:
        numbers = (format_cell(point.cosine), format_cell(point.change), format_cell(point.moved))
        table.add_row(f"{point.strength:g}", f"{point.loss.loss:.4f}", f"{point.increase:+.4f}", *numbers)
    console.print(table)
    console.print(result.verdict)


# --- the table of `oversmooth finetune` ---

COLUMNS = ("task", "metrics", "score", "spread", "cosine", "HFC/LFC", "smoothing layers")


def show_finetuning(found: FinetuneResult, names: dict[str, str]) -> None:
    """One row per task under its official name: metrics, score with its spread, and smoothing before and after."""
    console, table = open_console(), new_table()
    console.print(escape(f"{found.checkpoint}, seeds {', '.join(map(str, found.seeds))}"), style="bold", soft_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("task", "metrics") else "right", no_wrap=True)
    for row in found.tasks:
        means = {name: sum(values) / len(values) for name, values in row.metrics.items()}
        words = ", ".join(f"{name} {100 * value:.1f}" for name, value in means.items())
        spread = "-" if row.spread is None else f"{100 * row.spread:.1f}"
        changes = _changes(row.before, row.after[0]) if row.before is not None and row.after else ("", "", "")
        table.add_row(names[row.task], words, f"{100 * row.mean:.1f}", spread, *changes)
    console.print(table)
    if found.overall is None:
        console.print("Overall score needs all eight tasks.")
        return
    mean = sum(found.overall) / len(found.overall)
    console.print(f"Overall score: {100 * mean:.1f} (seeds: {', '.join(f'{100 * v:.1f}' for v in found.overall)})")


def _changes(before: EndOfDepth, after: EndOfDepth) -> tuple[str, str, str]:
    return (
        f"{_number(before.cosine)} → {_number(after.cosine)}",
        f"{_number(before.hfc_lfc)} → {_number(after.hfc_lfc)}",
        f"{before.smoothing_layers} → {after.smoothing_layers} of {after.layers}",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# --- what `print` and a notebook show of each result ---


def _show_measured(result: Measurement) -> None:
    """The curve and the answer; the other metrics are in the rows."""
    console = open_console()
    for answer in result.answers:
        console.print(curve_table(answer, stack_name(answer.stack) if len(result.answers) > 1 else ""))
    if result.answers:
        show_answers(console, result.answers)
    else:
        console.print(escape(no_answer_words(result)))


def _show_analysed(result: Analysis) -> None:
    console = open_console()
    if isinstance(console, HtmlConsole) and result.answers:
        for answer in result.answers:
            console.print(curve_table(answer, stack_name(answer.stack) if len(result.answers) > 1 else ""))
    show_analysis(result)


def _show_compared(result: Comparison) -> None:
    console, table = open_console(), new_table()
    console.print(escape(result.headline), style="bold")
    console.print(escape(result.deck))
    for name in ("layer", *result.names, "difference"):
        table.add_column(escape(name), justify="right", no_wrap=True)
    for row in result.rows():
        table.add_row(row["layer"], level(row["first"]), level(row["other"]), change_words(row["difference"]))
    if table.row_count:
        console.print(table)
    else:
        console.print("The models differ in depth, so no layer stands beside another.")


SHOWS: Mapping[type, Callable[[Any], None]] = {
    Analysis: _show_analysed,
    Comparison: _show_compared,
    Measurement: _show_measured,
    Inspection: lambda result: show_inspection(result, heads=False),
    Prediction: show_prediction,
    Verification: show_verification,
    Ablation: show_ablation,
    Pruning: show_pruning,
    EditCurve: show_edit_curve,
    TaskLoss: show_loss,
    Control: show_control,
    LengthCurves: show_lengths,
}
