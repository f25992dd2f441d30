"""Which models are covered: the table that `make families` writes, one row per model type of transformers and timm family."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

STATES = {
    "declared": "declared by hand, and found and proved by running",
    "discovered": "found and proved by running",
    "refused": "refused, for a reason of mathematics",
    "no attention": "has no softmax self-attention",
    "part": "a config without a model of its own: a part of others",
    "not run": "could not be run with made-up inputs here",
    "not built": "could not be built small here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """What is known about one model type."""

    library: str
    name: str
    state: str
    error: float | None
    """Of the equal-token identity, where it was proved."""
    kind: str
    """What stands in the way of one that is refused, in one word."""
    reason: str
    left_out: tuple[str, ...]


@cache
def coverage() -> tuple[Covered, ...]:
    """Every row of the table."""
    table = _table()
    return tuple(_row(library, name, row) for library, rows in table["rows"].items() for name, row in rows.items())


def versions() -> Mapping[str, str]:
    """Versions of the libraries that the table was made with."""
    found: Mapping[str, str] = _table()["versions"]
    return found


def counted(library: str) -> Counter[str]:
    """How many model types of a library are in each state."""
    return Counter(row.state for row in coverage() if row.library == library)


def _row(library: str, name: str, row: Mapping[str, Any]) -> Covered:
    is_declared = row["state"] == "discovered" and row.get("declared", False)
    return Covered(
        library=library,
        name=name,
        state="declared" if is_declared else row["state"],
        error=row.get("error"),
        kind=row.get("kind", ""),
        reason=row.get("reason", ""),
        left_out=tuple(row.get("left_out", ())),
    )


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files("oversmooth.models").joinpath("families_table.json").read_text())
    return found
