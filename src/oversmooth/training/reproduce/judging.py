"""From kept numbers to verdicts: every judgement is a function of the observations alone, and can be made again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite

from oversmooth.training.reproduce.claim import Claim, Compare, Compared, Finding, Observations, Tests
from oversmooth.training.reproduce.experiments import FOLDED, FOLDS
from oversmooth.training.reproduce.materials import Row
from oversmooth.training.reproduce.statistics import LEVEL, Effect, holm, outcome, paired_effect
from oversmooth.training.reproduce.tuning import rates_table


def judged(claims: Sequence[Claim], observed: Mapping[str, Observations], family: int) -> dict[str, Finding]:
    """The finding of every claim that was observed, with Holm's correction over the tests of all verdicts.

    `family` counts those of all claims, whichever are looked at: more of them cannot make a verdict harder to reach.
    """
    there = [claim for claim in claims if claim.name in observed]
    compared = {claim.name: _all_compared(claim, observed[claim.name], LEVEL / family) for claim in there}
    tests = {
        (claim.name, verdict): p
        for claim in there
        if claim.tests is not None
        for verdict, p in claim.tests(observed[claim.name], compared[claim.name]).items()
    }
    corrected = dict(zip(tests, holm(list(tests.values()), family), strict=True))
    found = {}
    for claim in there:
        of_claim: Tests = {verdict: p for (name, verdict), p in corrected.items() if name == claim.name}
        found[claim.name] = Finding(
            verdict=claim.decide(observed[claim.name], compared[claim.name], of_claim),
            compared=tuple(each.row() for each in compared[claim.name]),
            by_model=tuple(claim.tabulate(observed[claim.name])),
            against=tuple(row for row in observed[claim.name].get("computed", ()) if row["regime"] != "smoothing"),
            left_out=tuple(observed[claim.name].get("left_out", ())),
            weights=tuple(observed[claim.name].get("weights", ())),
            rates=tuple(rates_table(observed[claim.name].get("rates", ()), claim.needs)),
        )
    return found


def _all_compared(claim: Claim, observed: Observations, level: float) -> list[Compared]:
    units = {experiment.name: experiment.units for experiment, _ in claim.needs}
    return [
        _compared(
            replace(compare, is_primary=claim.decides_by(observed, compare)),
            paired(observed.get("runs", ()), compare),
            units[compare.setting],
            level,
        )
        for compare in claim.compares
    ]


def _compared(compare: Compare, effect: Effect | None, planned: int, level: float) -> Compared:
    return Compared(
        compare=compare,
        effect=effect,
        outcome="not run" if effect is None else outcome(effect, effect.p, compare.margin),
        planned=planned,
        clear_from=None if effect is None else effect.clear_from(level),
    )


def paired(rows: Sequence[Row], compare: Compare) -> Effect | None:
    """The effect over units that have both numbers; `None` for fewer than two of them."""
    values: dict[str, dict[int, float]] = {compare.of: {}, compare.against: {}}
    for row in rows:
        value = row.get(compare.metric)
        if row["setting"] == compare.setting and row["variant"] in values and value is not None and isfinite(value):
            values[row["variant"]][row["unit"]] = value
    of = values[compare.of]
    against = values[compare.against] if compare.against else dict.fromkeys(of, 0.0)
    units = sorted(of.keys() & against.keys())
    if len(units) < 2:
        return None
    shared = 1 / FOLDS if compare.setting in FOLDED else 0.0
    return paired_effect([of[unit] for unit in units], [against[unit] for unit in units], shared)
