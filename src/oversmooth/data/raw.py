"""Reads texts and images from files, folders, tables and hub datasets.

file.txt, any text file     paragraphs (separated by blank lines), or lines
folder of text files        one text per file, or lines
folder of images            one image per file, subfolders included
.parquet .jsonl .json .csv .arrow   rows; the text or image column is found
NAME or NAME:SPLIT          a dataset of the `datasets` library, streamed
"""

import difflib
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from typing import Any

from oversmooth.environment.files import json_kind
from oversmooth.errors import MissingDependency, UnreadableData, WrongBatch, first_line, reason_of

# --- the `datasets` library in one place: tables and datasets of the hub ---


def load_rows(where: str, expected: str, name: str, *more: str, **options: Any) -> Any:
    """What `datasets.load_dataset` gives for a name; what it cannot load is `UnreadableData` about `where`."""
    datasets = import_datasets()
    try:
        return datasets.load_dataset(name, *more, **options)
    except Exception as error:  # pyarrow, json and datasets raise errors without a common base
        raise UnreadableData(where, expected, first_line(error)) from error


def load_hub_rows(where: str, expected: str, name: str, *more: str, **options: Any) -> Any:
    """`load_rows` of a dataset on the hub, which is asked once whether it has it.

    A name that the hub does not know is refused at once, with files here that are spelled nearly like it. Where the hub
    cannot be reached, only what was downloaded before is tried, instead of asking for half a minute.
    """
    import_datasets()
    near = near_names(Path(where)) if Path(where).parent.is_dir() else ""
    answer = _answer(name)
    if answer == "no":
        raise UnreadableData(where, expected, f"no such name here or on the hub{near}")
    try:
        with _offline(answer == "none"):
            return load_rows(where, expected, name, *more, **options)
    except UnreadableData as error:
        unreachable = "no such name here, and the hub cannot be reached"
        raise UnreadableData(where, expected, (unreachable if answer == "none" else error.found) + near) from error


def _answer(name: str) -> str:
    """What the hub says about a dataset: `yes`, `no`, or `none` where it cannot be asked."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return "none"
    try:
        HfApi().dataset_info(name, timeout=10)
    except RepositoryNotFoundError:
        return "no"
    except (HfHubHTTPError, HFValidationError):  # busy, forbidden, ill-formed: the library knows what to do
        return "yes"
    except Exception:  # no network; the client's errors have no common base
        return "none"
    return "yes"


@contextmanager
def _offline(is_offline: bool) -> Iterator[None]:
    """The hub is not asked inside."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if is_offline:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def near_names(path: Path) -> str:
    """What lies beside a path that is not there and is spelled nearly like it, in words; empty where nothing is."""
    try:
        names = [entry.name for entry in islice(path.parent.iterdir(), 10_000)]
    except OSError:
        return f"; the folder {str(path.parent)!r} is not there either"
    near = difflib.get_close_matches(path.name, names, n=3)
    return f"; close: {', '.join(near)}" if near else ""


def name_and_split(data: str) -> tuple[str, str]:
    """`NAME:SPLIT`, or `NAME` alone for its split train."""
    name, _, split = data.partition(":")
    return name, split or "train"


def import_datasets() -> Any:
    """The library, without progress bars."""
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency("datasets", "hf", "reading tables and datasets") from error
    datasets.disable_progress_bars()
    return datasets


# --- rows of `.jsonl` and `.json` files, read with Python's own parser ---

LARGEST_LIST = 512 * 2**20
"""Bytes of a file that is one JSON value and has to be parsed as a whole; one row per line may be of any length."""


