"""Tests and verdicts of claims 5 to 8, from the comparisons of training runs.

Each claim has one p-value for being confirmed and one for being refuted, put together from its comparisons as its protocol
says: the largest where all have to hold, the smallest times their number where one is enough.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from oversmooth.training.reproduce.claim import Compare, Compared, Judgement, Observations, Tests, Verdict
from oversmooth.training.reproduce.comparisons import ACCURACY, CONDITIONS, OWN
from oversmooth.training.reproduce.statistics import LEVEL, Effect, all_of, first_clear, is_equivalent, one_of
from oversmooth.training.reproduce.tuning import OURS

Pair = tuple[str, str]
Effects = Mapping[Pair, Effect]
"""By variant and what it is compared with."""


def _primary(compared: Sequence[Compared]) -> list[Compared]:
    return [each for each in compared if each.compare.is_primary]


def _is_complete(compared: Sequence[Compared]) -> bool:
    """Whether every unit is there that was planned: a verdict on a part of them could be had by stopping in time."""
    primary = _primary(compared)
    return bool(primary) and all(each.is_complete for each in primary)


def _of(compared: Sequence[Compared], setting: str, metric: str) -> Effects:
    """The effects of one condition."""
    return {
        (each.compare.of, each.compare.against): each.effect
        for each in compared
        if (each.compare.setting, each.compare.metric) == (setting, metric) and each.effect is not None
    }


def _decided(
    brief: str, because: str, compared: Sequence[Compared], tests: Tests, *, is_equal: bool = False
) -> Verdict:
    """What the corrected p-values come to."""
    primary = _primary(compared)
    if not any(each.effect for each in primary):
        reason = "too few runs have finished for any comparison"
        return Verdict(judgement="not run", brief=reason, because=reason)
    if not tests:
        there = sum(each.effect.units for each in primary if each.effect is not None)
        missing = f"waits for runs: {there} of {sum(each.planned for each in primary)} pairs are there"
        return Verdict(judgement="undecided", brief=f"{missing}; {brief}", because=f"{missing}; {because}")
    because += f"; p = {tests['confirmed']:.2g} for confirmed, {tests['refuted']:.2g} for refuted"
    otherwise: Judgement = "no difference larger than the margin" if is_equal else "undecided"
    return Verdict(judgement=first_clear(tests) or otherwise, brief=brief, because=because)


def _effects(compared: Sequence[Compared]) -> str:
    return "; ".join(f"{each.compare.words} {each.effect}" for each in compared if each.effect)


def _pairs(compared: Sequence[Compared]) -> str:
    """Effects that share a metric and a setting, by what is compared alone."""
    return ", ".join(
        f"{each.compare.of} minus {each.compare.against} {each.effect}" for each in compared if each.effect
    )


# --- claim 5 --------------------------------------------------------------------------------------------------------


def parametrization_tests(observed: Observations, compared: Sequence[Compared]) -> Tests:
    """Confirmed: signs and order are as the protocol asks. Refuted: a sign is the other one."""
    if not _is_complete(compared):
        return {}
    opposite = [p for each, p in _with_p(compared, is_asked_for=False) if each.compare.against == OWN]
    return {"confirmed": all_of(p for _, p in _with_p(compared, is_asked_for=True)), "refuted": one_of(opposite)}


def _with_p(compared: Sequence[Compared], *, is_asked_for: bool) -> list[tuple[Compared, float]]:
    """Every comparison that was run, with the p-value of the sign that the protocol asks for, or of the other one."""
    return [
        (each, each.effect.above() if (each.compare.of == "sharpen") == is_asked_for else each.effect.below())
        for each in _primary(compared)
        if each.effect is not None
    ]


def parametrization(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
    """Claim 5: attention itself sharpens or smooths, and more so than that of the same form with free signs."""
    asked = _with_p(compared, is_asked_for=True)
    signs = [p <= LEVEL for each, p in asked if each.compare.against == OWN]
    orders = [p <= LEVEL for each, p in asked if each.compare.against != OWN]
    brief = (
        f"{sum(signs)} of {len(signs)} signs are clearly as claimed; of {len(orders)} differences from free signs, "
        f"{sum(orders)} are clear"
    )
    because = f"{brief}, each by itself"
    if unclear := [each for each, p in asked if p > LEVEL]:
        because += f"; not clear: {_effects(unclear)}"
    return _decided(brief, because, compared, tests)


# --- claim 6 --------------------------------------------------------------------------------------------------------


def vision_tests(observed: Observations, compared: Sequence[Compared]) -> Tests:
    """Confirmed: in every condition one is better, the other not worse. Refuted: in one condition both are worse."""
    if not _is_complete(compared):
        return {}
    conditions = [_of(compared, *condition) for condition in CONDITIONS]
    return {
        "confirmed": all_of(
            one_of(_gain(effects, variant, other) for variant, other in (OURS, OURS[::-1])) for effects in conditions
        ),
        "refuted": one_of(all_of(effects[each, "vanilla"].below() for each in OURS) for effects in conditions),
    }


def _gain(effects: Effects, variant: str, other: str) -> float:
    """p-value of one variant being better than both controls, and the other not worse than vanilla by the margin."""
    gains = [effects[variant, control].above() for control in ("vanilla", "free")]
    return all_of([*gains, effects[other, "vanilla"].above(-ACCURACY)])


def vision(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
    """Claim 6: both against vanilla and against the free form, in every condition."""
    primary = _primary(compared)
    count = sum(each.effect is not None for each in primary)
    clear = [each for each in primary if each.outcome in ("higher", "lower")]
    words = f"of {count} comparisons, clear by themselves: {_effects(clear) or 'none'}"
    brief = f"{len(clear)} of {count} comparisons clear by themselves"
    if clear:
        brief += f": {_counted_outcomes(clear)}"
    return _decided(brief, words, compared, tests, is_equal=_is_equal_to_vanilla(primary))


def _counted_outcomes(compared: Sequence[Compared]) -> str:
    """How often each of our variants came out higher or lower."""
    counts = Counter(f"{each.compare.of} {each.outcome}" for each in compared)
    return ", ".join(f"{words} in {count}" for words, count in counts.items())


def _is_equal_to_vanilla(primary: Sequence[Compared]) -> bool:
    """Whether all differences from vanilla are clearly smaller than the margin."""
    found = [each for each in primary if each.compare.against == "vanilla"]
    return all(each.effect is not None and is_equivalent(each.effect, each.compare.margin) for each in found)


# --- claim 7 --------------------------------------------------------------------------------------------------------


def language_tests(observed: Observations, compared: Sequence[Compared]) -> Tests:
    """Confirmed: both losses are higher than vanilla's. Refuted: one is lower than vanilla's and the free form's."""
    if not _is_complete(compared):
        return {}
    largest = _primary(compared)[0].compare
    effects = _of(compared, largest.setting, largest.metric)
    return {
        "confirmed": all_of(effects[each, "vanilla"].above() for each in OURS),
        "refuted": one_of(all_of(effects[each, control].below() for control in ("vanilla", "free")) for each in OURS),
    }


