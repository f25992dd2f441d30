"""Summarises samples of sequences as one `LayerPrediction`; what the weights alone guarantee."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oversmooth.measurement.statistics import direction
from oversmooth.prediction.asymptotics import Asymptotics, certificate, channel_eigenvalues
from oversmooth.prediction.ladder import (
    RUNGS,
    SHOWN,
    LayerSample,
    WhatIfLayer,
    WhatIfSample,
    carrying_step,
    explaining_rung,
)
from oversmooth.prediction.operator import AttentionLayer
from oversmooth.results import Missing
from oversmooth.results.base import interval
from oversmooth.results.prediction import (
    Asymptotic,
    HeadPrediction,
    LayerPrediction,
    Rung,
    SimulatedStep,
    WhatIfPrediction,
)

# --- what the weights of a layer decide for any attention, and where the assumptions of the theorem end ---

EQUAL_SCALES = 1e-6
"""Relative spread of the tokens' scales up to which they are one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """What the weights decide for any attention."""

    regime: str
    """smoothing or sharpening."""
    scale_spread: float | None
    """Relative spread of the tokens' scales, at which it was computed; `None` where none act or all are equal, so that
    every assumption of the theorem holds."""


def guarantee(layer: AttentionLayer, samples: Sequence[LayerSample]) -> Guarantee | None:
    """What one sign of all eigenvalues guarantees for any attention; `None` where that is not enough.

    In a pre-norm layer each channel evolves by `I + l A D^-1`, D the tokens' scales. With unequal ones the positive
    matrix `A D^-1` still has one dominating direction (Perron and Frobenius), in which tokens are parallel: `l > 0`
    smooths, `l` in [-min s, 0) sharpens. Causal attention is not positive, and a norm on the branch rescales what is
    written: there nothing is claimed unless scales are equal. Gains of the token that is written, and latent values, are
    outside the theorem.
    """
    if layer.weights.beyond_plain is not None:
        return None
    spread = max((sample.scale_spread or 0.0 for sample in samples), default=0.0)
    smallest = min((sample.smallest_scale for sample in samples if sample.smallest_scale is not None), default=1.0)
    is_equal = spread <= EQUAL_SCALES
    if not is_equal and (layer.norm_on_branch is not None or any(sample.is_causal for sample in samples)):
        return None
    values = channel_eigenvalues(layer.branch, smallest)
    found = None if values is None else certificate(values, 0.0)
    return None if found is None else Guarantee(regime=found.regime, scale_spread=None if is_equal else spread)


# --- from what the theory said about each sequence to one `LayerPrediction`: means, standard errors ---

NO_LOGARITHM = "a mean over tokens, or what differs between them, is zero"
NO_RADIUS = "rho_dc or rho_ac is zero"
NO_LIMIT = "the limit was not computed: attention is causal, neither part dominates, or many directions tie"
NOT_ASKED = "an eigenvalue problem of its own, solved only where the what-if is asked for by name"
ENOUGH = 2
"""Sequences that a regime needs before a layer counts as mixed: one alone may be an accident."""
PARALLEL = 1.01
"""Effective rank of the limit below which its tokens count as parallel."""


def mean_and_error(values: Iterable[float | None]) -> tuple[float | None, float | None, int]:
    """Mean, standard error and count of the values that exist."""
    known = [value for value in values if value is not None]
    if not known:
        return None, None, 0
    mean = math.fsum(known) / len(known)
    if len(known) < 2:
        return mean, None, 1
    variance = math.fsum((value - mean) ** 2 for value in known) / (len(known) - 1)
    return mean, math.sqrt(variance / len(known)), len(known)


def _mean(values: Iterable[float]) -> float:
    found, _, _ = mean_and_error(values)
    assert found is not None
    return found