def json_rows(data: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number of its line, or in one list, and object; a bare string is the text of a row, `null` a row with nothing in it."""
    try:
        with path.open("rb") as file:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        rows = _list(data, path) if start.startswith(b"[") else _lines(path)
        for number, value in rows:
            if isinstance(value, str):
                value = {"text": value}
            if value is not None and not isinstance(value, dict):
                raise UnreadableData(data, "a JSON object in every row", f"{json_kind(value)} in row {number}")
            for text in (value or {}).values():
                if isinstance(text, str) and not text.isascii():
                    text.encode()  # half of a surrogate pair, which JSON can write and no tokenizer takes, is no UTF-8
            yield number, value or {}
    except OSError as error:
        raise UnreadableData(data, "a file that may be read", reason_of(error)) from error
    except RecursionError as error:
        raise UnreadableData(data, "rows of texts", "JSON nested too deeply") from error
    except ValueError as error:  # not JSON, not UTF-8, or more digits than Python reads
        raise UnreadableData(data, "JSON, one row per line or one list of rows", first_line(error)) from error


def _list(data: str, path: Path) -> Iterator[tuple[int, Any]]:
    if path.stat().st_size > LARGEST_LIST:
        found = f"one list of {path.stat().st_size:,} bytes; write one row per line (.jsonl)"
        raise UnreadableData(data, f"a JSON list of at most {LARGEST_LIST // 2**20} MB", found)
    yield from enumerate(json.loads(path.read_text(encoding="utf-8-sig")))


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number + 1}: {error}") from error


# --- classes of texts and pictures: from the name of a folder or a column of a table to the number that ---

COLUMNS = ("label", "labels", "class")
"""Columns of a table that hold classes, in the order in which they are looked for."""


def label_in(row: Mapping[str, Any]) -> Any:
    """The class of a row of a table; `None` where it has none."""
    return next((row[name] for name in COLUMNS if row.get(name) is not None), None)


def class_number(label: Any, config: Mapping[str, Any]) -> int:
    """The number of a class in the output of the model: by its name in the config, or a number as it is."""
    names = {str(name): int(number) for name, number in dict(config.get("label2id") or {}).items()}
    if str(label) in names:
        return names[str(label)]
    count = len(names) or config.get("num_classes") or config.get("num_labels")
    is_number = (isinstance(label, int) and not isinstance(label, bool)) or (isinstance(label, str) and label.isdigit())
    if is_number and (count is None or int(label) < int(count)):
        return int(label)
    known = ", ".join(list(names)[:5]) + (", ..." if len(names) > 5 else "") if names else f"numbers below {count}"
    raise WrongBatch(
        f"classes that the model knows ({known})",
        f"the class {label!r}",
        "Name folders, or the column `label` of a table, as the model's config does (label2id), or by number.",
    )


# --- image files and bytes as pictures; what is broken, or would unpack to more than memory holds ---

LARGEST_IMAGE = 100_000_000
"""Pixels. Unpacked, this is 300 MB; a file that claims more is refused before anything is unpacked."""
LARGEST_RATIO = 100
"""Of an image's sides: resizing the shorter one of a longer strip would make it huge."""


def open_picture(source: Path | bytes, name: str) -> Any:
    """A PIL image in RGB, read and unpacked; raises `UnreadableData` with the name otherwise."""
    return open_as_it_is(source, name).convert("RGB")


def open_as_it_is(source: Path | bytes, name: str) -> Any:
    """The same with the channels that the file has."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is lower than PIL's
            with Image.open(BytesIO(source) if isinstance(source, bytes) else source) as image:
                require_usable(image, name)
                image.load()
                return image
    except UnreadableData:
        raise
    except Image.DecompressionBombError as error:
        expected = f"an image of at most {LARGEST_IMAGE:,} pixels"
        raise UnreadableData(name, expected, "a header that claims more") from error
    except Exception as error:  # PIL's readers of broken files raise nearly anything
        raise UnreadableData(name, "an image", first_line(error)) from error


def require_usable(image: Any, name: str) -> None:
    """Refuses an image by the size that its header says."""
    width, height = image.size
    if width * height > LARGEST_IMAGE:
        raise UnreadableData(name, f"an image of at most {LARGEST_IMAGE:,} pixels", f"{width} x {height}")
    if max(width, height) > LARGEST_RATIO * min(width, height):
        found = f"{width} x {height}"
        raise UnreadableData(name, f"an image whose sides differ at most {LARGEST_RATIO} times", found)


# --- what `--data` points at: files, folders, tables and datasets, as texts or pictures ---

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
TABLES = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".arrow": "arrow"}
TEXT_ENDINGS = (".txt", ".md", ".text", ".rst", ".py", ".tex", ".html", ".xml", ".tsv")
FILE_ENDINGS = (*IMAGE_ENDINGS, *TABLES, *TEXT_ENDINGS, ".zip", ".gz")
"""A name that ends like this is a file that is not there, never a dataset on the hub."""
DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.\[\]%:-]+)?")
PREFERRED = {"text": ("text", "content", "sentence", "document"), "image": ("image", "img")}
ROWS_TO_LOOK_AT = 64
"""Of a table, to find the column: the first rows may have nothing in it."""


@dataclass
class RawData:
    """Texts or pictures in order, and what is known about all of them."""

    items: Iterator[Any]
    characters: int | None = None
    """Of all texts without blank margins, where that is known before they are used."""
    empty: int = 0
    """Rows that were left out because they hold nothing, counted while `items` are read."""
    labels: list[Any] = field(default_factory=list)
    """The class of every item that was read so far: its folder, or a column; `None` where it has none."""
    note: str = ""
    """What a reader should know of how items were cut out."""


def read_raw(data: str, kind: str, *, per_line: bool) -> RawData:
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
    is_text = " " in data or not data.isascii()
    if not exists and (is_text or _looks_like_a_path(data)):
        hint = " (a text itself goes into a list: [text])" if is_text else ""
        raise UnreadableData(data, "a file or a folder", f"none of that name{near_names(path)}{hint}")


def _looks_like_a_path(data: str) -> bool:
    return (
        not DATASET.fullmatch(data)
        or data.startswith((".", "/", "~"))
        or Path(data).suffix.lower() in FILE_ENDINGS
        or ("/" in data and Path(data).parent.is_dir())
    )


# --- files and folders ----------------------------------------------------------------------------------------------


def _folder(path: Path, kind: str, per_line: bool) -> RawData:
    found = sorted(entry for entry in path.rglob("*") if entry.is_file() and not entry.name.startswith("."))
    images = [entry for entry in found if entry.suffix.lower() in IMAGE_ENDINGS]
    if kind == "image":
        if not images:
            raise UnreadableData(str(path), f"images ({', '.join(IMAGE_ENDINGS)})", f"{len(found)} other files")
        given = RawData(iter(()))
        given.items = _of_files(path, images, given, lambda entry: [open_picture(entry, str(entry))])
        return given
    texts = [entry for entry in found if entry not in set(images)]
    if not texts:
        raise UnreadableData(str(path), "text files", f"{len(images)} images and nothing else" if images else "nothing")
    given = RawData(iter(()))
    read = (lambda entry: lines(_read_text(entry))) if per_line else (lambda entry: [_read_text(entry).strip()])
    given.items = _of_files(path, texts, given, read)
    return given


def _of_files(folder: Path, files: Iterable[Path], given: RawData, read: Callable[[Path], list[Any]]) -> Iterator[Any]:
    """What is in every file, with the name of the folder inside `folder` that it lies in as its class."""
    for file in files:
        for item in read(file):
            if item:
                given.labels.append(file.parent.name if file.parent != folder else None)
                yield item


def _one_file(path: Path, kind: str, per_line: bool) -> RawData:
    if kind == "image":
        if path.suffix.lower() in IMAGE_ENDINGS:
            return RawData(iter([open_picture(path, str(path))]))
        raise UnreadableData(str(path), "a folder of images, for a vision model", "one text file")
    text = _read_text(path)
    parts = lines(text) if per_line else paragraphs(text)
    by_line, few = len(lines(text)), 4  # fewer texts have no interval
    note = f"Paragraphs are texts: {len(parts)} here. By line (--per-line) there are {by_line}."
    return RawData(iter(parts), sum(map(len, parts)), note=note if len(parts) < few <= by_line else "")


def lines(text: str) -> list[str]:
    """Lines that are not blank, without their margins."""
    return [line.strip() for line in text.split("\n") if line.strip()]


def paragraphs(text: str) -> list[str]:
    """What stands between blank lines; a line of nothing but white space is blank."""
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#04x} at {error.start}"
        raise UnreadableData(str(path), "text in UTF-8", found) from error
    except OSError as error:
        raise UnreadableData(str(path), "a file that may be read", reason_of(error)) from error


# --- tables and datasets --------------------------------------------------------------------------------------------


def _table(data: str, path: Path, kind: str) -> RawData:
    ending = path.suffix.lower()
    expected = f"a {ending} table"
    if TABLES[ending] == "json":
        return of_rows(data, expected, (row for _, row in json_rows(data, path)), kind)
    rows = load_rows(data, expected, TABLES[ending], data_files=str(path), split="train", streaming=True)
    return of_rows(data, expected, rows, kind)


def _dataset(data: str, kind: str) -> RawData:
    name, split = name_and_split(data)
    expected = "a file, a folder or a dataset name (NAME or NAME:SPLIT)"
    return of_rows(data, expected, load_hub_rows(data, expected, name, split=split, streaming=True), kind)


def of_rows(data: str, expected: str, rows: Any, kind: str) -> RawData:
    """Rows with one column, the first that holds what the model takes."""
    try:
        if getattr(rows, "features", None) and hasattr(rows, "decode"):
            rows = rows.decode(False)  # pictures are unpacked here, with our limits
        iterator = iter(rows)
        preview = list(islice(iterator, ROWS_TO_LOOK_AT))
    except UnreadableData:
        raise
    except Exception as error:  # pyarrow and datasets raise errors without a common base
        raise UnreadableData(data, expected, first_line(error)) from error
    given, whole = RawData(iter(())), chain(preview, _further(data, expected, iterator))
    given.items = _cells(data, kind, whole, _column(data, kind, preview), given)
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


def _cells(data: str, kind: str, rows: Iterable[Mapping[str, Any]], column: str, given: RawData) -> Iterator[Any]:
    for number, row in enumerate(rows):
        value: Any = row.get(column)
        if kind == "text" and _is_text(value):
            given.labels.append(label_in(row))
            yield str(value).strip()
        elif kind == "image" and _is_picture(value):
            given.labels.append(label_in(row))
            name = f"{data}, row {number}"
            if isinstance(value, Mapping):
                yield open_picture(value["bytes"] or Path(value["path"]), name)
            else:
                require_usable(value, name)
                yield value.convert("RGB")
        else:
            given.empty += 1
