"""Curves over length as tables for the terminal."""

from rich.markup import escape

from oversmooth.output.numbers import format_cell
from oversmooth.output.terminal.layout import new_table
from oversmooth.output.terminal.tables import open_console, show_data
from oversmooth.results import LengthCurves


def show_lengths(result: LengthCurves) -> None:
    """A row per length: every metric behind the last block, what the stack does, and what the theory says of it."""
    console = open_console()
    console.print(escape(result.provenance.target), style="bold", soft_wrap=True)
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
