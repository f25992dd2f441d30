"""The answer in a few sentences: what was measured first, then what the theory says, each with one quantity."""

from oversmooth.output.words import depth_words, ends_words, who_words
from oversmooth.results import Analysis, Inspection, Measurement, Prediction


def verdict(analysis: Analysis) -> str:
    """What happens, who does it, and what the weights say; only what was seen."""
    parts = []
    if analysis.measurement:
        parts.append(_measured(analysis.measurement))
    parts.append(_predicted(analysis.prediction) if analysis.prediction else _weights(analysis.inspection))
    return " ".join(part for part in parts if part)


def _measured(measurement: Measurement) -> str:
    if not measurement.attributions:
        return "No sequence could be measured."
    attribution = measurement.attributions[0]
    cosine = ends_words(measurement, "cosine", "Mean cosine")
    return " ".join(part for part in (depth_words(attribution), who_words(attribution), cosine) if part)


def _predicted(prediction: Prediction) -> str:
    """What repetition would do, in its own words, and how often one real pass has that sign."""
    layers = prediction.layers
    counts = {word: sum(layer.regime == word for layer in layers) for word in ("smoothing", "sharpening")}
    clear = [layer for layer in layers if layer.direction in counts and layer.regime in counts]
    seen = f" One real pass has that sign in {sum(layer.direction == layer.regime for layer in clear)} of {len(clear)}."
    sharpen = f" and {counts['sharpening']} would sharpen" if counts["sharpening"] else ""
    lead = f"Repeated at its attention, {counts['smoothing']} of {len(layers)} attention layers would smooth{sharpen}."
    return lead + (seen if clear else "")


def _weights(inspection: Inspection) -> str:
    known = [layer.tendency for layer in inspection.layers if layer.tendency is not None]
    smoothing = sum(1 for tendency in known if tendency > 0)
    return f"The weights of {smoothing} of {len(known)} layers tend to smooth."
