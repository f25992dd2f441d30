"""The rules by which a difference is called clear: one place, small enough to read, simulated under the null in the tests.

A unit is a pretrained model, or a training run with its own seed (on digits with its own test images too). Variants are
compared within units (paired). Where several things have to hold for a verdict, its p-value is the largest of theirs
(`all_of`); where one of several is enough, the smallest times their number (`one_of`). "Clearly" means that in at most 5 of
100 studies in which it is not so a verdict would say so; over the verdicts of all claims together, by Holm's correction.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats
from scipy.special import stdtr, stdtrit

LEVEL = 0.05
RESAMPLES = 10_000
NO_SPREAD = 1e-4
"""Standard deviation below which differences count as all the same: rounding, and folds that are an image larger than others,
leave that much."""
FEWEST_INPUTS = 8
"""Inputs below which a bootstrap interval is not worth its name."""
EXACT_UP_TO = 14
"""Most units for which all signs are tried; above it they are drawn."""
Outcome = Literal["higher", "lower", "no difference larger than the margin", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The mean of paired differences and what Student's t says of it."""

    mean: float
    error: float
    """The standard error of the mean."""
    units: int

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"

    @property
    def low(self) -> float:
        """The lower end of the 95% interval."""
        return self.mean - self.clear_from(LEVEL / 2)

    @property
    def high(self) -> float:
        """The upper end of the 95% interval."""
        return self.mean + self.clear_from(LEVEL / 2)

    @property
    def p(self) -> float:
        """Two-sided p-value of no difference."""
        return min(1.0, 2 * min(self.above(), self.below()))

    def clear_from(self, level: float) -> float:
        """The smallest mean that would be above zero at this level, one-sided, with the spread that was seen."""
        return self.error * float(stdtrit(self.units - 1, 1 - level))

    def above(self, bound: float = 0.0) -> float:
        """p-value of a mean of at most `bound`: one-sided. Without any spread it is one."""
        return float(stdtr(self.units - 1, (bound - self.mean) / self.error)) if self.error > 0 else 1.0

    def below(self, bound: float = 0.0) -> float:
        """p-value of a mean of at least `bound`: one-sided. Without any spread it is one."""
        return float(stdtr(self.units - 1, (self.mean - bound) / self.error)) if self.error > 0 else 1.0


def paired_effect(a: Sequence[float], b: Sequence[float], shared: float = 0.0) -> Effect:
    """Of `a - b`; units in the same order on both sides, at least two.

    `shared` is the correlation between the differences of two units. Folds of one data set train on each other's images:
    with k folds it is taken as 1/k, and the error of the mean grows as Nadeau and Bengio (2003) say. Differences that are
    all the same leave no spread to judge by: then p is one, unless one knows better.
    """
    assert len(a) == len(b) >= 2, "one value per unit on both sides"
    difference = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    spread = float(difference.std(ddof=1))
    error = spread * (1 / len(difference) + shared / (1 - shared)) ** 0.5 if spread > NO_SPREAD else 0.0
    return Effect(mean=float(difference.mean()), error=error, units=len(difference))


def is_equivalent(effect: Effect, margin: float) -> bool:
    """Whether the difference is clearly smaller than the margin: both one-sided tests at 5%, the 90% interval inside it."""
    return max(effect.above(-margin), effect.below(margin)) <= LEVEL


def all_of(p_values: Iterable[float]) -> float:
    """p-value of several things that have to hold together: the largest (an intersection-union test)."""
    return max(p_values)


def one_of(p_values: Iterable[float]) -> float:
    """p-value of several things of which one is enough: the smallest, times their number (Bonferroni)."""
    found = list(p_values)
    return min(1.0, len(found) * min(found))


def share_left_open(units: int) -> float:
    """The largest share of all units that can be otherwise when each of so many is alike (95%)."""
    return 1 - LEVEL ** (1 / units)


def first_clear(tests: Mapping[Literal["confirmed", "refuted"], float]) -> Literal["confirmed", "refuted"] | None:
    """The verdict whose corrected p-value is at most 5%; confirmed before refuted, where both are."""
    return next((verdict for verdict in ("confirmed", "refuted") if tests[verdict] <= LEVEL), None)


def holm(p_values: Sequence[float], family: int | None = None) -> list[float]:
    """p-values for a family of comparisons: the smallest times their number, the next times one less, never falling.

    `family` is how many there are where not all of them were made.
    """
    size = family or len(p_values)
    assert size >= len(p_values), "a family has all of its members"
    order = np.argsort(p_values, kind="stable")
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, position in enumerate(order):
        largest = max(largest, min(1.0, (size - rank) * p_values[position]))
        adjusted[position] = largest
    return adjusted


def outcome(effect: Effect, p: float, margin: float) -> Outcome:
    """What a comparison came to: a clear difference first, then a clear absence of one that matters."""
    if p <= LEVEL:
        return "higher" if effect.mean > 0 else "lower"
    return "no difference larger than the margin" if is_equivalent(effect, margin) else "undecided"


def sign_flip_p(values: Sequence[float], seed: int = 0) -> float:
    """p-value of a mean above zero where each value could as well have had the other sign: exact for few units.

    n units give at best 2^-n: fewer than five can never be clear.
    """
    found = np.asarray(values, dtype=float)
    if len(found) <= EXACT_UP_TO:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(found))))
    else:
        drawn = np.random.default_rng(seed).choice((1.0, -1.0), size=(RESAMPLES, len(found)))
        signs = np.concatenate([np.ones((1, len(found))), drawn])
    means = signs @ found / len(found)
    return float((means >= found.mean() - 1e-12).mean())


def direction(values: Sequence[float], level: float, seed: int = 0) -> tuple[int, float, float]:
    """1, -1 or 0 where the bootstrap interval of the mean over inputs is above zero, below it, or holds it; and its ends.

    Studentised (bootstrap-t): intervals by percentiles of few values are too narrow, most of all where values are skewed.
    """
    found = np.asarray(values, dtype=float)
    count, mean, spread = len(found), float(found.mean()), float(found.std(ddof=1)) if len(found) > 1 else 0.0
    if spread <= NO_SPREAD or count < FEWEST_INPUTS:
        return 0, mean, mean
    drawn = found[np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))]
    spreads = drawn.std(1, ddof=1)
    kept = spreads > 0  # a resample of one value says nothing
    t = (drawn[kept].mean(1) - mean) / spreads[kept]
    left, right = np.quantile(t, (level / 2, 1 - level / 2))
    low, high = mean - float(right) * spread, mean - float(left) * spread
    return int(low > 0) - int(high < 0), low, high


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's; `None` where one side does not vary."""
    if len(a) < 3 or len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return float(stats.spearmanr(a, b).statistic)
