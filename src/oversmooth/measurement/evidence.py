"""What a mean over sequences says: its interval by Student's t, and the direction that follows from it."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

SMOOTHING, SHARPENING, NO_CLEAR_CHANGE = "smoothing", "sharpening", "no clear change"
CONFIDENCE = 0.95
ROUNDING = 1e-6
"""Changes of log(HFC/LFC) up to this are rounding in float32."""

Interval = tuple[float, float]


def interval(mean: float, standard_error: float | None, sequences: int) -> Interval | None:
    """`mean ± t standard errors`, which holds the true mean in 95 of 100 cases; `None` for fewer than two sequences."""
    from scipy.special import stdtrit

    if standard_error is None or sequences < 2:
        return None
    half = float(stdtrit(sequences - 1, (1 + CONFIDENCE) / 2)) * standard_error
    return mean - half, mean + half


def direction(mean: float, found: Interval | None) -> str:
    """smoothing (below zero), sharpening, or no clear change where the interval holds zero.

    A single sequence has no interval: its sign is all there is, and whoever shows it says so.
    """
    if abs(mean) <= ROUNDING or (found is not None and found[0] <= 0 <= found[1]):
        return NO_CLEAR_CHANGE
    return SMOOTHING if mean < 0 else SHARPENING


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
