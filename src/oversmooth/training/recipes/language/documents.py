"""Documents of a corpus, one after the other and never all at once, from files or from the hub.

    .jsonl .jsonl.zst .jsonl.gz     one JSON object per line, its text under "text"
    .parquet                        rows, the column "text"
    .txt and any other              paragraphs, separated by blank lines
    a folder                        all of these inside it, in the order of their names
    NAME or NAME:SPLIT              a dataset of the hub, streamed

What cannot be used is passed over, counted by reason, and the first of each kind is named with its file and line. A line
is never held in memory beyond `MAX_RECORD_BYTES`.
"""

import gzip
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oversmooth.data.dataset_library import load_hub_rows, name_and_split
from oversmooth.data.given import require_there
from oversmooth.errors import MissingDependency, UnreadableData, first_line

MAX_RECORD_BYTES = 32 * 2**20
"""Longest line of a .jsonl file, and longest paragraph of a .txt file, that is read as one document."""
NAMED_PER_REASON = 5
ENDINGS = (".jsonl", ".jsonl.zst", ".json.zst", ".jsonl.gz", ".parquet", ".txt", ".md", ".rst")

NO_JSON, NO_TEXT, EMPTY, TOO_LONG, CUT = "not JSON", "no text", "empty", "too long for one line", "cut in pieces"


