"""Results as tables for the terminal and as CSV."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oversmooth.output.data_words import how_made, how_much
from oversmooth.output.numbers import format_cell
from oversmooth.output.terminal.heading import show_heading
from oversmooth.output.terminal.layout import new_table
from oversmooth.output.terminal.markdown_console import MarkdownConsole, writes_markdown
from oversmooth.output.terminal.measurement_tables import measurement_tables
from oversmooth.output.whole_files import write_whole
from oversmooth.output.words import depth_words, dominating_words, who_words
from oversmooth.results import Control, DataFacts, Inspection, LayerInspection, Measurement, Row, Spectrum, Verification

PIPE_WIDTH = 160
"""Columns assumed where the output is not a terminal, so that a pipe or a file gets whole tables."""
INSPECTION_COLUMNS = (
    *("layer", "rho_dc", "at lambda", "Re(lambda)", "Re<0", "folded", "tendency", "norm weights", "asym", "|bias|"),
)
WIDE_COLUMNS = 2
"""How many of the last columns need more than an 80-column terminal."""


def open_console() -> Console:
    """The terminal, or where Markdown is asked for, a console that writes it."""
    if writes_markdown():
        return MarkdownConsole(width=PIPE_WIDTH)
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Rows as CSV; an existing file is replaced only by a whole new one."""

    def write(partial: Path) -> None:
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)

    write_whole(path, write)


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
    shown = len(INSPECTION_COLUMNS) - (WIDE_COLUMNS if console.width < 92 else 0)
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
        return [index, *["-"] * 9]
    low = min((norm.smallest for norm in layer.norms if norm.role.startswith("attn")), default=None)
    high = max((norm.largest for norm in layer.norms if norm.role.startswith("attn")), default=None)
    negative = max((norm.negative_share for norm in layer.norms if norm.role.startswith("attn")), default=0.0)
    norms = (
        "-" if low is None or high is None else f"{low:.2f}..{high:.2f}" + (f" {negative:.0%}<0" if negative else "")
    )
    return [
        index,
        f"{plain.rho_dc:.3f}",
        _complex(plain),
        f"{plain.min_real:.2f}..{plain.max_real:.2f}",
        "-" if plain.negative_share is None else f"{plain.negative_share:.0%}",
        "-" if layer.folded is None else f"{layer.folded.rho_dc:.3f}",
        "-" if layer.tendency is None else f"{layer.tendency:+.3f}",
        norms,
        "-" if layer.asymmetry is None else f"{layer.asymmetry:.2f}",
        "-" if layer.bias_norm is None else f"{layer.bias_norm:.2f}",
    ]


def _complex(spectrum: Spectrum) -> str:
    real, imaginary = spectrum.dominating
    return f"{real:.2f}" if abs(imaginary) < 5e-3 else f"{real:.2f}±{abs(imaginary):.2f}i"


def _legend(result: Inspection) -> str:
    known = [layer for layer in result.layers if layer.tendency is not None]
    smoothing = sum(1 for layer in known if layer.tendency is not None and layer.tendency > 0)
    neither = sum(1 for layer in known if layer.tendency == 0)
    at_zero = f", {neither} at 0, where it does neither" if neither else ""
    folded = any(layer.folded for layer in result.layers)
    which = "norm folded in, at unit token scale" if folded else "plain"
    return (
        f"tendency = log rho_dc ({which}): what attention that looks at all tokens equally would do; "
        f"above 0 it smooths. {smoothing} of {len(known)} layers are above 0{at_zero}.\n"
        "It is a tendency of the weights, not a verdict: real attention is not uniform, and biases, token scales and "
        "the feed-forward act too."
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


def show_measurement(result: Measurement) -> None:
    console = open_console()
    show_heading(console, result.provenance)
    partial = " (interrupted: partial)" if result.is_partial else ""
    prefix = "" if result.prefix_tokens == "none" else f", prefix tokens {result.prefix_tokens}"
    show_data(console, result.data, f"{prefix}{partial}")
    for stack in dict.fromkeys(value.stack for value in result.values):
        for table in measurement_tables(result, stack, console.width):
            console.print(table)
    for attribution in result.shown_attributions:
        console.print(escape(f"{depth_words(attribution)} {who_words(attribution)} Below 0 smooths."))
    for found in result.dominating:
        if said := dominating_words(found):
            console.print(escape(said))
    for problem in result.problems:
        console.print(f"[bold red]{escape(problem)}[/]")


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
        console.print(f"Written to {escape(result.out)}", soft_wrap=True)


def show_architectures(declared: Iterable[Row], refused: Mapping[str, str]) -> None:
    console = open_console()
    table = new_table()
    for name in ("family", "model types", "residual", "norm", "attention"):
        table.add_column(name)
    for row in declared:
        table.add_row(*(str(cell) for cell in row.values()))
    console.print(table)
    console.print("Composite models (CLIP, SigLIP, Gemma 3, LLaVA, ...) are analysed through their parts.\n\nRefused:")
    for reason in dict.fromkeys(refused.values()):
        console.print(f"  {', '.join(name for name in refused if refused[name] == reason)}: {reason}")


def show_coverage(counts: Sequence[Row], every: Sequence[Row]) -> None:
    """How many model types are covered, and every one of them where they are asked for."""
    console = open_console()
    for rows in (every, counts):
        if not rows:
            continue
        table = new_table()
        for name in rows[0]:
            table.add_column(name)
        for row in rows:
            table.add_row(*(escape(format_cell(cell)) for cell in row.values()))
        console.print(table)
    if not every:
        console.print("Every one of them: oversmooth architectures --all", style="dim")


def show_plugins(rows: Sequence[Row]) -> None:
    table = new_table()
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))
    open_console().print(table)
