"""How a verb ends: rows into files where asked for, then a table, Markdown or JSON; the options for it, stated once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oversmooth.commands import completion
from oversmooth.commands.option_groups import Options, with_options
from oversmooth.commands.options import Json
from oversmooth.errors import Conflict, UnknownName
from oversmooth.output.whole_files import require_writable

if TYPE_CHECKING:
    from oversmooth.results import Row
    from oversmooth.results.base import SavedResult

Format = Annotated[
    str,
    typer.Option(
        help="What is printed: table, md (Markdown) or json.", autocompletion=completion.values("printed_format")
    ),
]
CsvFile = Annotated[
    Path | None, typer.Option(help="Also write the rows to this CSV file, with the model and what they rest on.")
]
ParquetFile = Annotated[Path | None, typer.Option(help="Also write the same rows to this Parquet file.")]
OPTIONS: Options = {
    "format": (Format, "table"),
    "json": (Json, False),
    "csv": (CsvFile, None),
    "parquet": (ParquetFile, None),
}


@dataclass(frozen=True, slots=True)
class Showing:
    """What is printed, and the files that the rows go into."""

    format: str = "table"
    csv: Path | None = None
    parquet: Path | None = None


def shows_rows(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options for what it shows, which it receives together as `showing`, checked before it runs."""
    return with_options(command, "showing", OPTIONS, _showing)


def _showing(given: dict[str, Any]) -> Showing:
    known = completion.VALUES["printed_format"]
    if given["format"] not in known:
        raise UnknownName("format", given["format"], known)
    if given["json"] and given["format"] == "md":
        raise Conflict(["--json", "--format md"])
    require_writable(given["csv"], given["parquet"])
    if given["parquet"] is not None:
        from oversmooth.output.exports import require_parquet

        require_parquet("--parquet")
    return Showing("json" if given["json"] else given["format"], given["csv"], given["parquet"])


def show(result: "SavedResult", table: Callable[[], None], showing: Showing, rows: "list[Row] | None" = None) -> None:
    """Writes and prints the result; `rows` are those of the files where they are not the result's own."""
    if showing.csv is not None or showing.parquet is not None:
        _write(result, result.rows() if rows is None else rows, showing)
    if showing.format == "json":
        typer.echo(result.to_json(indent=2))
    elif showing.format == "md":
        from oversmooth.output.terminal.markdown_console import as_markdown

        with as_markdown():
            table()
    else:
        table()


def _write(result: Any, rows: "list[Row]", showing: Showing) -> None:
    """Every row with the model and what its numbers rest on."""
    from oversmooth.output.exports import sourced, write_parquet
    from oversmooth.output.terminal.tables import write_csv

    whole = sourced(rows, result.provenance, getattr(result, "data", None))
    if showing.csv is not None:
        write_csv(showing.csv, whole)
    if showing.parquet is not None:
        write_parquet(showing.parquet, whole)
