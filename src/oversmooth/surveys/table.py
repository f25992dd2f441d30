"""The table of a survey on disk, and `read_survey`.

    FOLDER/survey.json                   what is computed, by which schema; with the meaning of every column
    FOLDER/level=model/part-....parquet  one row per model, the failed and the refused with their reason
    FOLDER/level=layer/part-....parquet
    FOLDER/level=head/part-....parquet

    FOLDER/parts.json                    the parts that count, with rows and hash of each of their files

The files of one part have the same name. A part counts once `parts.json` lists it. Before its files are written, they are
announced there: the next process adds the part where all of them are whole, and removes them where not. What is listed and
not there as it was written is taken out, and its models are done again; what is not listed is set aside.
"""

import hashlib
import io
import json
import os
import re
import uuid
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from oversmooth.environment.files import LEFT_BEHIND, LOCK, json_object, make_folder, write_whole
from oversmooth.errors import BrokenFile, CannotResume, MissingDependency, UnknownName, first_line, reason_of, some_of
from oversmooth.results import Row
from oversmooth.surveys.rows import COLUMNS, LEVELS, NAMES, VERSION, arrow_schema
from oversmooth.surveys.worker import Options

if TYPE_CHECKING:
    import pandas


ABOUT, PARTS = "survey.json", "parts.json"
SET_ASIDE = "_not-of-this-survey-{}.set-aside"
"""Name of a file that is no part: pyarrow passes over names with a bar in front, others over names without .parquet."""
PART = re.compile(r"part-[0-9]{5,9}-[0-9a-f]{8}\.parquet")
NEW_FOLDER = "Give a new folder."


def require_pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependency("pyarrow", "survey", "a survey") from error
    return pyarrow


Files = Mapping[str, Mapping[str, Any]]
"""Of one part: rows and sha256 of its file at each level that has one."""


class SurveyWarning(UserWarning):
    """Parts of a survey are not as they were written."""


