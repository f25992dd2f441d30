"""How features, and what the theory says about them, depend on the length of a text."""

from dataclasses import dataclass
from typing import ClassVar

from oversmooth.results.base import Provenance, Row, SavedResult, fields_of
from oversmooth.results.measurement import DataFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthValue:
    """One metric at one depth, of texts of one length."""

    length: int
    """Tokens of each text."""
    stack: str
    depth: int
    """0 for the embedding, k + 1 behind block k."""
    metric: str
    mean: float | None
    standard_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthChange:
    """What the whole stack does to texts of one length."""

    length: int
    stack: str
    change: float
    """Of `log(HFC/LFC)` at unit length, from embedding to output; below 0 it smooths."""
    interval: tuple[float, float] | None
    """95% over texts; `None` for a single one."""
    direction: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPrediction:
    """What the theory says about one layer on texts of one length."""

    length: int
    stack: str
    layer: int
    depth: int
    regime: str
    """What repetition at the attention of this length would do."""
    exponent: float | None
    """Growth of what differs between tokens over that of what they share, in logarithms, per repetition."""
    measured: float | None
    """Change of `log(HFC/LFC)` across the attention branch, as it was seen."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LengthCurves(SavedResult):
    """The same texts, cut to several lengths."""

    kind: ClassVar[str] = "length curves"
    provenance: Provenance
    data: DataFacts
    """Of the longest."""
    lengths: tuple[int, ...]
    texts: int
    """Texts that have as many tokens as the longest length."""
    left_out: int
    """Texts that are shorter."""
    values: tuple[LengthValue, ...]
    changes: tuple[LengthChange, ...]
    predictions: tuple[LengthPrediction, ...]
    """Empty where nothing was predicted."""
    verdict: str
    """One sentence."""

    def rows(self) -> list[Row]:
        """One flat row per length, depth and metric."""
        return [fields_of(value) for value in self.values]

    def prediction_rows(self) -> list[Row]:
        """One flat row per length and layer."""
        return [fields_of(item) for item in self.predictions]

    def last(self, metric: str, length: int, stack: str) -> LengthValue | None:
        """The value behind the last block."""
        found = [v for v in self.values if (v.metric, v.length, v.stack) == (metric, length, stack)]
        return max(found, key=lambda value: value.depth, default=None)

    def __repr__(self) -> str:
        span = f"{self.lengths[0]} to {self.lengths[-1]} tokens"
        return f"<LengthCurves of {self.provenance.target}: {self.texts} texts, {span}>"

    def _title(self) -> str:
        return f"Over length: {self.provenance.target}"
