"""Whether a declaration fits a model."""

from dataclasses import dataclass
from typing import ClassVar

from oversmooth.results.base import Provenance, Row, SavedResult, fields_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCheck:
    """How well one layer of a live model fits its declaration."""

    stack: str
    layer: int
    error: float
    """Largest deviation from the equal-token identity, relative to the largest output."""
    tokens: int
    """Tokens in the sequence that was run."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification(SavedResult):
    """The equal-token identity, checked on a live model: does the declaration fit this very model?"""

    kind: ClassVar[str] = "verification"
    provenance: Provenance
    tolerance: float
    layers: tuple[LayerCheck, ...]

    @property
    def largest_error(self) -> float:
        """Of all layers."""
        return max(layer.error for layer in self.layers)

    @property
    def passed(self) -> bool:
        """Whether every layer deviates by at most `tolerance`."""
        return self.largest_error <= self.tolerance

    def rows(self) -> list[Row]:
        """One flat row per layer."""
        return [fields_of(layer) for layer in self.layers]

    def __repr__(self) -> str:
        word = "fits" if self.passed else "does not fit"
        return (
            f"<Verification of {self.provenance.target}: {', '.join(self.provenance.families)} {word}, "
            f"largest error {self.largest_error:.1e} in {len(self.layers)} layers>"
        )

    def _title(self) -> str:
        return f"Verification of {self.provenance.target}"