class SurveyTable:
    """Parts in a folder; rows go in once and come out as they were."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._listed, self._announced = _manifest(folder)

    @classmethod
    def at(cls, folder: Path, options: Options) -> "SurveyTable":
        """A new table, or the one that is there, where it was made with the same options."""
        require_pyarrow()
        about = folder / ABOUT
        if about.exists():
            _check(about, options)
        else:
            _require_empty(folder)
            make_folder(folder)
            facts = {"kind": "survey", "schema": VERSION, "options": asdict(options)}
            columns = [asdict(column) for column in COLUMNS]
            _write(about, json.dumps({**facts, "columns": columns}, indent=2, ensure_ascii=False).encode())
        for level in LEVELS:
            make_folder(folder / f"level={level}")
        table = cls(folder)
        if not (folder / PARTS).exists():
            table._save()
        table._repair()
        return table

    @classmethod
    def to_read(cls, folder: Path) -> "SurveyTable":
        """The table that is there; raises where a file belongs to no part, because rows may be missing then."""
        there = [path for level in LEVELS for path in sorted((folder / f"level={level}").glob("*.parquet"))]
        table = cls(folder)  # after the names: a survey that goes on announces files before it writes them
        parts = [*table._listed.items(), *table._announced.items()]
        known = {table._path(level, name) for name, files in parts for level in files}
        if strangers := [path for path in there if path not in known]:
            advice = (
                "Run the same survey into this folder again: it sets such files aside, and does again what is missing."
            )
            raise BrokenFile(
                str(strangers[0]), f"a part of the survey that {PARTS} lists", "a file it does not list", advice
            )
        return table

    def parts(self) -> list[str]:
        """Names of the parts that count, oldest first."""
        return sorted(self._listed)

    def files(self, level: str) -> list[Path]:
        """The files of a level, oldest first, each checked to be as it was written."""
        found = []
        for name in self.parts():
            if level in self._listed[name]:
                path = self._path(level, name)
                if fault := _fault(path, self._listed[name][level]):
                    advice = "Run the same survey into this folder again: it does again what does not fit."
                    raise BrokenFile(str(path), f"the part of a survey that {PARTS} describes", fault, advice)
                found.append(path)
        return found

    def _path(self, level: str, name: str) -> Path:
        return self.folder / f"level={level}" / name

    def _repair(self) -> None:
        """Finishes or removes what a killed process began, takes out what does not fit, sets aside what is not listed."""
        for name, files in self._announced.items():
            if not self._faults(name, files):
                self._listed[name] = files
            elif name not in self._listed:
                self._remove(name)
        self._announced = {}
        found = {name: self._faults(name, self._listed[name]) for name in self.parts()}
        faults = {name: fault for name, fault in found.items() if fault}
        for name in faults:
            del self._listed[name]
        if (self._listed, {}) != _manifest(self.folder):
            self._save()
        for name in faults:
            self._remove(name)
        strangers = self._set_aside()
        if faults:
            shown = some_of([f"{name} ({fault})" for name, fault in faults.items()], 3)
            said = f"Parts of {self.folder} are not as they were written; their models are done again: {shown}."
            warnings.warn(said, SurveyWarning, stacklevel=4)
        if strangers:
            said = f"Files of {self.folder} that {PARTS} does not list were renamed to {SET_ASIDE.format('...')}"
            warnings.warn(f"{said}: {some_of(strangers, 3)}.", SurveyWarning, stacklevel=4)

    def _faults(self, name: str, files: Files) -> str:
        """What is wrong with the files of a part, empty where nothing is."""
        faults = (_fault(self._path(level, name), entry) for level, entry in files.items())
        return next((fault for fault in faults if fault), "")

    def _remove(self, name: str) -> None:
        for level in LEVELS:
            self._path(level, name).unlink(missing_ok=True)

    def _set_aside(self) -> list[str]:
        """Renames files that no part has, so that no reader takes them for rows; their names."""
        found = []
        for level in LEVELS:
            for path in sorted((self.folder / f"level={level}").iterdir()):
                if path.name.endswith(".partial"):
                    path.unlink(missing_ok=True)
                elif path.suffix == ".parquet" and level not in self._listed.get(path.name, {}):
                    path.rename(path.with_name(SET_ASIDE.format(path.name)))
                    found.append(f"level={level}/{path.name}")
        return found

    def _save(self) -> None:
        content = {"kind": "parts of a survey", "parts": self._listed, "announced": self._announced}
        _write(self.folder / PARTS, json.dumps(content, indent=1).encode())

    def add(self, rows: Sequence[tuple[str, Row]]) -> None:
        """Writes one more part: complete when this returns, absent if it does not."""
        self._put(f"part-{len(self._listed):05d}-{uuid.uuid4().hex[:8]}.parquet", rows)

    def _put(self, name: str, rows: Sequence[tuple[str, Row]]) -> None:
        contents: dict[str, bytes] = {}
        files: dict[str, dict[str, Any]] = {}
        for level in ("head", "layer", "model"):
            chosen = [row for at, row in rows if at == level]
            if chosen or level == "model":
                contents[level] = _parquet(chosen)
                files[level] = {"rows": len(chosen), "sha256": hashlib.sha256(contents[level]).hexdigest()}
        self._announced = {name: files}
        self._save()
        for level, content in contents.items():
            _write(self._path(level, name), content)
        self._listed[name], self._announced = files, {}
        self._save()

    def models(self, columns: Sequence[str] = NAMES) -> list[Row]:
        """Rows of all models."""
        return [row for name in self.parts() for row in self.part_rows(name, "model", columns)]

    def part_rows(self, name: str, level: str, columns: Sequence[str] = NAMES) -> Iterator[Row]:
        """Rows of one part at one level."""
        if level in self._listed[name]:
            with _part(self._path(level, name)) as file:
                for batch in file.iter_batches(columns=list(columns)):
                    yield from batch.to_pylist()

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
            rows = [(level, row) for level in LEVELS for row in self.part_rows(name, level)]
            kept = [(level, row) for level, row in rows if row["status"] != status]
            count += len(rows) - len(kept)
            if len(kept) < len(rows):
                self._put(name, kept)
        return count


def _require_empty(folder: Path) -> None:
    """Refuses a folder of something else; a process that was killed while it wrote its first file left nothing that counts.

    The folder is held: nobody writes there any more. The next file that is written removes what is half written.
    """
    levels = (folder / f"level={level}" for level in LEVELS)
    begun = {LOCK, *(level.name for level in levels if level.is_dir() and not any(level.iterdir()))}
    entries = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    if any(name not in begun and not LEFT_BEHIND.fullmatch(name) for name in entries):
        raise CannotResume(str(folder), f"it is not empty and holds no {ABOUT}", NEW_FOLDER)


def _check(about: Path, options: Options) -> None:
    found = json_object(about.read_bytes(), str(about))
    if found.get("kind") != "survey" or not isinstance(found.get("schema"), int):
        raise BrokenFile(str(about), "a survey", "another kind of file", "Give the folder of a survey, or a new one.")
    if found["schema"] != VERSION:
        reason = f"it has schema {found['schema']}, and this version writes {VERSION}"
        raise CannotResume(str(about.parent), reason, NEW_FOLDER)
    if found.get("options") != asdict(options):
        reason = f"it was made with {found.get('options')}, not with {asdict(options)}"
        raise CannotResume(str(about.parent), reason, "Give the same options, or a new folder.")


def _manifest(folder: Path) -> tuple[dict[str, Files], dict[str, Files]]:
    """The parts that are listed and those that are announced; none where there is no survey yet."""
    place = folder / PARTS
    if not place.is_file():
        if any(folder.glob("level=*/part-*.parquet")):
            raise BrokenFile(str(folder), f"a survey with its {PARTS}, which lists its parts", "none", NEW_FOLDER)
        return {}, {}
    content = json_object(_bytes_of(place), str(place))
    listed, announced = content.get("parts"), content.get("announced")
    if not _is_list_of_parts(listed) or not _is_list_of_parts(announced):
        expected = "names of parts, with rows and sha256 of their files"
        raise BrokenFile(str(place), expected, "something else", NEW_FOLDER)
    return dict(listed), dict(announced)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BrokenFile(str(path), "a file of a survey", reason_of(error)) from error


def _is_list_of_parts(found: object) -> TypeGuard[dict[str, Files]]:
    """Whether it has the form that `_save` writes; names are names of parts, which lead to no other folder."""
    return isinstance(found, dict) and all(
        PART.fullmatch(name)
        and isinstance(files, dict)
        and "model" in files
        and all(level in LEVELS and _is_entry(entry) for level, entry in files.items())
        for name, files in found.items()
    )


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and type(entry.get("rows")) is int and isinstance(entry.get("sha256"), str)


def _fault(path: Path, entry: Mapping[str, Any]) -> str:
    """What is wrong with a file, empty where it is as it was written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return reason_of(error)
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        return "its content has changed"
    pyarrow = require_pyarrow()
    try:
        rows = pyarrow.parquet.ParquetFile(io.BytesIO(content)).metadata.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        return first_line(error)
    return "" if rows == entry["rows"] else f"it has {rows} rows, not {entry['rows']}"


def _parquet(rows: Sequence[Row]) -> bytes:
    pyarrow = require_pyarrow()
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=arrow_schema()), sink)
    return sink.getvalue()


def _write(path: Path, content: bytes) -> None:
    """The bytes as a file, on the disk before it has its name: a part that counts is whole even after a power cut."""

    def write(place: Path) -> None:
        with place.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    write_whole(path, write)


@contextmanager
def _part(path: Path) -> Iterator[Any]:
    """A file of a part, as pyarrow opens it."""
    pyarrow = require_pyarrow()
    try:
        yield pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise BrokenFile(str(path), "a part of a survey", first_line(error)) from error


# --- `read_survey`: the table of a survey as a DataFrame ---


def read_survey(folder: str | Path, level: str | None = None) -> "pandas.DataFrame":
    """The table of a survey, rows in the order of their targets; `level` is model, layer or head, and a column without it.

    Other tools read the same files: `polars.read_parquet("FOLDER/**/*.parquet", hive_partitioning=True)`, and in duckdb
    `select * from 'FOLDER/*/*.parquet'`; both have the level as a column too.
    """
    try:
        import pandas
    except ImportError as error:
        raise MissingDependency("pandas", "survey", "read_survey()") from error
    require_pyarrow()
    if level is not None and level not in LEVELS:
        raise UnknownName("level", level, LEVELS)
    place = Path(folder)
    if not (place / ABOUT).is_file():
        advice = "Make one: oversmooth survey LIST -o FOLDER"
        raise BrokenFile(str(folder), "the folder of a survey", f"no {ABOUT}", advice)
    table, found = SurveyTable.to_read(place), list[Any]()
    for name in LEVELS if level is None else (level,):
        for path in table.files(name):
            with _part(path) as file:
                rows = file.read().to_pandas()
            if len(rows):
                found.append(rows.assign(level=name))
    if not found:
        return pandas.DataFrame(columns=[*NAMES, "level"])
    whole = pandas.concat([rows.dropna(axis=1, how="all") for rows in found], ignore_index=True)
    return whole.reindex(columns=[*NAMES, "level"]).sort_values("target", kind="stable", ignore_index=True)
