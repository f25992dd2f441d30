"""Intervals, directions, running means and the rank correlation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from oversmooth.results.base import Interval

# --- what a mean over sequences says: the direction that follows from its interval ---

SMOOTHING, SHARPENING, NO_CLEAR_CHANGE = "smoothing", "sharpening", "no clear change"
ROUNDING = 1e-6
"""Changes of log(HFC/LFC) and of the mean cosine up to this are rounding in float32."""


def direction(mean: float, found: Interval | None, *, smooths_upwards: bool = False) -> str:
    """smoothing, sharpening, or no clear change where the interval holds zero.

    log(HFC/LFC) falls where tokens are smoothed; a mean cosine rises (`smooths_upwards`). A single sequence has no
    interval: its sign is all there is, and whoever shows it says so.
    """
    if abs(mean) <= ROUNDING or (found is not None and found[0] <= 0 <= found[1]):
        return NO_CLEAR_CHANGE
    return SMOOTHING if (mean > 0) == smooths_upwards else SHARPENING


@dataclass(slots=True)
class Running:
    """Mean and standard error of a stream of numbers (Welford, by batches), in float64."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, given: Float[np.ndarray, " batch"] | Float[Tensor, " batch"]) -> None:
        """Numbers, or a tensor of them on the CPU."""
        numbers = np.asarray(given, dtype=np.float64)
        if len(numbers):
            mean = float(numbers.mean())
            self.join(len(numbers), mean, float(np.square(numbers - mean).sum()))

    def join(self, count: int, mean: float, squares: float) -> None:
        """`count` numbers, above 0, by their mean and the sum of their squared distances from it."""
        total = self.count + count
        step = mean - self.mean
        self.squares += squares + step**2 * self.count * count / total
        self.mean += step * count / total
        self.count = total

    @property
    def standard_error(self) -> float | None:
        return math.sqrt(self.squares / (self.count - 1) / self.count) if self.count > 1 else None


# --- how well a rung of the ladder agrees with the measurement over the layers of a model ---


def sign_agreement(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Share of layers whose sign is right, in [0, 1]; `None` without layers."""
    if not predicted:
        return None
    return sum((p < 0) == (m < 0) for p, m in zip(predicted, measured, strict=True)) / len(predicted)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties sharing their mean rank; `None` below three layers or where all are equal."""
    if len(a) < 3 or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])  # scipy.stats has it too, and takes seconds to import


def _ranks(values: Sequence[float]) -> np.ndarray:
    """The rank of every value from 0, ties sharing their mean rank."""
    _, positions, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2)[positions]
