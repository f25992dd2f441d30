"""How well a rung of the ladder agrees with the measurement over the layers of a model."""

from collections.abc import Sequence


def sign_agreement(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Share of layers whose sign is right, in [0, 1]; `None` without layers."""
    if not predicted:
        return None
    return sum((p < 0) == (m < 0) for p, m in zip(predicted, measured, strict=True)) / len(predicted)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties sharing their mean rank; `None` below three layers or where all are equal."""
    from scipy.stats import spearmanr

    if len(a) < 3 or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    return float(spearmanr(a, b).statistic)