def summarise(
    place: tuple[str, int, int],
    layer: AttentionLayer,
    samples: Sequence[LayerSample],
    changes: Sequence[WhatIfLayer],
) -> LayerPrediction:
    """One pass through one layer; `place` is its stack, the index of its block and its depth."""
    solved = [sample for sample in samples if sample.acting is not None]
    rungs = _rungs([sample.rungs for sample in samples])
    means = tuple(rung.mean for rung in rungs)
    measured, error, count = mean_and_error(sample.measured for sample in samples)
    seen = None if measured is None else interval(measured, error, count)
    acting = "plain" if layer.branch is layer.plain else "folded"
    plain = _asymptotic("plain", [sample.plain for sample in solved])
    folded = _asymptotic("folded", [sample.folded for sample in solved]) if layer.folded is not None else None
    scale, _, _ = mean_and_error(sample.scale for sample in samples)
    spread, _, _ = mean_and_error(sample.scale_spread for sample in samples)
    heads = _heads(layer, solved, scale or 1.0)
    leak, _, _ = mean_and_error(sample.leak for sample in samples)
    return LayerPrediction(
        stack=place[0],
        layer=place[1],
        depth=place[2],
        is_causal=all(sample.is_causal for sample in samples),
        tokens=_mean(float(sample.tokens) for sample in samples),
        regime=_regime(Counter(sample.acting.regime for sample in solved if sample.acting)),
        acting=acting,
        plain=plain,
        folded=folded,
        scale=scale,
        scale_spread=spread,
        leak=leak,
        rungs=rungs,
        measured=measured,
        measured_standard_error=error,
        measured_sequences=count,
        measured_interval=seen,
        direction="" if measured is None else direction(measured, seen),
        identity_error=_identity_error(samples),
        carries=carrying_step(means),
        explained_from=None if measured is None else explaining_rung(means, measured),
        heads=heads,
        what_ifs=_what_ifs(changes, samples),
        simulation=_simulation(samples),
        missing=_missing(layer, scale, measured, error, heads, means),
    )


def _identity_error(samples: Sequence[LayerSample]) -> float:
    """The largest distance of the last rung from the measurement, which only rounding may cause: it has everything in."""
    pairs = [(sample.rungs[-1], sample.measured) for sample in samples]
    return max((abs(last - found) for last, found in pairs if last is not None and found is not None), default=0.0)


def _missing(
    layer: AttentionLayer,
    scale: float | None,
    measured: float | None,
    error: float | None,
    heads: Sequence[HeadPrediction],
    rungs: tuple[float | None, ...],
) -> tuple[Missing, ...]:
    no_rung = measured is not None and explaining_rung(rungs, measured) is None
    return absent(
        (layer.folded is None, "folded", "the layer has neither norms nor gains"),
        (scale is None, "scale scale_spread", "no norm acts before the sum"),
        (measured is None, "measured explained_from", NO_LOGARITHM),
        (no_rung, "explained_from", "not even the last rung has the sign of the measurement"),
        (error is None, "measured_standard_error measured_interval", "fewer than two sequences have a value"),
        (carrying_step(rungs) is None, "carries", "a rung has no value"),
        (not heads, "heads", "not asked for, or the sequences are too long"),
    )


def absent(*gaps: tuple[bool, str, str]) -> tuple[Missing, ...]:
    """Why fields have no number: for every gap whether it is there, the names of its fields, and the reason."""
    return tuple(
        Missing(field=name, reason=reason) for is_there, names, reason in gaps if is_there for name in names.split()
    )


def _rungs(samples: Sequence[tuple[float | None, ...]], unsolved: str = NO_LOGARITHM) -> tuple[Rung, ...]:
    """Means of every rung; `unsolved` says why rung 0 has none, if it has none."""
    rungs = []
    for index, name in enumerate(RUNGS[: len(samples[0])]):
        mean, error, count = mean_and_error(sample[index] for sample in samples)
        missing = absent(
            (mean is None, "mean", NO_LOGARITHM if index else unsolved),
            (error is None, "standard_error", "fewer than two sequences have a value"),
        )
        rungs.append(Rung(rung=index, name=name, mean=mean, standard_error=error, sequences=count, missing=missing))
    return tuple(rungs)


def _regime(counts: Counter[str]) -> str:
    """The regime of all sequences; mixed where two regimes have enough of them, else a difference is undecided."""
    known = [regime for regime, count in counts.items() if count]
    if not known or "undecided" in known:
        return "undecided"
    if len(known) == 1:
        return known[0]
    return "mixed" if sum(counts[regime] >= ENOUGH for regime in known) > 1 else "undecided"


def _asymptotic(view: str, solved: Sequence[Asymptotics | None]) -> Asymptotic:
    known = [found for found in solved if found is not None]
    assert known, "the first sequence is always solved"
    exponent, error, _ = mean_and_error(found.exponent for found in known)
    counts: Counter[str] = Counter(found.regime for found in known)
    regime = _regime(counts)
    ranks, _, _ = mean_and_error(found.limit_rank for found in known)
    is_flat = not exponent or regime == "neutral"
    return Asymptotic(
        view=view,
        rho_dc=_mean(found.dc.value for found in known),
        rho_ac=_mean(found.ac.value for found in known),
        rho_ac_low=_mean(found.ac.low for found in known),
        rho_ac_high=_mean(found.ac.high for found in known),
        exponent=exponent,
        standard_error=error,
        half_life=None if is_flat or exponent is None else math.log(2) / abs(exponent),
        regime=regime,
        sequences=len(known),
        smoothing=counts["smoothing"],
        sharpening=counts["sharpening"],
        neutral=counts["neutral"],
        undecided=counts["undecided"],
        dimension=_mean(float(found.dimension) for found in known),
        limit_rank=ranks,
        angle_convergence=None if ranks is None else ranks < PARALLEL,
        is_absolute=all(found.is_absolute for found in known),
        route=" and ".join(sorted({found.ac.route for found in known})),
        residual=max(found.ac.residual for found in known),
        applications=_mean(float(found.ac.applications) for found in known),
        missing=absent(
            (exponent is None, "exponent", NO_RADIUS),
            (error is None, "standard_error", "fewer than two sequences were solved"),
            (is_flat, "half_life", "HFC/LFC neither falls nor grows"),
            (ranks is None, "limit_rank angle_convergence", NO_LIMIT),
        ),
    )


