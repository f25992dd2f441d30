"""JSON that others wrote, and every way in which it can be wrong, in words."""

import json
from typing import Any

from oversmooth.errors import BrokenFile

KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}


DEEPEST = 127
"""Levels of nesting; more are refused by the safetensors reader too, and no file of ours has a tenth of it."""
TOO_DEEP = "JSON nested too deeply to be read"


def json_kind(value: object) -> str:
    """What kind of JSON value it is, in words.

    >>> json_kind([1, 2]), json_kind(None)
    ('a list', 'null')
    """
    return KINDS.get(type(value), "null")


def json_object(text: bytes | str, file: str, expected: str = "a JSON object", **options: Any) -> dict[str, Any]:
    """The JSON object in a text; raises `BrokenFile` that says what was found instead.

    Refused too: text that is not UTF-8, nesting beyond the stack, and halves of surrogate pairs, which no file could be
    written with later. `options` are those of `json.loads`.
    """
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(decoded, **options)
        if "\\u" in decoded:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise BrokenFile(file, expected, f"bytes that are not UTF-8 text, at {error.start}") from error
    except UnicodeEncodeError as error:
        half = f"{error.object[error.start]!r}"
        raise BrokenFile(file, expected, f"{half}, which is half a character") from error
    except json.JSONDecodeError as error:
        where = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise BrokenFile(file, expected, f"no JSON ({where})" if decoded.strip() else "an empty text") from error
    except RecursionError as error:
        raise BrokenFile(file, expected, TOO_DEEP) from error
    except ValueError as error:  # Python's own limit on digits, or what an option refused
        raise BrokenFile(file, expected, str(error).partition(";")[0]) from error
    if not isinstance(value, dict):
        raise BrokenFile(file, expected, json_kind(value))
    if _depth(value) > DEEPEST:
        raise BrokenFile(file, expected, TOO_DEEP)
    return value


def _depth(value: object) -> int:
    """Levels of lists and objects, counted without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth
