"""Where known models lie: the range of a quantity over all layers of the surveyed models with the same residual form.

The survey is the file `reference.json` beside this module, written by `benchmarks/survey_reference.py` from the models
that were at hand; it is a scale to read numbers by, not a norm that a model ought to meet.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from oversmooth.output.numbers import signed

Quantity = Literal["tendency", "exponent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRange:
    """Smallest and largest value over all layers of the surveyed models of one kind."""

    low: float
    high: float
    residual: str
    """pre or post: where the norm stands."""
    models: tuple[str, ...]

    @property
    def words(self) -> str:
        return f"{signed(self.low)} to {signed(self.high)}"

    @property
    def cell(self) -> str:
        """The same in a table, where it must not take two lines."""
        return f"{signed(self.low)}..{signed(self.high)}"

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def known_range(quantity: Quantity, residual: str) -> KnownRange | None:
    """`None` where no surveyed model has this residual form."""
    kind = [model for model in _survey()["models"] if model["residual"] == residual and model[quantity]]
    values = [value for model in kind for value in model[quantity]]
    if not values:
        return None
    names = tuple(model["model"] for model in kind)
    return KnownRange(low=min(values), high=max(values), residual=residual, models=names)


def range_words(quantity: Quantity, residuals: Sequence[str]) -> str:
    """A sentence that says which models the ranges on a page are of; empty where there are none."""
    found = [known for residual in dict.fromkeys(residuals) if (known := known_range(quantity, residual))]
    if not found:
        return ""
    kinds = "; ".join(f"{known.residual}-norm: {', '.join(known.models)}" for known in found)
    return (
        f"Known range of the {quantity}: all layers of the models in a kept survey of what was at hand ({kinds}). It says "
        "where known models lie, not where a model ought to."
    )


@cache
def _survey() -> dict[str, Any]:
    text = (files(__package__) / "reference.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
