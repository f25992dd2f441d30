"""Small text files that a user names: rules, recipes, logs, saved analyses."""

from pathlib import Path

from oversmooth.errors import BrokenFile, reason_of

LARGEST_TEXT = 64 * 2**20
"""Bytes; a device such as /dev/zero never ends, and no file of this kind is a tenth as long."""


def read_text_file(path: Path, expected: str) -> str:
    """The text of a file or pipe; raises `BrokenFile` where it cannot be opened, is no UTF-8 or is too long."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_TEXT + 1)
        if len(content) > LARGEST_TEXT:
            raise BrokenFile(str(path), expected, f"more than {LARGEST_TEXT // 2**20} MB", "Check the path.")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BrokenFile(str(path), expected, f"bytes that are not UTF-8 text, at {error.start}") from error
    except OSError as error:
        raise BrokenFile(str(path), expected, reason_of(error), "Check the path.") from error