def language(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
    """Claim 7: masked-token loss at the largest budget; lower is better."""
    primary = _primary(compared)
    pairs = _pairs([each for each in primary if each.compare.against == "vanilla"])
    return _decided(
        f"loss of {pairs or 'no pair with vanilla yet'}",
        _effects(primary),
        compared,
        tests,
        is_equal=_is_equal_to_vanilla(primary),
    )


# --- claim 8 --------------------------------------------------------------------------------------------------------


def _chosen(observed: Observations) -> str | None:
    """Sharpen or smooth, as validation images chose; none where they could not."""
    return next((row["variant"] for row in observed.get("chosen", ())), None)


def is_of_the_chosen(observed: Observations, compare: Compare) -> bool:
    """Whether a comparison is of the variant that validation chose; no other decides."""
    return compare.of == _chosen(observed)


def baselines_tests(observed: Observations, compared: Sequence[Compared]) -> Tests:
    """Confirmed: not worse than either baseline by the margin. Refuted: one of them is better."""
    if not _is_complete(compared):
        return {}
    found = [(each.effect, each.compare.margin) for each in _primary(compared) if each.effect is not None]
    return {
        "confirmed": all_of(effect.above(-margin) for effect, margin in found),
        "refuted": one_of(effect.below() for effect, _ in found),
    }


def baselines(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
    """Claim 8: the variant that validation chose, against both baselines."""
    primary = _primary(compared)
    because = f"{_chosen(observed)} was chosen on validation images: {_effects(primary)}"
    return _decided(f"accuracy of {_pairs(primary)}", because, compared, tests)
