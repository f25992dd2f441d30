"""From kept numbers to verdicts: every judgement is a function of the observations alone, and can be made again."""

from collections.abc import Mapping, Sequence

from oversmooth.training.reproduce.claim import Claim, Compare, Compared, Finding, Observations
from oversmooth.training.reproduce.experiments import FOLDED, FOLDS
from oversmooth.training.reproduce.materials import Row
from oversmooth.training.reproduce.statistics import Effect, holm, outcome, paired_effect


def judged(claims: Sequence[Claim], observed: Mapping[str, Observations], family: int) -> dict[str, Finding]:
    """The finding of every claim that was observed, with Holm's correction over all primary comparisons and tests.

    `family` counts those of all claims: what one claim comes to does not depend on which others are looked at.
    """
    effects = {
        (claim.name, compare): paired(observed[claim.name].get("runs", ()), compare)
        for claim in claims
        if claim.name in observed
        for compare in claim.compares
    }
    own = {claim.name: claim.own_p(observed[claim.name]) for claim in claims if claim.name in observed and claim.own_p}
    primary: dict[object, float] = {
        key: effect.p for key, effect in effects.items() if effect is not None and key[1].is_primary
    }
    primary |= {name: p for name, p in own.items() if p is not None}
    adjusted = dict(zip(primary, holm(list(primary.values()), family), strict=True))
    found = {}
    for claim in claims:
        if claim.name not in observed:
            continue
        compared = [
            _compared(compare, effects[claim.name, compare], adjusted.get((claim.name, compare)), family)
            for compare in claim.compares
        ]
        verdict = claim.decide(observed[claim.name], compared, adjusted.get(claim.name))
        found[claim.name] = Finding(
            verdict=verdict,
            compared=tuple(each.row() for each in compared),
            by_model=tuple(claim.tabulate(observed[claim.name])),
            weights=tuple(observed[claim.name].get("weights", ())),
        )
    return found


def _compared(compare: Compare, effect: Effect | None, adjusted_p: float | None, family: int) -> Compared:
    if effect is None:
        return Compared(compare=compare, effect=None, adjusted_p=None, clear_from=None, outcome="not run")
    p = effect.p if adjusted_p is None else adjusted_p
    return Compared(
        compare=compare,
        effect=effect,
        adjusted_p=p,
        clear_from=effect.clear_from(family if compare.is_primary else 1),
        outcome=outcome(effect, p, compare.margin),
    )


def paired(rows: Sequence[Row], compare: Compare) -> Effect | None:
    """The effect over units that have both numbers; `None` for fewer than two of them."""
    values: dict[str, dict[int, float]] = {compare.of: {}, compare.against: {}}
    for row in rows:
        value = row.get(compare.metric)
        if row["setting"] == compare.setting and row["variant"] in values and value is not None:
            values[row["variant"]][row["unit"]] = value
    of, against = values[compare.of], values[compare.against]
    units = sorted(of.keys() & against.keys())
    if len(units) < 2:
        return None
    shared = 1 / FOLDS if compare.setting in FOLDED else 0.0
    return paired_effect([of[unit] for unit in units], [against[unit] for unit in units], shared)
