"""Claims 5 to 8, on trained models: observation, test, verdict and table of each.

Each claim has one p-value for being confirmed and one for being refuted, put together from its comparisons as its protocol
says: the largest where all have to hold, the smallest times their number where one is enough.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from oversmooth.claims.claim import (
    LEVEL,
    Claim,
    Compare,
    Compared,
    Effect,
    Judgement,
    Observations,
    Tests,
    Verdict,
    all_of,
    first_clear,
    is_equivalent,
    one_of,
    protocol,
)
from oversmooth.claims.context import OURS, ClaimContext, Row, Trained
from oversmooth.claims.experiments import DEEP, DIGITS, EARLY_EPOCH, MINI_BERT, TENTH, TUNING, Experiment, runs_of

OWN = ""
"""Compared with nothing: what a variant does by itself."""
ACCURACY, NATS, CHANGE = 0.02, 0.05, 0.1
"""Margins: shares of images, nats of loss, and log(HFC/LFC) over all layers together."""
BOTH = (("sharpen", "vanilla"), ("smooth", "vanilla"), ("sharpen", "free"), ("smooth", "free"))
FORMS = ("vanilla", "free", "sharpen", "smooth")
BASELINES = ("attnscale", "featscale")
SMOOTHS = 0.05
"""A fall of log(HFC/LFC) across an attention layer that counts as smoothing."""
Needs = tuple[tuple[Experiment, tuple[str, ...]], ...]
Pair = tuple[str, str]
Effects = Mapping[Pair, Effect]
"""By variant and what it is compared with."""


def compares(setting: str, metric: str, margin: float, *pairs: tuple[str, str], **more: object) -> tuple[Compare, ...]:
    """The same number of several pairs of variants."""
    return tuple(
        Compare(setting=setting, metric=metric, of=of, against=against, margin=margin, **more)  # type: ignore[arg-type]
        for of, against in pairs
    )


def _recipes(names: tuple[str, ...], variants: tuple[str, ...], more: str = "") -> tuple[str, ...]:
    """Commands of the `full` scale."""
    runs = itertools.product(names, variants, (0, 1, 2))
    return tuple(f"oversmooth train {name} --variant {variant} --seed {seed}{more}" for name, variant, seed in runs)


def training_numbers(materials: ClaimContext, needs: Sequence[tuple[Experiment, Sequence[str]]]) -> list[Row]:
    """One row per run: what it scored, and what its attention did."""
    rows = []
    for experiment, variants in needs:
        small = experiment.for_scale(materials.is_quick)
        for planned in materials.there(runs_of(small, variants, materials.rates)):
            numbers = _numbers(materials.trained(planned))
            rows.append({"setting": small.name, "variant": planned.variant, "unit": planned.seed, **numbers})
    return rows


def _numbers(run: Trained) -> dict[str, float | None]:
    results, changes = run.manifest.results, run.attention_changes()
    found: dict[str, float | None] = {
        "accuracy": results.get("eval_accuracy"),
        "corruption_accuracy": results.get("corruption_accuracy"),
        "early_accuracy": run.evaluations.get(float(EARLY_EPOCH), {}).get("eval_accuracy"),
        "loss": results.get("eval_loss"),
        "last_cosine": run.last("cosine"),
        "attention": sum(changes),
        "worst_layer": min(changes),
        "smoothing_layers": float(sum(change < -SMOOTHS for change in changes)),
    }
    return {
        name: round(value, 6) if value is not None and math.isfinite(value) else None for name, value in found.items()
    }


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
    found = [(each.compare, each.effect) for each in compared if each.effect]
    return ", ".join(f"{compare.of} minus {compare.against} {effect}" for compare, effect in found)


def _is_equal_to_vanilla(primary: Sequence[Compared]) -> bool:
    """Whether all differences from vanilla are clearly smaller than the margin."""
    found = [each for each in primary if each.compare.against == "vanilla"]
    return all(each.effect is not None and is_equivalent(each.effect, each.compare.margin) for each in found)


# --- claim 5 ---

ATTENTION_RUNS: Needs = ((DEEP, (*FORMS, "sharpen-measured", "smooth-measured")), (MINI_BERT[-1], FORMS))


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


def judge_parametrization(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
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


def what_attention_does(observed: Observations) -> list[Row]:
    """Claim 5, a row per condition and variant: what attention does, where features end, layers that smooth."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in observed.get("runs", ()):
        groups.setdefault((row["setting"], row["variant"]), []).append(row)
    return [
        {
            "setting": setting,
            "variant": variant,
            "runs": len(rows),
            "change_of_log(HFC/LFC)": _of_runs(mean, rows, "attention", 3),
            "cosine_after_last_layer": _of_runs(mean, rows, "last_cosine", 3),
            "attention_layers_that_smooth_by_more_than_0.05": _of_runs(mean, rows, "smoothing_layers", 1),
            "worst_layer": _of_runs(min, rows, "worst_layer", 3),
        }
        for (setting, variant), rows in groups.items()
    ]


