"""How well a rung of the ladder agrees with the measurement over the layers of a model."""

from collections.abc import Sequence


def sign_agreement(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Share of layers whose sign is right, in [0, 1]; `None` without layers."""
    if not predicted:
        return None
    return sum((p < 0) == (m < 0) for p, m in zip(predicted, measured, strict=True)) / len(predicted)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties sharing their mean rank; `None` below three layers or where all are equal."""
    if len(a) < 3:
        return None
    ranks_a, ranks_b = _ranks(a), _ranks(b)
    mean = (len(a) - 1) / 2
    products = [
        sum((x - mean) * (y - mean) for x, y in zip(first, second, strict=True))
        for first, second in ((ranks_a, ranks_b), (ranks_a, ranks_a), (ranks_b, ranks_b))
    ]
    if products[1] <= 0 or products[2] <= 0:
        return None
    return max(-1.0, min(1.0, products[0] / (products[1] * products[2]) ** 0.5))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(ordered.index(value) + len(ordered) - 1 - ordered[::-1].index(value)) / 2 for value in values]
