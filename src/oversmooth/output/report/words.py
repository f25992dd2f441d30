"""The answer in one sentence."""

from oversmooth.results import Analysis, Attribution, Inspection, Measurement, Prediction


def verdict(analysis: Analysis) -> str:
    """What happens, who does it, and what the weights say; only what was seen."""
    parts = []
    if analysis.measurement:
        parts.append(_measured(analysis.measurement))
    parts.append(_predicted(analysis.prediction) if analysis.prediction else _weights(analysis.inspection))
    return " ".join(part for part in parts if part)


def _measured(measurement: Measurement) -> str:
    curve = [point.mean for point in measurement.curve("cosine") if point.mean is not None]
    if not measurement.attributions or not curve:
        return "No sequence could be measured."
    attribution = measurement.attributions[0]
    word = "Smoother" if attribution.total < 0 else "Sharper"
    return f"{word} with depth: mean cosine goes from {curve[0]:.2f} to {curve[-1]:.2f}; {_who(attribution)}."


def _who(attribution: Attribution) -> str:
    """Which kinds of sub-block smooth and which sharpen, largest first."""
    kinds = {
        "attention": attribution.attention,
        "the feed-forward": attribution.feed_forward,
        "the norms": attribution.norms,
        "cross-attention": attribution.cross_attention,
    }
    smoothing = sorted((k for k, v in kinds.items() if v < 0), key=lambda k: kinds[k])
    sharpening = sorted((k for k, v in kinds.items() if v > 0), key=lambda k: -kinds[k])
    words = []
    if smoothing:
        words.append(f"{_and(smoothing)} smooth{'s' if len(smoothing) == 1 and smoothing != ['the norms'] else ''}")
    if sharpening:
        words.append(f"{_and(sharpening)} sharpen{'s' if len(sharpening) == 1 and sharpening != ['the norms'] else ''}")
    return ", ".join(words)


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _predicted(prediction: Prediction) -> str:
    """How many layers smooth by the theorem, and how many of the signs the measurement confirms."""
    layers = prediction.layers
    counts = {regime: sum(layer.regime == regime for layer in layers) for regime in ("smoothing", "sharpening")}
    right = [
        (layer.rungs[0].mean < 0) == (layer.measured < 0)
        for layer in layers
        if layer.rungs and layer.rungs[0].mean is not None and layer.measured is not None
    ]
    seen = f"; one real pass has that sign in {sum(right)} of {len(right)}" if right else ""
    sharpen = f" and {counts['sharpening']} sharpen" if counts["sharpening"] else ""
    return f"By the theorem {counts['smoothing']} of {len(layers)} attention layers smooth{sharpen}{seen}."


def _weights(inspection: Inspection) -> str:
    known = [layer.tendency for layer in inspection.layers if layer.tendency is not None]
    smoothing = sum(1 for tendency in known if tendency > 0)
    return f"The weights of {smoothing} of {len(known)} layers tend to smooth."