def _of_runs(what: Callable[[list[float]], float], rows: Sequence[Row], name: str, digits: int) -> float | None:
    """Over the runs that have the number."""
    values = [row[name] for row in rows if row[name] is not None]
    return round(what(values), digits) if values else None


PARAMETRIZATION = Claim(
    **protocol("parametrization"),
    commands=_recipes(("cifar100", "pile-bert-steps"), FORMS),
    observe=lambda materials: {"runs": training_numbers(materials, ATTENTION_RUNS)},
    decide=judge_parametrization,
    tests=parametrization_tests,
    tabulate=what_attention_does,
    compares=tuple(
        compare
        for setting in (DEEP.name, MINI_BERT[-1].name)
        for against in (OWN, "free")
        for compare in compares(setting, "attention", CHANGE, ("sharpen", against), ("smooth", against))
    )
    + compares(
        DEEP.name,
        "attention",
        CHANGE,
        ("sharpen-measured", "sharpen"),
        ("smooth-measured", "smooth"),
        is_primary=False,
        note="the interval of the map that acts",
    ),
    needs=ATTENTION_RUNS,
)

# --- claim 6 ---

CONDITIONS = (
    (DIGITS.name, "accuracy"),
    (DIGITS.name, "corruption_accuracy"),
    (TENTH.name, "accuracy"),
    (DEEP.name, "accuracy"),
)
CONTROLS = {
    ("free", "vanilla"): "the form itself, without a sign",
    ("matched", "vanilla"): "size and orthogonality at the start, without the form",
    ("sharpen-start", "free"): "the sign at the start only",
    ("smooth-start", "free"): "the sign at the start only",
    ("no-identity", "free"): "a smaller H without its identity part",
    ("sharpen", "no-identity"): "the identity part -I/2",
    ("sharpen-measured", "sharpen"): "the interval of the map that acts",
}
"""What a comparison with a control separates."""
VARIANTS = ("vanilla", "sharpen", "smooth", "free", "matched", "sharpen-start", "smooth-start", "no-identity")
VISION_RUNS: Needs = ((DIGITS, (*VARIANTS, "sharpen-measured")), (TENTH, FORMS), (DEEP, FORMS))


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


