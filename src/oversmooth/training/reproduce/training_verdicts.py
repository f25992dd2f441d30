"""Verdicts of claims 5 to 8, from the comparisons of training runs."""

from collections import Counter
from collections.abc import Mapping, Sequence

from oversmooth.training.reproduce.claim import Compared, Judgement, Observations, Verdict
from oversmooth.training.reproduce.comparisons import AGAINST_BASELINES
from oversmooth.training.reproduce.judging import paired
from oversmooth.training.reproduce.statistics import LEVEL, inferiority_p
from oversmooth.training.reproduce.tuning import OURS


def _outcomes(compared: Sequence[Compared], setting: str, metric: str) -> dict[tuple[str, str], str]:
    return {
        (each.compare.of, each.compare.against): each.outcome
        for each in compared
        if (each.compare.setting, each.compare.metric) == (setting, metric)
    }


def _effects(compared: Sequence[Compared]) -> str:
    shown = [f"{each.compare.words} {each.effect}" for each in compared if each.compare.is_primary and each.effect]
    return "; ".join(shown) or "no run has finished"


def parametrization(observed: Observations, compared: Sequence[Compared], own_p: float | None) -> Verdict:
    """Claim 5: attention sharpens more than that of the free form, or less."""
    expected = {"sharpen": "higher", "smooth": "lower"}
    opposite = {"sharpen": "lower", "smooth": "higher"}
    primary = [each for each in compared if each.compare.is_primary]
    words = f"attention's own change of log(HFC/LFC): {_effects(primary)}"
    if all(each.outcome == expected[each.compare.of] for each in primary):
        return Verdict(judgement="confirmed", because=words)
    if any(each.outcome == opposite[each.compare.of] for each in primary):
        return Verdict(judgement="refuted", because=words)
    is_there = any(each.effect for each in primary)
    return Verdict(judgement="undecided" if is_there else "not run", because=words)


def vision(observed: Observations, compared: Sequence[Compared], own_p: float | None) -> Verdict:
    """Claim 6: in each condition the better of the two against vanilla, and against the free form for the sign itself."""
    conditions = dict.fromkeys(
        (each.compare.setting, each.compare.metric) for each in compared if each.compare.is_primary
    )
    words: Counter[str] = Counter()
    for setting, metric in conditions:
        found = _outcomes(compared, setting, metric)
        against_vanilla = [found["sharpen", "vanilla"], found["smooth", "vanilla"]]
        is_better = "lower" not in against_vanilla and any(
            found[variant, "vanilla"] == "higher" and found.get((variant, "free")) == "higher"
            for variant in ("sharpen", "smooth")
        )
        words[_condition(against_vanilla, is_better)] += 1
    because = ", ".join(f"{WORDS[word]} in {count}" for word, count in words.items())
    clear = [each for each in compared if each.compare.is_primary and each.outcome in ("higher", "lower")]
    because = f"of {len(conditions)} conditions: {because}; clear differences: {_effects(clear) if clear else 'none'}"
    return Verdict(judgement=_overall(words, len(conditions)), because=because)


WORDS = {
    "better": "one of sharpen and smooth clearly better than vanilla and the free form",
    "worse": "both clearly worse than vanilla",
    "no different": "both no different from vanilla by more than the margin",
    "undecided": "undecided",
    "not run": "not run",
}
"""What a condition came to, for readers."""


def _condition(against_vanilla: Sequence[str], is_better: bool) -> str:
    if is_better:
        return "better"
    if all(each == "lower" for each in against_vanilla):
        return "worse"
    if all(each == "no difference larger than the margin" for each in against_vanilla):
        return "no different"
    return "not run" if all(each == "not run" for each in against_vanilla) else "undecided"


def _overall(words: Mapping[str, int], conditions: int) -> Judgement:
    judgements: dict[str, Judgement] = {
        "better": "confirmed",
        "worse": "refuted",
        "no different": "no difference larger than the margin",
        "not run": "not run",
    }
    for word, judgement in judgements.items():
        if words.get(word, 0) == conditions:
            return judgement
    return "undecided"


def language(observed: Observations, compared: Sequence[Compared], own_p: float | None) -> Verdict:
    """Claim 7: masked-token loss against vanilla at the largest budget; lower is better."""
    largest = [each for each in compared if each.compare.is_primary]
    found = {each.compare.of: each.outcome for each in largest if each.compare.against == "vanilla"}
    against_free = {each.compare.of: each.outcome for each in largest if each.compare.against == "free"}
    words = _effects(largest)
    outcomes = set(found.values())
    if outcomes == {"not run"}:
        return Verdict(judgement="not run", because=words)
    if outcomes == {"higher"}:
        return Verdict(judgement="confirmed", because=words)
    if any(found[variant] == "lower" and against_free.get(variant) == "lower" for variant in found):
        return Verdict(judgement="refuted", because=words)
    if outcomes == {"no difference larger than the margin"}:
        return Verdict(judgement="no difference larger than the margin", because=words)
    return Verdict(judgement="undecided", because=words)


def baselines_p(observed: Observations) -> float | None:
    """p-value of the chosen variant being worse than a baseline by the margin: the larger of the two, so of both together."""
    mine = [compare for compare in AGAINST_BASELINES if compare.of == _ours(observed)]
    effects = [(paired(observed["runs"], compare), compare.margin) for compare in mine]
    if any(effect is None for effect, _ in effects):
        return None
    return max(inferiority_p(effect, margin) for effect, margin in effects if effect is not None)


def baselines(observed: Observations, compared: Sequence[Compared], own_p: float | None) -> Verdict:
    """Claim 8: the variant that validation chose is not worse than either baseline by the margin."""
    ours = _ours(observed)
    mine = [each for each in compared if each.compare.of == ours]
    if own_p is None:
        return Verdict(judgement="not run", because="not every run has finished")
    effects = "; ".join(f"{each.compare.words} {each.effect}" for each in mine)
    words = (
        f"{ours} was chosen on validation images: {effects}; below one of them by the margin or more: p = {own_p:.2g}"
    )
    if any(each.outcome == "lower" for each in mine):
        return Verdict(judgement="refuted", because=words)
    return Verdict(judgement="confirmed" if own_p <= LEVEL else "undecided", because=words)


def _ours(observed: Observations) -> str:
    """Sharpen or smooth, as validation images chose."""
    return str(observed["chosen"][0]["variant"]) if observed.get("chosen") else OURS[0]
