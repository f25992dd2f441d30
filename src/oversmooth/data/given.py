"""What `--data` points at: files, folders, tables and datasets, as texts or pictures.

file.txt, any text file     paragraphs (separated by blank lines), or lines
folder of text files        one text per file, or lines
folder of images            one image per file, subfolders included
.parquet .jsonl .json .csv .arrow   rows; the text or image column is found
NAME or NAME:SPLIT          a dataset of the `datasets` library, streamed
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from oversmooth.data.dataset_library import load_hub_rows, load_rows, name_and_split, near_names
from oversmooth.data.json_rows import json_rows
from oversmooth.data.labels import label_in
from oversmooth.data.pictures import open_picture, require_usable
from oversmooth.errors import UnreadableData, first_line, reason_of

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
TABLES = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".arrow": "arrow"}
FILE_ENDINGS = (
    *IMAGE_ENDINGS,
    *TABLES,
    ".txt",
    ".md",
    ".text",
    ".rst",
    ".py",
    ".tex",
    ".html",
    ".xml",
    ".tsv",
    ".zip",
    ".gz",
)
"""A name that ends like this is a file that is not there, never a dataset on the hub."""
DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.\[\]%:-]+)?")
PREFERRED = {"text": ("text", "content", "sentence", "document"), "image": ("image", "img")}
ROWS_TO_LOOK_AT = 64
"""Of a table, to find the column: the first rows may have nothing in it."""


@dataclass
class Given:
    """Texts or pictures in order, and what is known about all of them."""

    items: Iterator[Any]
    characters: int | None = None
    """Of all texts without blank margins, where that is known before they are used."""
    empty: int = 0
    """Rows that were left out because they hold nothing, counted while `items` are read."""
    labels: list[Any] = field(default_factory=list)
    """The class of every item that was read so far: its folder, or a column; `None` where it has none."""


def find_given(data: str, kind: str, *, per_line: bool) -> Given:
    """The texts or pictures behind `--data`; raises `UnreadableData` where there are none of that kind."""
    require_there(data)
    path = Path(data).expanduser()
    if path.is_dir():
        return _folder(path, kind, per_line)
    if path.is_file():
        return _table(data, path, kind) if path.suffix.lower() in TABLES else _one_file(path, kind, per_line)
    return _dataset(data, kind)


def require_there(data: str) -> None:
    """Raises `UnreadableData` where a path leads nowhere, at once; the name of a dataset is not looked up yet."""
    try:
        path = Path(data).expanduser()
        is_usable, exists = path.is_dir() or path.is_file(), path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # a name that no file system takes
        raise UnreadableData(data[:80], "a file, a folder or a dataset name", str(error)) from error
    if exists and not is_usable:
        raise UnreadableData(data, "a file, a folder or a dataset name", "a device, pipe or socket")
    if not exists and _looks_like_a_path(data):
        raise UnreadableData(data, "a file or a folder", f"none of that name{near_names(path)}")


def _looks_like_a_path(data: str) -> bool:
    return (
        not DATASET.fullmatch(data)
        or data.startswith((".", "/", "~"))
        or Path(data).suffix.lower() in FILE_ENDINGS
        or ("/" in data and Path(data).parent.is_dir())
    )


# --- files and folders ----------------------------------------------------------------------------------------------


def _folder(path: Path, kind: str, per_line: bool) -> Given:
    found = sorted(entry for entry in path.rglob("*") if entry.is_file() and not entry.name.startswith("."))
    images = [entry for entry in found if entry.suffix.lower() in IMAGE_ENDINGS]
    if kind == "image":
        if not images:
            raise UnreadableData(str(path), f"images ({', '.join(IMAGE_ENDINGS)})", f"{len(found)} other files")
        given = Given(iter(()))
        given.items = _of_files(path, images, given, lambda entry: [open_picture(entry, str(entry))])
        return given
    texts = [entry for entry in found if entry not in set(images)]
    if not texts:
        raise UnreadableData(str(path), "text files", f"{len(images)} images and nothing else" if images else "nothing")
    given = Given(iter(()))
    read = (lambda entry: lines(_read_text(entry))) if per_line else (lambda entry: [_read_text(entry).strip()])
    given.items = _of_files(path, texts, given, read)
    return given


def _of_files(folder: Path, files: Iterable[Path], given: Given, read: Callable[[Path], list[Any]]) -> Iterator[Any]:
    """What is in every file, with the name of the folder inside `folder` that it lies in as its class."""
    for file in files:
        for item in read(file):
            if item:
                given.labels.append(file.parent.name if file.parent != folder else None)
                yield item


def _one_file(path: Path, kind: str, per_line: bool) -> Given:
    if kind == "image":
        if path.suffix.lower() in IMAGE_ENDINGS:
            return Given(iter([open_picture(path, str(path))]))
        raise UnreadableData(str(path), "a folder of images, for a vision model", "one text file")
    text = _read_text(path)
    parts = lines(text) if per_line else paragraphs(text)
    return Given(iter(parts), sum(map(len, parts)))


def lines(text: str) -> list[str]:
    """Lines that are not blank, without their margins."""
    return [line.strip() for line in text.split("\n") if line.strip()]


def paragraphs(text: str) -> list[str]:
    """What stands between blank lines; a line of nothing but white space is blank."""
    found: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return ["\n".join(part).strip() for part in found if part]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#04x} at {error.start}"
        raise UnreadableData(str(path), "text in UTF-8", found) from error
    except OSError as error:
        raise UnreadableData(str(path), "a file that may be read", reason_of(error)) from error


# --- tables and datasets --------------------------------------------------------------------------------------------


def _table(data: str, path: Path, kind: str) -> Given:
    ending = path.suffix.lower()
    expected = f"a {ending} table"
    if TABLES[ending] == "json":
        return _of_rows(data, expected, json_rows(data, path), kind)
    rows = load_rows(data, expected, TABLES[ending], data_files=str(path), split="train", streaming=True)
    return _of_rows(data, expected, rows, kind)


def _dataset(data: str, kind: str) -> Given:
    name, split = name_and_split(data)
    expected = "a file, a folder or a dataset name (NAME or NAME:SPLIT)"
    return _of_rows(data, expected, load_hub_rows(data, expected, name, split=split, streaming=True), kind)


def _of_rows(data: str, expected: str, rows: Any, kind: str) -> Given:
    """Rows with one column, the first that holds what the model takes."""
    try:
        if getattr(rows, "features", None):
            rows = rows.decode(False)  # pictures are unpacked here, with our limits
        iterator = iter(rows)
        preview = list(islice(iterator, ROWS_TO_LOOK_AT))
    except UnreadableData:
        raise
    except Exception as error:  # pyarrow and datasets raise errors without a common base
        raise UnreadableData(data, expected, first_line(error)) from error
    given = Given(iter(()))
    given.items = _cells(
        data, kind, chain(preview, _further(data, expected, iterator)), _column(data, kind, preview), given
    )
    return given


def _further(data: str, expected: str, rows: Iterator[Any]) -> Iterator[Any]:
    """The rest of a table, whose end may turn out to be broken."""
    number = ROWS_TO_LOOK_AT
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except UnreadableData:
            raise
        except Exception as error:  # as above
            raise UnreadableData(data, expected, f"after row {number}: {first_line(error)}") from error
        number += 1
        yield row


def _column(data: str, kind: str, preview: list[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in preview for name in row))
    is_cell = _is_text if kind == "text" else _is_picture
    for name in (*PREFERRED[kind], *names):
        if any(is_cell(row.get(name)) for row in preview):
            return name
    if not preview:
        raise UnreadableData(data, f"rows with {kind}", "no rows")
    raise UnreadableData(data, f"a column with {kind}", f"the columns {', '.join(names)}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_picture(value: Any) -> bool:
    return hasattr(value, "convert") or (isinstance(value, Mapping) and bool(value.get("bytes") or value.get("path")))


def _cells(data: str, kind: str, rows: Iterable[Mapping[str, Any]], column: str, given: Given) -> Iterator[Any]:
    for number, row in enumerate(rows):
        value = row.get(column)
        if kind == "text" and _is_text(value):
            given.labels.append(label_in(row))
            yield str(value).strip()
        elif kind == "image" and _is_picture(value):
            given.labels.append(label_in(row))
            yield _picture(value, f"{data}, row {number}")
        else:
            given.empty += 1


def _picture(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return open_picture(value["bytes"] or Path(value["path"]), name)
    require_usable(value, name)
    return value.convert("RGB")
