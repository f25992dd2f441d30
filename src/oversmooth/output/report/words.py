"""The answer in a few sentences: what was measured first, then what the theory says, each with one quantity."""

from oversmooth.output.words import ends_words, extent_words, short_depth_words, who_words
from oversmooth.results import Analysis, Inspection, Prediction


def headline(analysis: Analysis) -> str:
    """One sentence: what was measured from embedding to output; of a model that was not run, what its weights tend to."""
    if analysis.measurement is None:
        return _weights(analysis.inspection)
    if not analysis.measurement.shown_attributions:
        return "No sequence could be measured."
    is_random = analysis.measurement.data.origin == "random ids"
    where = "On random token ids: " if is_random else ""
    return where + short_depth_words(analysis.measurement.shown_attributions[0])


def summary(analysis: Analysis) -> str:
    """The sentences below it: who does it, the mean cosine, and what the theory says in its own words."""
    parts = []
    if analysis.measurement is not None and analysis.measurement.shown_attributions:
        parts += [
            extent_words(analysis.measurement.shown_attributions[0]),
            who_words(analysis.measurement.shown_attributions[0]),
            ends_words(analysis.measurement, "cosine", "Mean cosine"),
        ]
    if analysis.prediction is not None:
        parts.append(_predicted(analysis.prediction))
    elif analysis.measurement is not None:
        parts.append(_weights(analysis.inspection))
    return " ".join(part for part in parts if part)


def _predicted(prediction: Prediction) -> str:
    """What repetition would do, in its own words, and how often one real pass has that sign."""
    layers = prediction.layers
    counts = {word: sum(layer.regime == word for layer in layers) for word in ("smoothing", "sharpening")}
    clear = [layer for layer in layers if layer.direction in counts and layer.regime in counts]
    seen = f" One real pass has that sign in {sum(layer.direction == layer.regime for layer in clear)} of {len(clear)}."
    sharpen = f" and {counts['sharpening']} would sharpen" if counts["sharpening"] else ""
    lead = (
        f"Iterated at fixed attention, {counts['smoothing']} of {len(layers)} attention layers would smooth{sharpen}."
    )
    return lead + (seen if clear else "")


def _weights(inspection: Inspection) -> str:
    known = [layer.tendency for layer in inspection.layers if layer.tendency is not None]
    smoothing, neither = sum(1 for tendency in known if tendency > 0), known.count(0)
    rest = f", of {neither} to neither" if neither else ""
    return f"The weights of {smoothing} of {len(known)} layers tend to smooth{rest}."


def colour_of(direction: str | None, change: float) -> str:
    """The colour of what happens; by the sign in results of older versions, which have no direction."""
    direction = direction or ("smoothing" if change < 0 else "sharpening")
    return {"smoothing": "var(--smooth)", "sharpening": "var(--sharpen)"}.get(direction, "var(--neutral)")
