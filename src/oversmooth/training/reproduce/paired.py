"""Differences between two variants, paired over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Mean of `a - b` over seeds and its confidence interval by Student's t."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def sign(self) -> int:
        """1 or -1 where the interval excludes zero, otherwise 0."""
        return int(self.low > 0) - int(self.high < 0)

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Seeds in the same order on both sides, at least two; equal differences give an interval of width zero."""
    assert len(a) == len(b) >= 2, "one value per seed on both sides"
    d = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(d) - 1) * d.std(ddof=1) / len(d) ** 0.5
    return Difference(mean=float(d.mean()), low=float(d.mean() - half), high=float(d.mean() + half), seeds=len(d))
