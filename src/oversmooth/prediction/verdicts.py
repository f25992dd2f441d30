"""Verdicts in plain words, each part with how it is known; where theory and measurement disagree, the rung is named."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from oversmooth.prediction.theory.agreement import rank_correlation, sign_agreement
from oversmooth.prediction.theory.ladder import RUNGS, STEPS
from oversmooth.results import Missing
from oversmooth.results.prediction import Agreement, Asymptotic, DepthPrediction, LayerPrediction, Statement

PROVED = "proved"
AT_ATTENTION = "computed at measured attention"
AT_SCALE = "computed at measured attention and scale"
OBSERVED = "observed"
LIMITS = {
    "smoothing": "all tokens become one vector",
    "sharpening": "tokens stay different",
    "neutral": "neither part outgrows the other",
}
CLOSE = 0.9
"""Rank correlation from which on a rung counts as explaining the differences between layers."""


def layer_verdict(layer: LayerPrediction, guaranteed: str | None, tolerance: float) -> tuple[Statement, ...]:
    """What one layer does: guaranteed for any attention, computed at this one, observed; and whether these agree."""
    found = []
    if layer.identity_error > tolerance:
        text = (
            f"Rung 5 misses the measurement by {layer.identity_error:.2g}, more than rounding: the declaration of this "
            "family does not fit this layer, so no verdict is given."
        )
        return (Statement(text=text, basis=OBSERVED),)
    if guaranteed:
        text = (
            f"Heads decouple and all eigenvalues of H have one sign: every channel is {guaranteed}, for any attention."
        )
        found.append(Statement(text=text, basis=PROVED))
    acting = layer.folded if layer.acting == "folded" and layer.folded is not None else layer.plain
    found.append(Statement(text=repetition_words(acting), basis=AT_SCALE if layer.scale is not None else AT_ATTENTION))
    if layer.acting == "plain" and layer.folded is not None and layer.folded.regime != layer.plain.regime:
        text = f"With the norm after the sum folded in it would be {layer.folded.regime} instead."
        found.append(Statement(text=text, basis=AT_ATTENTION))
    if layer.measured is None:
        return tuple(found)
    error = "" if layer.measured_standard_error is None else f" ± {layer.measured_standard_error:.2g}"
    did = "smooths" if layer.measured < 0 else "sharpens"
    text = f"One pass over these inputs {did}: log(HFC/LFC) changes by {layer.measured:+.3f}{error}."
    found.append(Statement(text=text, basis=OBSERVED))
    found.append(Statement(text=_agreement_words(layer), basis=OBSERVED))
    return tuple(found)


def repetition_words(found: Asymptotic) -> str:
    """What infinite repetition would do."""
    numbers = f"rho_dc {found.rho_dc:.3f}, rho_ac {found.rho_ac:.3f}"
    if found.regime == "undecided":
        low, high = found.rho_ac_low, found.rho_ac_high
        return (
            f"Repeated forever, this layer is undecided: rho_dc is {found.rho_dc:.4g} and rho_ac is only known to be "
            f"between {low:.4g} and {high:.4g}."
        )
    if found.regime == "mixed":
        counts = f"{found.smoothing} smoothing, {found.sharpening} sharpening, {found.neutral} neutral"
        return f"Repeated forever, it depends on the input: {counts} ({numbers})."
    half_life = "" if found.half_life is None else f", half-life {found.half_life:.2g} layers"
    absolute = ", also in absolute size" if found.is_absolute else ""
    return f"Repeated forever, this layer is {found.regime}: {LIMITS[found.regime]}{absolute} ({numbers}{half_life})."


def _agreement_words(layer: LayerPrediction) -> str:
    first = layer.rungs[0].mean
    carried = f" Most of the difference is carried by the step '{layer.carries}'." if layer.carries else ""
    if layer.explained_from == 0:
        return f"Theory and measurement agree in sign on every rung.{carried}"
    if layer.explained_from is None:
        return "Theory and measurement disagree in sign, and no rung explains it."
    name = RUNGS[layer.explained_from]
    if first is None or layer.measured is None:
        return f"The sign of the measurement is right from rung {layer.explained_from} ({name}) on."
    if (first < 0) == (layer.measured < 0):
        return (
            f"The theorem has the sign of the measurement, but rungs between do not: it stays right from rung "
            f"{layer.explained_from} ({name}) on.{carried}"
        )
    return (
        f"Theory and measurement disagree: repetition would {'smooth' if first < 0 else 'sharpen'}, one pass does the "
        f"opposite. The sign is right from rung {layer.explained_from} ({name}) on.{carried}"
    )


# --- a whole model --------------------------------------------------------------------------------------------------


def agreements(stack: str, layers: Sequence[LayerPrediction]) -> tuple[Agreement, ...]:
    """Every rung beside the measurement."""
    return tuple(_agreement(stack, layers, rung) for rung in range(len(RUNGS)))


def _agreement(stack: str, layers: Sequence[LayerPrediction], rung: int) -> Agreement:
    pairs = [
        (mean, layer.measured)
        for layer in layers
        if (mean := layer.rungs[rung].mean) is not None and layer.measured is not None
    ]
    predicted, measured = [mean for mean, _ in pairs], [value for _, value in pairs]
    correlation = rank_correlation(predicted, measured)
    missing = []
    if not pairs:
        missing += [Missing(field=name, reason="no layer has both") for name in ("sign_agreement", "mean_error")]
    if correlation is None:
        missing.append(Missing(field="rank_correlation", reason="it needs three layers that are not all equal"))
    return Agreement(
        stack=stack,
        rung=rung,
        name=RUNGS[rung],
        layers=len(pairs),
        sign_agreement=sign_agreement(predicted, measured),
        rank_correlation=correlation,
        mean_error=sum(abs(p - m) for p, m in pairs) / len(pairs) if pairs else None,
        missing=tuple(missing),
    )


def stack_verdict(
    stack: str, layers: Sequence[LayerPrediction], found: Sequence[Agreement], depth: DepthPrediction | None
) -> tuple[Statement, ...]:
    """What a stack of layers does, and how far the theorem alone goes."""
    where = f"{stack}: " if stack else ""
    regimes = Counter(layer.regime for layer in layers)
    counts = ", ".join(f"{count} {regime}" for regime, count in regimes.most_common())
    basis = AT_SCALE if any(layer.scale is not None for layer in layers) else AT_ATTENTION
    statements = [Statement(text=f"{where}repeated forever, of {len(layers)} layers {counts}.", basis=basis)]
    if depth is not None and depth.exponent is not None:
        word = "smooths" if depth.exponent < 0 else "sharpens"
        text = (
            f"{where}attention of the whole stack {word} isotropic features: exponent {depth.exponent:+.3f} per layer."
        )
        statements.append(Statement(text=text, basis=basis))
    measured = [layer.measured for layer in layers if layer.measured is not None]
    if measured:
        smoothing = sum(value < 0 for value in measured)
        text = f"{where}one pass smooths in {smoothing} of {len(measured)} layers, by {sum(measured):+.3f} in total."
        statements.append(Statement(text=text, basis=OBSERVED))
        statements.append(Statement(text=where + _ladder_words(layers, found), basis=OBSERVED))
    return tuple(statements)


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