@dataclass
class Tally:
    """How many records were read and which were passed over, for what reason, and where the first of them are."""

    records: int = 0
    """Lines, rows or paragraphs, used or not: the position at which reading can be taken up again."""
    skipped: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)
    """The first of every reason, in words: file, line, what is wrong."""

    def skip(self, reason: str, where: str, detail: str = "") -> None:
        self.skipped[reason] += 1
        if self.skipped[reason] <= NAMED_PER_REASON:
            self.named.append(f"{where}: {reason}{f' ({detail})' if detail else ''}")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far reading has come, in bytes of the files as they lie on the disk; 0 of 0 for the hub."""

    done: int
    total: int


def corpus_files(source: str) -> list[Path]:
    """The files that a local source consists of, in reading order; empty where it is no local path."""
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(ENDINGS))
    if not files:
        raise UnreadableData(source, f"files that end in {', '.join(ENDINGS)}", "a folder with none of them")
    return files


def documents(
    source: str,
    tally: Tally,
    *,
    skip: int = 0,
    report: Callable[[Progress], None] = lambda progress: None,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[str]:
    """The texts of a source; `skip` passes over that many records unread, `tally` says what was passed over."""
    files = corpus_files(source)
    if not files:
        yield from _hub(source, tally, skip)
        return
    total, before = sum(file.stat().st_size for file in files), 0
    for file in files:
        with file.open("rb") as raw:
            for number, where, text in _records(file, raw, tally, max_record_bytes):
                tally.records += 1
                if tally.records > skip and (found := _usable(text, where, tally)):
                    yield found
                if number % 64 == 0:
                    report(Progress(before + raw.tell(), total))
        before += file.stat().st_size
    report(Progress(total, total))


Text = str | Callable[[], Any]
"""A text, or what gives it; a record that is passed over is never decoded."""
Record = tuple[int, str, Text]
"""Number within its file, where it is in words, and its text."""


def _records(file: Path, raw: io.BufferedIOBase, tally: Tally, limit: int) -> Iterator[Record]:
    name = file.name
    if name.endswith(".parquet"):
        return _parquet(file, raw)
    stream: Any = raw
    if name.endswith(".zst"):
        stream = _decompressed(raw)
    elif name.endswith(".gz"):
        stream = gzip.GzipFile(fileobj=raw)
    if ".jsonl" in name or ".json." in name:
        return _jsonl(file, stream, limit)
    return _paragraphs(file, stream, tally, limit)


def _decompressed(raw: io.BufferedIOBase) -> io.BufferedReader:
    try:
        import pyarrow
    except ImportError as error:
        raise MissingDependency("pyarrow", "hf", "reading .zst files") from error
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd"), 2**20)


def _usable(text: Text, where: str, tally: Tally) -> str | None:
    """The text without what cannot be encoded, or `None` where there is none; then it is counted."""
    try:
        found = text() if callable(text) else text
    except _Unusable as error:
        tally.skip(error.reason, where, error.detail)
        return None
    if not isinstance(found, str):
        tally.skip(NO_TEXT, where, f"a {type(found).__name__} under 'text'")
        return None
    if not found or found.isspace():
        tally.skip(EMPTY, where)
        return None
    try:
        found.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write and no tokenizer takes
        return found.encode("utf-8", "replace").decode("utf-8")
    return found


class _Unusable(Exception):
    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


# --- lines ----------------------------------------------------------------------------------------------------------


def _lines(file: Path, stream: io.BufferedIOBase, limit: int) -> Iterator[tuple[int, bytes, bool]]:
    """Number, bytes and whether the line ends there; a line beyond the limit comes in pieces of that size."""
    number, ends = 1, True
    try:
        while chunk := stream.readline(limit):
            ends = chunk.endswith(b"\n")
            yield number, chunk, ends
            number += ends
    except (OSError, EOFError) as error:
        found = f"damaged data after line {number} ({first_line(error)})"
        raise UnreadableData(str(file), "a file that can be read to its end", found) from error


def _jsonl(file: Path, stream: io.BufferedIOBase, limit: int) -> Iterator[Record]:
    lines = _lines(file, stream, limit)
    for number, line, ends in lines:
        where = f"{file}, line {number}"
        if ends or len(line) < limit:
            yield number, where, lambda line=line: _text_of_json(line)  # type: ignore[misc]
            continue
        size = len(line)
        for _, rest, ends_now in lines:
            size += len(rest)
            if ends_now:
                break
        yield number, where, lambda size=size: _refuse(TOO_LONG, f"{size:,} bytes; at most {limit:,}")  # type: ignore[misc]


def _refuse(reason: str, detail: str) -> str:
    raise _Unusable(reason, detail)


def _text_of_json(line: bytes) -> Any:
    if not line.strip():
        return ""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _Unusable(NO_JSON, str(error)) from error
    if not isinstance(record, dict) or "text" not in record:
        keys = ", ".join(map(str, list(record)[:5])) if isinstance(record, dict) else type(record).__name__
        raise _Unusable(NO_TEXT, f"found {keys or 'no keys'}")
    return record["text"]


def _paragraphs(file: Path, stream: io.BufferedIOBase, tally: Tally, limit: int) -> Iterator[Record]:
    """Lines up to a blank one; more than the limit, also without any line break, is cut there."""
    held: list[bytes] = []
    size, first, count = 0, 1, 0
    for number, line, ends in _lines(file, stream, limit):
        is_blank = ends and not line.strip()
        if held and (is_blank or size + len(line) > limit):
            count += 1
            where = f"{file}, line {first}"
            yield count, where, _decoded(b"".join(held), None if is_blank else (tally, where))
            held, size = [], 0
        if not is_blank:
            first = first if held else number
            held.append(line)
            size += len(line)
    if held:
        yield count + 1, f"{file}, line {first}", _decoded(b"".join(held), None)


def _decoded(data: bytes, cut: tuple[Tally, str] | None) -> Callable[[], str]:
    def text() -> str:
        if cut is not None:
            cut[0].skip(CUT, cut[1], f"after {len(data):,} bytes")
        return data.decode("utf-8", "replace").strip()

    return text


# --- tables and the hub ---------------------------------------------------------------------------------------------


def _parquet(file: Path, raw: io.BufferedIOBase) -> Iterator[Record]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependency("pyarrow", "hf", "reading .parquet files") from error
    try:
        table = parquet.ParquetFile(raw, pre_buffer=False)
    except pyarrow.ArrowException as error:
        raise UnreadableData(str(file), "a Parquet file", first_line(error)) from error
    if "text" not in table.schema_arrow.names:
        raise UnreadableData(str(file), "a column 'text'", f"the columns {', '.join(table.schema_arrow.names)}")
    number = 0
    for batch in table.iter_batches(batch_size=64, columns=["text"]):
        for value in batch.column(0):
            number += 1
            yield number, f"{file}, row {number}", value.as_py


def _hub(source: str, tally: Tally, skip: int) -> Iterator[str]:
    name, split = name_and_split(source)
    expected = "a file, a folder or a dataset of the hub (NAME or NAME:SPLIT)"
    require_there(source)
    rows = load_hub_rows(source, expected, name, split=split, streaming=True)
    rows = rows.skip(skip) if skip else rows
    tally.records = skip
    for row in rows:
        tally.records += 1
        where = f"{source}, row {tally.records}"
        if "text" not in row:
            raise UnreadableData(source, "a column 'text'", f"the columns {', '.join(row)}")
        if found := _usable(row["text"], where, tally):
            yield found
