"""What a claim is, what is observed for it, and what that comes to.

A claim is data that was written before anything was run: its statement, the unit that counts, what is compared with what,
by which margin. Observing it gives plain numbers, which are kept. Judging is a function of these numbers alone, so that
anybody can judge again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from oversmooth.training.reproduce.experiments import Experiment
from oversmooth.training.reproduce.materials import Materials, Row
from oversmooth.training.reproduce.statistics import Effect, Outcome

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
class Finding:
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
    observe: Callable[[Materials], Observations]
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
