"""The table of a survey on disk: Parquet by level, every file whole, every model once whatever ends the process.

    FOLDER/survey.json                   what is computed, by which schema; with the meaning of every column
    FOLDER/level=model/part-....parquet  one row per model, the failed and the refused with their reason
    FOLDER/level=layer/part-....parquet
    FOLDER/level=head/part-....parquet

The files of one part have the same name. Those of layers and heads are written first: the file of models is what makes a
part count, and what a killed process leaves without one is removed by the next.
"""

import dataclasses
import json
import os
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from oversmooth.errors import BrokenFile, CannotResume, MissingDependency
from oversmooth.output.held_folders import LOCK
from oversmooth.output.whole_files import make_folder, write_whole
from oversmooth.results import Row
from oversmooth.results.json_text import json_object
from oversmooth.surveys.reading import Options
from oversmooth.surveys.schema import COLUMNS, LEVELS, NAMES, VERSION, arrow_schema

ABOUT = "survey.json"
NEW_FOLDER = "Give a new folder."


def require_pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency("pyarrow", "survey", "a survey") from error
    return pyarrow


class SurveyTable:
    """Parts in a folder; rows go in once and come out as they were."""

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def at(cls, folder: Path, options: Options) -> "SurveyTable":
        """A new table, or the one that is there, where it was made with the same options."""
        require_pyarrow()
        about = folder / ABOUT
        if about.exists():
            _check(about, options)
        elif folder.is_dir() and any(entry.name != LOCK for entry in folder.iterdir()):
            raise CannotResume(str(folder), f"it is not empty and holds no {ABOUT}", NEW_FOLDER)
        for level in LEVELS:
            make_folder(folder / f"level={level}")
        if not about.exists():
            text = json.dumps(_about(options), indent=2, ensure_ascii=False)
            write_whole(about, lambda place: place.write_text(text, encoding="utf-8"))
        table = cls(folder)
        table.remove_leftovers()
        return table

    def parts(self) -> list[str]:
        """Names of the parts that count, oldest first."""
        return sorted(path.name for path in (self.folder / "level=model").glob("part-*.parquet"))

    def remove_leftovers(self) -> None:
        """Removes what a process that was killed had half written."""
        whole = set(self.parts())
        for level in LEVELS:
            for path in (self.folder / f"level={level}").iterdir():
                if path.name.endswith(".partial") or (level != "model" and path.name not in whole):
                    path.unlink(missing_ok=True)

    def add(self, rows: Sequence[tuple[str, Row]]) -> None:
        """Writes one more part: complete when this returns, absent if it does not."""
        name = f"part-{len(self.parts()):05d}-{uuid.uuid4().hex[:8]}.parquet"
        for level in ("head", "layer", "model"):
            chosen = [row for at, row in rows if at == level]
            if chosen or level == "model":
                _write(self.folder / f"level={level}" / name, chosen)

    def models(self, columns: Sequence[str] = NAMES) -> list[Row]:
        """Rows of all models."""
        return [row for name in self.parts() for row in self.part_rows(name, "model", columns)]

    def part_rows(self, name: str, level: str, columns: Sequence[str] = NAMES) -> Iterator[Row]:
        """Rows of one part at one level."""
        path = self.folder / f"level={level}" / name
        if path.exists():
            yield from _read(path, columns)

    def with_content(self, contents: Collection[str]) -> dict[str, list[tuple[str, Row]]]:
        """Rows by content, of the first target that was read with each."""
        owners: dict[str, str] = {}
        found: dict[str, list[tuple[str, Row]]] = {}
        for name in self.parts():
            rows = list(self.part_rows(name, "model", ("target", "file_sha256", "status")))
            for row in rows:
                if row["file_sha256"] in contents and row["status"] == "read":
                    owners.setdefault(row["file_sha256"], row["target"])
            targets = {row["target"] for row in rows} & set(owners.values())
            for level in LEVELS if targets else ():
                for row in self.part_rows(name, level):
                    if row["target"] in targets and owners.get(row["file_sha256"]) == row["target"]:
                        found.setdefault(row["file_sha256"], []).append((level, row))
        return found

    def forget(self, status: str) -> int:
        """Takes the models with a status out of the table, which have no other rows; how many there were."""
        count = 0
        for name in self.parts():
            path = self.folder / "level=model" / name
            rows = list(_read(path, NAMES))
            kept = [row for row in rows if row["status"] != status]
            count += len(rows) - len(kept)
            if len(kept) < len(rows):
                _write(path, kept)
        return count


def _about(options: Options) -> dict[str, Any]:
    columns = [dataclasses.asdict(column) for column in COLUMNS]
    return {"kind": "survey", "schema": VERSION, "options": dataclasses.asdict(options), "columns": columns}


def _check(about: Path, options: Options) -> None:
    found = json_object(about.read_bytes(), str(about))
    if found.get("kind") != "survey" or not isinstance(found.get("schema"), int):
        raise BrokenFile(str(about), "a survey", "another kind of file", "Give the folder of a survey, or a new one.")
    if found["schema"] != VERSION:
        reason = f"it has schema {found['schema']}, and this version writes {VERSION}"
        raise CannotResume(str(about.parent), reason, NEW_FOLDER)
    own = dataclasses.asdict(options)
    if found.get("options") != own:
        reason = f"it was made with {found.get('options')}, not with {own}"
        raise CannotResume(str(about.parent), reason, "Give the same options, or a new folder.")


def _write(path: Path, rows: Iterable[Row]) -> None:
    """The rows as a file, on the disk before it has its name: a part that counts is whole even after a power cut."""
    pyarrow = require_pyarrow()

    def write(place: Path) -> None:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=arrow_schema()), place)
        with place.open("rb") as file:
            os.fsync(file.fileno())

    write_whole(path, write)


def _read(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    pyarrow = require_pyarrow()
    try:
        file = pyarrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(columns=list(columns)):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise BrokenFile(str(path), "a part of a survey", str(error).splitlines()[0]) from error
