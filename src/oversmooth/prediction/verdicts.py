"""Verdicts in plain words, each part with how it is known; where theory and measurement disagree, the rung is named."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from oversmooth.measurement.statistics import rank_correlation, sign_agreement
from oversmooth.prediction.ladder import RUNGS, STEPS
from oversmooth.prediction.summary import EQUAL_SCALES, Guarantee, absent
from oversmooth.results.base import signed
from oversmooth.results.prediction import Agreement, Asymptotic, DepthPrediction, LayerPrediction, Statement

PROVED, COMPUTED, OBSERVED = "proved", "computed", "observed"
AT_ATTENTION = "computed at measured attention"
AT_SCALE = "computed at measured attention and scale"
AT_ANY_ATTENTION = "computed for any attention at measured scale"
WOULD = {"smoothing": "would smooth", "sharpening": "would sharpen", "neutral": "would neither smooth nor sharpen"}
DOES = {"smoothing": "smooths", "sharpening": "sharpens", "no clear change": "makes no clear change"}
CLOSE = 0.9
"""Rank correlation from which on a rung counts as explaining the differences between layers."""


def proved(text: str) -> Statement:
    return Statement(text=text, basis=PROVED, kind=PROVED, is_remark=True)


def computed(text: str, basis: str, *, is_remark: bool = False) -> Statement:
    return Statement(text=text, basis=basis, kind=COMPUTED, is_remark=is_remark)


def observed(text: str, *, is_remark: bool = False) -> Statement:
    return Statement(text=text, basis=OBSERVED, kind=OBSERVED, is_remark=is_remark)


# --- one layer ------------------------------------------------------------------------------------------------------


def layer_verdict(layer: LayerPrediction, guaranteed: Guarantee | None, tolerance: float) -> tuple[Statement, ...]:
    """What one pass was seen to do, what is guaranteed and computed for infinite repetition, and whether these agree."""
    if layer.identity_error > tolerance:
        text = (
            f"Rung {layer.rungs[-1].rung} misses the measurement by {layer.identity_error:.2g}, more than rounding: the "
            "declaration of this family does not fit this layer, so no verdict is given."
        )
        return (observed(text, is_remark=True),)
    found = []
    if layer.measured is not None:
        found.append(observed(one_pass_words(layer)))
    if guaranteed is not None:
        found.append(_guarantee_statement(guaranteed))
    acting = layer.folded if layer.acting == "folded" and layer.folded is not None else layer.plain
    basis = AT_SCALE if layer.scale is not None else AT_ATTENTION
    is_open = acting.regime in ("undecided", "mixed")
    found.append(computed(repetition_words(acting, layer.scale_spread), basis, is_remark=is_open))
    if layer.acting == "plain" and layer.folded is not None and layer.folded.regime != layer.plain.regime:
        would = WOULD.get(layer.folded.regime, f"would be {layer.folded.regime}")
        found.append(computed(f"With the norm after the sum folded in, it {would}.", AT_ATTENTION))
    if layer.measured is not None:
        found.append(_agreement_statement(layer))
    return tuple(found)


def one_pass_words(layer: LayerPrediction) -> str:
    """What one pass did, with how sure that is."""
    assert layer.measured is not None, "asked for what was measured"
    change = f"log(HFC/LFC) changes by {signed(layer.measured, 3)}"
    if layer.measured_interval is None:
        return f"One pass {DOES[layer.direction]} on the one sequence measured, which gives no interval: {change}."
    low, high = layer.measured_interval
    return (
        f"One pass {DOES[layer.direction]}: {change} (95% interval {signed(low, 3)} to {signed(high, 3)}, "
        f"{layer.measured_sequences} sequences)."
    )


def _guarantee_statement(found: Guarantee) -> Statement:
    lead = "Heads decouple and all eigenvalues of H have one sign"
    if found.scale_spread is None:
        return proved(f"{lead}: every channel is {found.regime}, for any attention.")
    parallel, different = "tokens become parallel, not equal", "what tokens share shrinks faster than any other part"
    limit = parallel if found.regime == "smoothing" else different
    text = f"{lead}: every channel is {found.regime} at these token scales (spread {found.scale_spread:.0%}); {limit}."
    return computed(text, AT_ANY_ATTENTION, is_remark=True)


def repetition_words(found: Asymptotic, scale_spread: float | None = None) -> str:
    """What infinite repetition at this attention would do."""
    numbers = f"rho_dc {found.rho_dc:.3f}, rho_ac {found.rho_ac:.3f}"
    counts = f"{found.smoothing} smoothing, {found.sharpening} sharpening, {found.neutral} neutral"
    if found.regime == "mixed":
        return f"Iterated at fixed attention, it depends on the input: {counts} ({numbers})."
    if found.regime == "undecided" and not found.undecided:
        return (
            f"Iterated at fixed attention, this layer is undecided: {counts} of {found.sequences} solved sequences, too few "
            f"to say that it depends on the input ({numbers})."
        )
    if found.regime == "undecided":
        return (
            f"Iterated at fixed attention, this layer is undecided: rho_dc is {found.rho_dc:.4g} and rho_ac is only known to "
            f"be between {found.rho_ac_low:.4g} and {found.rho_ac_high:.4g}."
        )
    half_life = "" if found.half_life is None else f", half-life {found.half_life:.2g} layers"
    limit = _limit_words(found, scale_spread)
    return f"Iterated at fixed attention, this layer {WOULD[found.regime]}: {limit} ({numbers}{half_life})."


def _limit_words(found: Asymptotic, scale_spread: float | None) -> str:
    if found.regime == "sharpening":
        return "tokens stay different"
    if found.regime == "neutral":
        return "neither part outgrows the other"
    if scale_spread is not None and scale_spread > EQUAL_SCALES:
        return f"tokens become parallel, but not equal, because their scales differ (spread {scale_spread:.0%})"
    return "all tokens become one vector" + (", also in absolute size" if found.is_absolute else "")


def _agreement_statement(layer: LayerPrediction) -> Statement:
    """Whether the rungs have the sign of the measurement, and from which one on."""
    first, rung = layer.rungs[0].mean, layer.explained_from
    carried = f" Most of the difference is carried by the step '{layer.carries}'." if layer.carries else ""
    if layer.direction not in ("smoothing", "sharpening"):
        return observed("The measured change has no clear sign, so there is none for the theory to agree with.")
    if rung == 0:
        return observed(f"Theory and measurement agree in sign on every rung.{carried}")
    if rung is None:
        return observed("Theory and measurement disagree in sign, and no rung explains it.", is_remark=True)
    if first is None or layer.measured is None:
        return observed(f"The sign of the measurement is right from rung {rung} ({RUNGS[rung]}) on.")
    if (first < 0) == (layer.measured < 0):
        text = (
            f"The theorem has the sign of the measurement, but rungs between do not: it stays right from rung "
            f"{rung} ({RUNGS[rung]}) on.{carried}"
        )
        return observed(text, is_remark=True)
    text = (
        f"Theory and measurement disagree: repetition would {'smooth' if first < 0 else 'sharpen'}, one pass does the "
        f"opposite. The sign is right from rung {rung} ({RUNGS[rung]}) on.{carried}"
    )
    return observed(text, is_remark=True)


# --- a whole model --------------------------------------------------------------------------------------------------


def agreements(stack: str, layers: Sequence[LayerPrediction]) -> tuple[Agreement, ...]:
    """Every rung beside the measurement."""
    return tuple(_agreement(stack, layers, rung) for rung in range(max(len(layer.rungs) for layer in layers)))


def _agreement(stack: str, layers: Sequence[LayerPrediction], rung: int) -> Agreement:
    pairs = [
        (mean, layer.measured)
        for layer in layers
        if (mean := layer.rungs[min(rung, len(layer.rungs) - 1)].mean) is not None and layer.measured is not None
    ]
    predicted, measured = [mean for mean, _ in pairs], [value for _, value in pairs]
    correlation = rank_correlation(predicted, measured)
    return Agreement(
        stack=stack,
        rung=rung,
        name=RUNGS[rung],
        layers=len(pairs),
        sign_agreement=sign_agreement(predicted, measured),
        rank_correlation=correlation,
        mean_error=sum(abs(p - m) for p, m in pairs) / len(pairs) if pairs else None,
        missing=absent(
            (not pairs, "sign_agreement mean_error", "no layer has both"),
            (correlation is None, "rank_correlation", "it needs three layers that are not all equal"),
        ),
    )


def stack_verdict(
    stack: str, layers: Sequence[LayerPrediction], found: Sequence[Agreement], depth: DepthPrediction | None
) -> tuple[Statement, ...]:
    """What a stack of layers does, and how far the theorem alone goes."""
    where = f"{stack}: " if stack else ""
    statements = []
    if measured := [layer.measured for layer in layers if layer.measured is not None]:
        text = (
            f"{where}one pass {_counted(layers)}; their changes of log(HFC/LFC) add up to {signed(sum(measured), 3)}."
        )
        statements.append(observed(text))
    basis = AT_SCALE if any(layer.scale is not None for layer in layers) else AT_ATTENTION
    statements.append(computed(where + repeated_words(layers), basis))
    if depth is not None and depth.exponent is not None:
        word = "smooths" if depth.exponent < 0 else "sharpens"
        growth = f"{word} isotropic features: exponent {depth.exponent:+.3f} per layer"
        statements.append(computed(f"{where}attention of the whole stack {growth}.", basis))
    if measured:
        statements.append(observed(where + _ladder_words(layers, found)))
    return tuple(statements)


def repeated_words(layers: Sequence[LayerPrediction]) -> str:
    """How many layers would smooth if they were repeated with their norms, and without one that follows the sum."""
    whole = _would_words(Counter(layer.whole.regime for layer in layers))
    plain = _would_words(Counter(layer.regime for layer in layers))
    rest = "" if plain == whole else f"; without the norm after the sum, {plain}"
    return f"iterated at fixed attention with their norms, of {len(layers)} layers {whole}{rest}."


def _would_words(regimes: Counter[str]) -> str:
    return ", ".join(f"{count} {WOULD.get(regime, f'would be {regime}')}" for regime, count in regimes.most_common())


def _counted(layers: Sequence[LayerPrediction]) -> str:
    """How many layers smooth, sharpen, and do neither clearly."""
    counts = Counter(layer.direction for layer in layers if layer.measured is not None)
    parts = [f"{DOES[word]} in {counts[word]}" for word in DOES if counts[word]]
    alone = ", with one sequence and so no interval" if all(layer.measured_sequences < 2 for layer in layers) else ""
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{listed} of {counts.total()} layers{alone}"


def _ladder_words(layers: Sequence[LayerPrediction], found: Sequence[Agreement]) -> str:
    first = found[0]
    right = "-" if first.sign_agreement is None else f"{first.sign_agreement:.0%}"
    correlation = "" if first.rank_correlation is None else f" (rank correlation {first.rank_correlation:+.2f})"
    words = f"the theorem has the sign of the measurement in {right} of layers{correlation}"
    signs = next((item for item in found if item.sign_agreement == 1.0), None)
    if signs is not None and signs.rung:
        words += f"; every sign is right at rung {signs.rung} ({signs.name})"
    ranks = next((item for item in found if (item.rank_correlation or 0.0) >= CLOSE), None)
    if ranks is not None:
        words += f"; layers are in the right order from rung {ranks.rung} ({ranks.name})"
    carried = carrying_step_of(layers)
    return words + (f". Over all layers the step that carries most is '{carried}'." if carried else ".")


def carrying_step_of(layers: Sequence[LayerPrediction]) -> str | None:
    """The step between rungs with the largest mean absolute change over the layers."""
    sums = [0.0] * len(STEPS)
    for layer in layers:
        means = [rung.mean for rung in layer.rungs]
        for index, (a, b) in enumerate(pairwise(means)):
            sums[index] += abs(b - a) if a is not None and b is not None else 0.0
    return STEPS[max(range(len(sums)), key=sums.__getitem__)] if any(sums) else None
