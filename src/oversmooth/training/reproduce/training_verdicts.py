"""Tests and verdicts of claims 5 to 8, from the comparisons of training runs.

Each claim has one p-value for being confirmed and one for being refuted, put together from its comparisons as its protocol
says: the largest where all have to hold, the smallest times their number where one is enough.
"""

from collections.abc import Mapping, Sequence

from oversmooth.training.reproduce.claim import Compared, Judgement, Observations, Tests, Verdict
from oversmooth.training.reproduce.comparisons import CONDITIONS, OWN
from oversmooth.training.reproduce.statistics import LEVEL, Effect, all_of, is_equivalent, one_of
from oversmooth.training.reproduce.tuning import OURS

Pair = tuple[str, str]
Effects = Mapping[Pair, Effect]
"""By variant and what it is compared with."""


def _primary(compared: Sequence[Compared]) -> list[Compared]:
    return [each for each in compared if each.compare.is_primary]


def _is_complete(compared: Sequence[Compared]) -> bool:
    return all(each.effect is not None for each in _primary(compared))


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
        reason = "no run has finished"
        return Verdict(judgement="not run", brief=reason, because=reason)
    if not tests:
        return Verdict(judgement="undecided", brief=brief, because=f"{because}; not every run has finished")
    because += f"; p = {tests['confirmed']:.2g} for confirmed, {tests['refuted']:.2g} for refuted"
    otherwise: Judgement = "no difference larger than the margin" if is_equal else "undecided"
    clear = (judgement for judgement in ("confirmed", "refuted") if tests[judgement] <= LEVEL)
    return Verdict(judgement=next(clear, otherwise), brief=brief, because=because)


def _effects(compared: Sequence[Compared]) -> str:
    return "; ".join(f"{each.compare.words} {each.effect}" for each in compared if each.effect)


def _pairs(compared: Sequence[Compared]) -> str:
    """Effects that share a metric and a setting, by what is compared alone."""
    return ", ".join(
        f"{each.compare.of} minus {each.compare.against} {each.effect}" for each in compared if each.effect
    )


# --- claim 5 --------------------------------------------------------------------------------------------------------


def parametrization_tests(observed: Observations, compared: Sequence[Compared]) -> Tests:
    """Confirmed: signs and order are those that the form promises. Refuted: a sign is the other one."""
    if not _is_complete(compared):
        return {}
    opposite = [p for each, p in _by_promise(compared, is_kept=False) if each.compare.against == OWN]
    return {"confirmed": all_of(p for _, p in _by_promise(compared, is_kept=True)), "refuted": one_of(opposite)}


def _by_promise(compared: Sequence[Compared], *, is_kept: bool) -> list[tuple[Compared, float]]:
    """Every comparison that was run with the p-value of the sign that the form promises, or of the other one."""
    return [
        (each, each.effect.above() if (each.compare.of == "sharpen") == is_kept else each.effect.below())
        for each in _primary(compared)
        if each.effect is not None
    ]


def parametrization(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
    """Claim 5: attention itself sharpens or smooths, and more so than that of the same form with free signs."""
    promised = _by_promise(compared, is_kept=True)
    unclear = [each for each, p in promised if p > LEVEL]
    kept = len(promised) - len(unclear)
    words = f"of {len(promised)} changes of log(HFC/LFC) whose sign the form promises, {kept} have it clearly, each by itself"
    if unclear:
        words += f"; in the way: {_effects(unclear)}"
    return _decided(f"{kept} of {len(promised)} signs that it promises are clear", words, compared, tests)


# --- claim 6 --------------------------------------------------------------------------------------------------------


def vision_tests(observed: Observations, compared: Sequence[Compared]) -> Tests:
    """Confirmed: in every condition one is better, the other not worse. Refuted: in one condition both are worse."""
    if not _is_complete(compared):
        return {}
    margins = {(each.compare.setting, each.compare.metric): each.compare.margin for each in _primary(compared)}
    conditions = [(_of(compared, *condition), margins[condition]) for condition in CONDITIONS]
    return {
        "confirmed": all_of(
            one_of(_gain(effects, margin, variant, other) for variant, other in (OURS, OURS[::-1]))
            for effects, margin in conditions
        ),
        "refuted": one_of(all_of(effects[each, "vanilla"].below() for each in OURS) for effects, _ in conditions),
    }


def _gain(effects: Effects, margin: float, variant: str, other: str) -> float:
    """p-value of one variant being better than both controls, and the other not worse than vanilla by the margin."""
    gains = [effects[variant, control].above() for control in ("vanilla", "free")]
    return all_of([*gains, effects[other, "vanilla"].above(-margin)])


def vision(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
    """Claim 6: both against vanilla and against the free form, in every condition."""
    primary = _primary(compared)
    clear = [each for each in primary if each.outcome in ("higher", "lower")]
    words = f"of {len(primary)} comparisons, clear by themselves: {_effects(clear) or 'none'}"
    brief = f"{len(clear)} of {len(primary)} comparisons are clear by themselves"
    return _decided(brief, words, compared, tests, is_equal=_is_equal_to_vanilla(primary))


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
    brief = f"loss of {_pairs([each for each in primary if each.compare.against == 'vanilla'])}"
    return _decided(brief, _effects(primary), compared, tests, is_equal=_is_equal_to_vanilla(primary))


# --- claim 8 --------------------------------------------------------------------------------------------------------


def baselines_tests(observed: Observations, compared: Sequence[Compared]) -> Tests:
    """Confirmed: not worse than either baseline by the margin. Refuted: one of them is better."""
    mine = [each for each in compared if each.compare.of == _chosen(observed)]
    if not _is_complete(mine):
        return {}
    found = [(each.effect, each.compare.margin) for each in mine if each.effect is not None]
    return {
        "confirmed": all_of(effect.above(-margin) for effect, margin in found),
        "refuted": one_of(effect.below() for effect, _ in found),
    }


def baselines(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
    """Claim 8: the variant that validation chose, against both baselines."""
    chosen = _chosen(observed)
    mine = [each for each in compared if each.compare.of == chosen]
    because = f"{chosen} was chosen on validation images: {_effects(mine)}"
    return _decided(f"accuracy of {_pairs(mine)}", because, mine, tests)


def _chosen(observed: Observations) -> str:
    """Sharpen or smooth, as validation images chose."""
    return str(observed["chosen"][0]["variant"]) if observed.get("chosen") else OURS[0]
