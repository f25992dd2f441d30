"""Whether a controlled run ended as its variant intends, and if not, why: who works against it, and the token scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from oversmooth.output.numbers import signed
from oversmooth.output.report.runs import RunGroup
from oversmooth.output.words import NAMES
from oversmooth.results import Analysis, Measurement

PLAIN = "vanilla"
WITHIN = 2.0
"""Standard errors over sequences within which two single runs count as equal."""


@dataclass(frozen=True, slots=True)
class End:
    """The mean cosine where a model ends, over its seeds or, of a single run, over its sequences."""

    mean: float
    low: float
    high: float


def end_of(group: RunGroup) -> End | None:
    """Behind the final norm where there is one, otherwise behind the last layer."""
    found = [point for run in group.runs if run.analysis and (point := _last(run.analysis.measurement)) is not None]
    if not found:
        return None
    values = [value for value, _ in found]
    if len(values) > 1:
        return End(mean(values), min(values), max(values))
    reach = WITHIN * found[0][1]
    return End(values[0], values[0] - reach, values[0] + reach)


def _last(measurement: Measurement | None) -> tuple[float, float] | None:
    if measurement is None or not measurement.values:
        return None
    point = measurement.final("cosine") or next(reversed(measurement.curve("cosine")), None)
    return None if point is None or point.mean is None else (point.mean, point.standard_error or 0.0)


def intention_words(groups: Sequence[RunGroup]) -> list[str]:
    """A sentence or two for every variant that intends something, compared with the plain runs among the others."""
    plain = next((group for group in groups if group.runs[0].variant == PLAIN), None)
    return [words for group in groups if group.runs[0].intends and (words := _judged(group, plain))]


def _judged(group: RunGroup, plain: RunGroup | None) -> str:
    if plain is None:
        return f"{group.said} intends {group.runs[0].intends}; whether it did needs a {PLAIN} run beside it."
    end, other = end_of(group), end_of(plain)
    if end is None or other is None:
        missing = "not every run has finished and been analysed, so nothing is judged yet"
        return f"{group.said} intends {group.runs[0].intends}; {missing}."
    numbers = f"mean cosine {end.mean:.2f} at the output, {plain.said} {other.mean:.2f}"
    if end.low <= other.high and other.low <= end.high:
        return (
            f"{group.said} ended where {plain.said} did, within what {_spread_words(group, plain)} differ: {numbers}."
        )
    if (end.mean > other.mean) == (group.runs[0].intends == "smoothing"):
        return f"{group.said} ended as intended: {numbers}."
    why = " ".join(part for part in (_who_words(group, plain), _scale_words(group)) if part)
    return f"{group.said} ended against its intention ({group.runs[0].intends}): {numbers}. {why}".strip()


def _spread_words(*groups: RunGroup) -> str:
    return "seeds" if any(len(group.runs) > 1 for group in groups) else "sequences"


def _who_words(group: RunGroup, plain: RunGroup) -> str:
    """The kind of sub-block that pulls most against the intention, compared with the plain runs."""
    mine, others = kind_changes(group), kind_changes(plain)
    sign = -1.0 if group.runs[0].intends == "smoothing" else 1.0
    against = {kind: sign * (mine[kind] - others.get(kind, 0.0)) for kind in mine}
    if not against:
        return ""
    kind = min(against, key=against.__getitem__)
    if against[kind] >= 0:
        return ""
    own = mine.get("attention")
    attention = f", while its attention changes {signed(own)}" if own is not None and kind != "attention" else ""
    name = NAMES.get(kind, kind)
    return (
        f"Against it works {name}: log(HFC/LFC) at unit length changes by {signed(mine[kind])} there, and by "
        f"{signed(others.get(kind, 0.0))} in {plain.said}{attention}."
    )


def kind_changes(group: RunGroup) -> Mapping[str, float]:
    """What every kind of sub-block changes, mean over the seeds."""
    each = [_kinds(run.analysis) for run in group.runs if run.analysis]
    names = dict.fromkeys(name for kinds in each for name in kinds)
    return {name: mean(kinds[name] for kinds in each if name in kinds) for name in names}


def _kinds(analysis: Analysis) -> dict[str, float]:
    if analysis.measurement is None or not analysis.measurement.shown_attributions:
        return {}
    return {kind.part: kind.change for kind in analysis.measurement.shown_attributions[0].kinds}


def token_scale(group: RunGroup) -> float | None:
    """What the norms divide tokens by before attention, mean over layers and seeds."""
    scales = [
        layer.scale
        for run in group.runs
        if run.analysis and run.analysis.prediction
        for layer in run.analysis.prediction.layers
        if layer.scale is not None
    ]
    return mean(scales) if scales else None


def _scale_words(group: RunGroup) -> str:
    """How much a norm takes from eigenvalues that are kept without regard to it."""
    scale, kept = token_scale(group), group.runs[0].eigenvalues
    if scale is None or not kept or scale < 1.5:
        return ""
    comma = "" if kept.endswith("]") else ","
    return (
        f"Its {kept}{comma} act divided by the token scale, {scale:.1f} on average, so that attention has that much less "
        "to say beside the skip connection."
    )