def judge_vision(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
    """Claim 6: both against vanilla and against the free form, in every condition."""
    primary = _primary(compared)
    count = sum(each.effect is not None for each in primary)
    clear = [each for each in primary if each.outcome in ("higher", "lower")]
    words = f"of {count} comparisons, clear by themselves: {_effects(clear) or 'none'}"
    brief = f"{len(clear)} of {count} comparisons clear by themselves"
    if clear:
        counts = Counter(f"{each.compare.of} {each.outcome}" for each in clear)
        brief += f": {', '.join(f'{outcome} in {count}' for outcome, count in counts.items())}"
    return _decided(brief, words, compared, tests, is_equal=_is_equal_to_vanilla(primary))


EARLY_SPEED = "early speed, a statement of its own"
CONTROL_COMPARISONS = tuple(
    compare
    for metric in ("accuracy", "early_accuracy")
    for pair, note in CONTROLS.items()
    for compare in compares(DIGITS.name, metric, ACCURACY, pair, is_primary=False, note=note)
) + compares(DIGITS.name, "early_accuracy", ACCURACY, *BOTH, is_primary=False, note=EARLY_SPEED)

VISION = Claim(
    **protocol("vision"),
    commands=(
        *_recipes(("cifar100", "imagenet-deit-ti", "imagenet-deit-s"), FORMS),
        *_recipes(("cifar100",), FORMS, " --fraction 0.1"),
        *_recipes(("cifar100-deep",), FORMS),
    ),
    observe=lambda materials: {"runs": training_numbers(materials, VISION_RUNS), "rates": materials.validation},
    decide=judge_vision,
    tests=vision_tests,
    compares=tuple(compare for setting, metric in CONDITIONS for compare in compares(setting, metric, ACCURACY, *BOTH))
    + CONTROL_COMPARISONS,
    needs=VISION_RUNS,
)

# --- claim 7 ---

LANGUAGE_RUNS: Needs = tuple((experiment, FORMS) for experiment in MINI_BERT)


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


def judge_language(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
    """Claim 7: masked-token loss at the largest budget; lower is better."""
    primary = _primary(compared)
    brief = _pairs([each for each in primary if each.compare.against == "vanilla"]) or "no pair with vanilla yet"
    is_equal = _is_equal_to_vanilla(primary)
    return _decided(f"loss of {brief}", _effects(primary), compared, tests, is_equal=is_equal)


LANGUAGE = Claim(
    **protocol("language"),
    commands=(
        *_recipes(("pile-bert",), FORMS),
        *(
            f"oversmooth finetune pile-bert-{v}-seed0/model --tasks superglue --seeds 0,1,2 -o superglue-{v}"
            for v in FORMS
        ),
    ),
    observe=lambda materials: {"runs": training_numbers(materials, LANGUAGE_RUNS), "rates": materials.validation},
    decide=judge_language,
    tests=language_tests,
    compares=tuple(
        compare
        for experiment in MINI_BERT
        for compare in compares(experiment.name, "loss", NATS, *BOTH, is_primary=experiment is MINI_BERT[-1])
    ),
    needs=LANGUAGE_RUNS,
)

# --- claim 8 ---

BASELINE_RUNS: Needs = ((DIGITS, (*OURS, *BASELINES)),)


def observe_baselines(materials: ClaimContext) -> Observations:
    chosen = chosen_of_ours(materials)
    runs = training_numbers(materials, BASELINE_RUNS)
    return {"runs": runs, "chosen": [{"variant": chosen}] if chosen else [], "rates": materials.validation}


def chosen_of_ours(materials: ClaimContext) -> str | None:
    """Sharpen or smooth, whichever was better on validation images at its best rate; none where one was not tried."""
    best: dict[str, float] = {}
    for row in materials.validation:
        if row["chosen_by"] == TUNING.name and row["variant"] in OURS:
            best[row["variant"]] = max(best.get(row["variant"], 0.0), row["validation_accuracy"])
    return max(OURS, key=lambda variant: best[variant]) if len(best) == len(OURS) else None


def _chosen(observed: Observations) -> str | None:
    """Sharpen or smooth, as validation images chose; none where they could not."""
    return next((row["variant"] for row in observed.get("chosen", ())), None)


def baselines_tests(observed: Observations, compared: Sequence[Compared]) -> Tests:
    """Confirmed: not worse than either baseline by the margin. Refuted: one of them is better."""
    if not _is_complete(compared):
        return {}
    found = [(each.effect, each.compare.margin) for each in _primary(compared) if each.effect is not None]
    return {
        "confirmed": all_of(effect.above(-margin) for effect, margin in found),
        "refuted": one_of(effect.below() for effect, _ in found),
    }


def judge_baselines(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
    """Claim 8: the variant that validation chose, against both baselines."""
    primary = _primary(compared)
    because = f"{_chosen(observed)} was chosen on validation images: {_effects(primary)}"
    return _decided(f"accuracy of {_pairs(primary)}", because, compared, tests)


AGAINST_BASELINES = Claim(
    **protocol("baselines"),
    commands=_recipes(("cifar100",), (*OURS, *BASELINES)),
    observe=observe_baselines,
    decide=judge_baselines,
    tests=baselines_tests,
    compares=tuple(
        compare
        for of in OURS
        for compare in compares(
            DIGITS.name,
            "accuracy",
            ACCURACY,
            *((of, other) for other in BASELINES),
            note="if it is the variant that validation chose",
        )
    ),
    decides_by=lambda observed, compare: compare.of == _chosen(observed),
    needs=BASELINE_RUNS,
)

TRAINED_CLAIMS = (PARAMETRIZATION, VISION, LANGUAGE, AGAINST_BASELINES)
