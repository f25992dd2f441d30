"""How well a rung of the ladder agrees with the measurement over the layers of a model."""

from collections.abc import Sequence

import numpy as np


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
