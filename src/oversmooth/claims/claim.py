"""A claim of the paper: its protocol, its tests, its verdict; the statistics that verdicts use.

A unit is a pretrained model, or a training run with its own seed (on digits with its own test images too). Variants are
compared within units (paired). Where several things have to hold for a verdict, its p-value is the largest of theirs
(`all_of`); where one of several is enough, the smallest times their number (`one_of`). "Clearly" means that in at most 5 of
100 studies in which it is not so a verdict would say so; over the verdicts of all claims together, by Holm's correction.

A claim is data that was written before anything was run: its statement and protocol (`protocols.toml`), what is compared
with what, by which margin. Observing it gives plain numbers, which are kept. Judging is a function of these numbers
alone, so that anybody can judge again.
"""

import itertools
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.special import stdtr, stdtrit

from oversmooth.claims.context import ClaimContext, Row
from oversmooth.claims.experiments import Experiment

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
    # scipy.stats has it too, as `permutation_test`, and takes a second to import.
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


# --- what a claim is, what is observed for it, and what that comes to ---

Judgement = Literal[
    "confirmed", "refuted", "no difference larger than the margin", "theorem, checked", "undecided", "not run"
]
Observations = Mapping[str, Sequence[Row]]
"""Tables by name, of plain numbers that two runs of the same code repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """Two variants on one number, unit by unit."""

    setting: str
    metric: str
    of: str
    against: str
    """Another variant, or "" for nothing: then it is the number itself that may differ from zero."""
    margin: float
    """A difference below it does not matter."""
    is_primary: bool = True
    """Whether the judgement rests on it."""
    note: str = ""
    """What the comparison separates, where it is a control."""

    @property
    def words(self) -> str:
        against = f" minus {self.against}" if self.against else ""
        return f"{self.metric.replace('_', ' ')} of {self.of}{against}, {self.setting}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What a comparison came to."""

    compare: Compare
    effect: Effect | None
    """`None` where fewer than two units have both numbers."""
    outcome: Outcome | Literal["not run"]
    """By itself; verdicts have tests of their own."""
    planned: int
    """Units that its runs have when all are finished."""
    clear_from: float | None
    """The difference that a verdict would have needed, with the spread that was seen."""

    @property
    def is_complete(self) -> bool:
        return self.effect is not None and self.effect.units == self.planned

    def row(self) -> Row:
        effect = self.effect
        return {
            "comparison": self.compare.words,
            "effect": None if effect is None else round(effect.mean, 4),
            "low": None if effect is None else round(effect.low, 4),
            "high": None if effect is None else round(effect.high, 4),
            "margin": self.compare.margin,
            "units": 0 if effect is None else effect.units,
            "p": None if effect is None else float(f"{effect.p:.2g}"),
            "clear_from": None if self.clear_from is None else round(self.clear_from, 4),
            "counts": "primary" if self.compare.is_primary else "beside it",
            "outcome": self.outcome,
            "separates": self.compare.note,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one claim and the numbers that it rests on."""

    judgement: Judgement
    brief: str
    """In a few words, for a card."""
    because: str
    """In a sentence that has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimResult:
    """A verdict with the tables that a reader needs to check it."""

    verdict: Verdict
    compared: tuple[Row, ...] = ()
    by_model: tuple[Row, ...] = ()
    """What was observed, a row per model."""
    weights: tuple[Row, ...] = ()
    """What the weights of everything at hand say, shown beside a verdict that does not rest on it."""
    against: tuple[Row, ...] = ()
    """Layers that stand against a statement about all of them."""
    left_out: tuple[Row, ...] = ()
    """Models that were at hand and could not be used, with the reason."""
    rates: tuple[Row, ...] = ()
    """What its variants came to at every learning rate, and which was chosen."""


Tests = Mapping[Literal["confirmed", "refuted"], float]
"""The p-value of each verdict: how likely such numbers are, at most, where it is wrong. Empty where runs are missing."""
Decide = Callable[[Observations, Sequence[Compared], Tests], Verdict]
"""From what was observed and compared, and the p-values of its tests, corrected for those of all claims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim of the paper, stated before it is checked."""

    number: int
    name: str
    written: str
    """The day on which the protocol got its present form."""
    statement: str
    """What the paper says, in our words."""
    protocol: str
    unit: str
    confirmed_if: str
    refuted_if: str
    """Undecided otherwise, or, where `equal_if` holds, no difference larger than the margin."""
    does_not_show: str
    cost: Mapping[str, str]
    """By scale."""
    commands: tuple[str, ...]
    """What `full` scale runs, on a GPU."""
    observe: Callable[[ClaimContext], Observations]
    decide: Decide
    equal_if: str = ""
    """What makes "no difference larger than the margin" the judgement, where it can be."""
    tests: Callable[[Observations, Sequence[Compared]], Tests] | None = None
    """What the verdict rests on, before any correction; without it the claim is judged by a rule that has no p-value."""
    tabulate: Callable[[Observations], Sequence[Row]] = lambda observed: ()
    """What was observed, a row per model, for readers."""
    compares: tuple[Compare, ...] = ()
    decides_by: Callable[[Observations, Compare], bool] = lambda observed, compare: compare.is_primary
    """Whether the judgement rests on a comparison, where that depends on what was observed."""
    needs: tuple[tuple[Experiment, tuple[str, ...]], ...] = ()
    """Experiments and their variants; trained together, because they are independent."""

    def for_scale(self, is_quick: bool) -> "Claim":
        needs = tuple((experiment.for_scale(is_quick), variants) for experiment, variants in self.needs)
        return replace(self, needs=needs)


def protocol(name: str) -> dict[str, Any]:
    """The texts of a claim in `protocols.toml`, as keywords of `Claim`."""
    found = tomllib.loads(Path(__file__).with_name("protocols.toml").read_text(encoding="utf-8"))
    return {"name": name, "written": found["written"], **found[name]}
