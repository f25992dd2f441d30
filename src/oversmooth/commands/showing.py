"""How a verb ends: rows into a CSV file where asked for, then JSON or a table."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from oversmooth.results import Row, SavedResult


def show(
    result: "SavedResult",
    table: Callable[[], None],
    *,
    json: bool,
    csv: Path | None = None,
    rows: "list[Row] | None" = None,
) -> None:
    """Prints the result as JSON, or by `table`; `rows` are those of the CSV file where they are not the result's own."""
    if csv is not None:
        from oversmooth.output.terminal.tables import write_csv

        write_csv(csv, result.rows() if rows is None else rows)
    if json:
        typer.echo(result.to_json(indent=2))
    else:
        table()
