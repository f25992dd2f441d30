"""Rows of `.jsonl` and `.json` files, read with Python's own parser: pyarrow's ends the process on a line that is `null`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oversmooth.errors import UnreadableData, first_line, reason_of
from oversmooth.results.json_text import json_kind

LARGEST_LIST = 512 * 2**20
"""Bytes of a file that is one JSON value and has to be parsed as a whole; one row per line may be of any length."""


def json_rows(data: str, path: Path) -> Iterator[dict[str, Any]]:
    """Objects, one per line or in one list; a bare string is the text of a row, `null` a row with nothing in it."""
    try:
        with path.open("rb") as file:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        rows = _list(data, path) if start.startswith(b"[") else _lines(path)
        for number, value in rows:
            if isinstance(value, str):
                value = {"text": value}
            if value is not None and not isinstance(value, dict):
                raise UnreadableData(data, "a JSON object in every row", f"{json_kind(value)} in row {number}")
            yield value or {}
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
                yield number, json.loads(line)
