"""What was measured at every place, in as many tables as the terminal is wide enough for."""

from collections.abc import Iterator, Mapping

from rich.markup import escape
from rich.table import Table

from oversmooth.output.terminal.layout import new_table
from oversmooth.results import Measurement

CHANGE = "d log(HFC/LFC)"
GAP = 2
"""Columns between two columns of a table."""

Cells = Mapping[tuple[int, str], Mapping[str, str]]
"""Of every depth and place what each metric is there."""


def measurement_tables(result: Measurement, stack: str, width: int) -> Iterator[Table]:
    """Places of one stack by metrics; each table has the metrics that fit beside each other, and places that have any."""
    cells = _cells(result, stack)
    names = [*(name for name, _ in result.definitions), CHANGE]
    widths = {name: max(len(name), *(len(row.get(name, "-")) for row in cells.values())) + GAP for name in names}
    places = max(len(place) for _, place in cells)
    room = width - len(stack) - places - len("depth") - 3 * GAP
    group: list[str] = []
    for name in names:
        if group and sum(widths[other] for other in (*group, name)) > room:
            yield _table(cells, stack, group)
            group = []
        group.append(name)
    yield _table(cells, stack, group)


def _cells(result: Measurement, stack: str) -> Cells:
    cells: dict[tuple[int, str], dict[str, str]] = {}
    for value in result.values:
        if value.stack == stack:
            error = "" if value.standard_error is None else f" ±{value.standard_error:.2g}"
            shown = "-" if value.mean is None else f"{value.mean:.4g}{error}"
            cells.setdefault((value.depth, value.place), {})[value.metric] = shown
    for item in result.attributions:
        for part in item.parts if item.stack == stack else ():
            if (part.depth, part.place) in cells:
                cells[part.depth, part.place][CHANGE] = f"{part.change:+.3f}"
    return cells


def _table(cells: Cells, stack: str, names: list[str]) -> Table:
    table = new_table()
    for name in (*([stack] if stack else []), "depth", "place", *names):
        table.add_column(escape(name), justify="left" if name == "place" else "right", no_wrap=True)
    for (depth, place), row in cells.items():
        if any(name in row for name in names):
            lead = [""] if stack else []
            table.add_row(*lead, str(depth), place, *(row.get(name, "" if name == CHANGE else "-") for name in names))
    return table