def _heads(layer: AttentionLayer, solved: Sequence[LayerSample], scale: float) -> tuple[HeadPrediction, ...]:
    samples = [sample for sample in solved if sample.heads]
    if not samples:
        return ()
    eigenvalues = layer.branch.head_eigenvalues / scale
    return tuple(_head(head, samples, eigenvalues[head]) for head in range(len(samples[0].heads)))


def _head(head: int, samples: Sequence[LayerSample], eigenvalues) -> HeadPrediction:  # type: ignore[no-untyped-def]
    theorems = [sample.heads[head] for sample in samples]
    tau = max(sample.dobrushin[head] for sample in samples)
    is_equal = all((sample.scale_spread or 0.0) <= EQUAL_SCALES and not sample.has_gains for sample in samples)
    certified = certificate(eigenvalues, tau) if is_equal else None
    logarithms = [
        math.log(found.rho_ac) - math.log(found.rho_dc) if found.rho_ac > 0 and found.rho_dc > 0 else None
        for found in theorems
    ]
    exponent, _, _ = mean_and_error(logarithms)
    signs, scales = (
        "its eigenvalues have both signs, are complex, zero or below -1",
        "the tokens' scales or gains differ",
    )
    missing = absent(
        (exponent is None, "exponent", NO_RADIUS),
        (certified is None, "certified_rate", signs if is_equal else scales),
    )
    return HeadPrediction(
        head=head,
        rho_dc=_mean(found.rho_dc for found in theorems),
        rho_ac=_mean(found.rho_ac for found in theorems),
        exponent=exponent,
        smoothing_share=sum(found.is_smoothing for found in theorems) / len(theorems),
        value_eigenvalue=_complex_mean([found.value_eigenvalue for found in theorems]),
        attention_eigenvalue=_complex_mean([found.attention_eigenvalue for found in theorems]),
        dobrushin=tau,
        certificate=certified.regime if certified else "",
        certified_rate=certified.rate if certified else None,
        missing=missing,
    )


def _complex_mean(values: Sequence[complex]) -> tuple[float, float]:
    """Mean real part and mean size of the imaginary part, whose sign means nothing in a conjugate pair."""
    return _mean(value.real for value in values), _mean(abs(value.imag) for value in values)


def _what_ifs(changes: Sequence[WhatIfLayer], samples: Sequence[LayerSample]) -> tuple[WhatIfPrediction, ...]:
    found, position = [], 0
    for changed in changes:
        if changed.layer is None:
            found.append(WhatIfPrediction(name=changed.change.name, not_applicable=changed.why_not))
            continue
        found.append(_what_if(changed.change.name, [sample.changes[position] for sample in samples]))
        position += 1
    return tuple(found)


def _what_if(name: str, samples: Sequence[WhatIfSample]) -> WhatIfPrediction:
    solved = [sample.solved for sample in samples if sample.solved is not None]
    if not solved:
        rungs = _rungs([sample.rungs for sample in samples], NOT_ASKED)
        missing = absent((True, "rho_dc rho_ac regime", NOT_ASKED))
        return WhatIfPrediction(name=name, not_applicable=None, rungs=rungs, missing=missing)
    return WhatIfPrediction(
        name=name,
        not_applicable=None,
        rho_dc=_mean(found.dc.value for found in solved),
        rho_ac=_mean(found.ac.value for found in solved),
        regime=_regime(Counter(found.regime for found in solved)),
        rungs=_rungs([sample.rungs for sample in samples]),
    )


def _simulation(samples: Sequence[LayerSample]) -> tuple[SimulatedStep, ...]:
    steps = next((sample.simulation for sample in samples if sample.simulation), ())
    found = []
    for step in steps:
        values = dict(zip(SHOWN, step.values, strict=True))
        missing = absent(*((values[name] is None, name, "the metric has no value here") for name in SHOWN))
        found.append(SimulatedStep(step=step.step, **values, missing=missing))
    return tuple(found)
