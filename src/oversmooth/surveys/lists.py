"""From what a user gives as a list to targets: a file of names, a table, a folder of models, revisions, a hub query."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from oversmooth.errors import (
    Conflict,
    MissingDependency,
    NothingChosen,
    RemoteUnavailable,
    TargetNotFound,
    UnknownName,
    UnreadableData,
    first_line,
)
from oversmooth.models.opening import PICKLES, local_path
from oversmooth.models.revisions import steps_of
from oversmooth.surveys.reading import Listed

COLUMN_NAMES = ("target", "model", "model_id", "modelId", "id", "name")
"""Columns that are taken for the targets of a table unless one is named."""
YEARS = ("year", "created_at", "createdAt", "date")
WEIGHTS = (".safetensors", ".gguf", *PICKLES)
DEEPEST = 3
"""Folders below the one that was given in which models are looked for."""


def listed(
    given: str | Path | Sequence[str] | None,
    *,
    column: str | None = None,
    author: str | None = None,
    pipeline_tag: str | None = None,
    top: int | None = None,
) -> list[Listed]:
    """The targets, each once, in their order; `author`, `pipeline_tag` and `top` ask the hub instead of a list."""
    is_query = any(option is not None for option in (author, pipeline_tag, top))
    if given is None and not is_query:
        raise NothingChosen(("a list", "--author", "--pipeline-tag", "--top"))
    if given is not None and is_query:
        raise Conflict(("a list", "a query of the hub (--author, --pipeline-tag, --top)"))
    if given is None:
        found: Iterable[Listed] = _from_hub(author, pipeline_tag, top)
    elif isinstance(given, str | Path):
        found = _from_place(str(given), column)
    else:
        found = [Listed(str(target)) for target in given]
    once = list({one.target: one for one in found}.values())
    if not once:
        raise UnreadableData(str(given or "the query of the hub"), "at least one target", "none")
    return once


def _from_place(given: str, column: str | None) -> Iterable[Listed]:
    steps = steps_of(given)
    if steps:
        return [Listed(step.target) for step in steps]
    path = local_path(given)
    if path is None or not path.exists():
        tried = ["a file of targets, a .csv or .parquet table, a folder of models, hf://owner/name@first..last"]
        raise TargetNotFound(given, tried, "A single model is a list too: write its name into a text file.")
    if path.is_dir():
        return [Listed(str(model)) for model in _models_in(path, DEEPEST)]
    if path.suffix in (".csv", ".parquet"):
        return _from_table(path, column)
    return _from_text(path)


def _from_text(path: Path) -> list[Listed]:
    """One target per line; empty lines and what follows a `#` do not count."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UnreadableData(str(path), "one target per line", "bytes that are no text") from error
    bare = (line.split("#")[0].strip() for line in lines)
    return [Listed(line) for line in bare if line]


def _from_table(path: Path, column: str | None) -> Iterator[Listed]:
    rows = _csv_rows(path) if path.suffix == ".csv" else _parquet_rows(path)
    names = list(rows[0]) if rows else []
    chosen = column or next((name for name in COLUMN_NAMES if name in names), None)
    if chosen is None:
        raise UnreadableData(
            str(path), f"a column {' or '.join(COLUMN_NAMES)}, or --column", ", ".join(names) or "none"
        )
    if rows and chosen not in names:
        raise UnknownName("column", chosen, names)
    year = next((name for name in YEARS if name in names), None)
    for row in rows:
        if target := str(row[chosen] or "").strip():
            yield Listed(target, _year(row[year]) if year else None)


def _csv_rows(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UnreadableData(str(path), "a CSV table", first_line(error)) from error


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency("pyarrow", "survey", "a list in Parquet") from error
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UnreadableData(str(path), "a Parquet table", first_line(error)) from error
    return rows


def _year(said: object) -> int | None:
    """The year in a number, a date or a text that begins with one."""
    year = getattr(said, "year", None)
    digits = str(year if year is not None else said)[:4]
    return int(digits) if digits.isdecimal() and 1900 < int(digits) < 2200 else None


def _models_in(folder: Path, depth: int) -> Iterator[Path]:
    """Folders that hold a model, and single files of weights; what lies below a model belongs to it."""
    entries = sorted(folder.iterdir())
    files = [entry for entry in entries if entry.is_file()]
    if any(entry.name == "config.json" for entry in files) and any(entry.suffix in WEIGHTS for entry in files):
        yield folder
        return
    yield from (entry for entry in files if entry.suffix in WEIGHTS)
    if depth:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _models_in(entry, depth - 1)


def _from_hub(author: str | None, pipeline_tag: str | None, top: int | None) -> list[Listed]:
    """Repositories in the order of their downloads; only those with safetensors can be read by byte ranges."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise MissingDependency("huggingface_hub", "hf", "a query of the hub") from error
    query: dict[str, Any] = {"author": author, "pipeline_tag": pipeline_tag, "limit": top, "filter": "safetensors"}
    try:
        models = HfApi().list_models(**query, sort="downloads", expand=["createdAt"])
        return [Listed(f"hf://{model.id}", _year(model.created_at)) for model in models]
    except Exception as error:  # errors of HTTP, of names and of being offline have no common base
        raise RemoteUnavailable("the list of models of the hub", first_line(error)) from error
