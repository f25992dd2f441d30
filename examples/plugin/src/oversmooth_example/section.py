"""A section of the report."""

from oversmooth.output.blocks import PageSection, Words
from oversmooth.results import Analysis


def flattest_layer(analysis: Analysis) -> PageSection | None:
    """Which block leaves the tokens most alike; nothing where nothing was measured."""
    if analysis.measurement is None:
        return None
    points = [point for point in analysis.measurement.curve("cosine") if point.depth > 0 and point.mean is not None]
    if not points:
        return None
    worst = max(points, key=lambda point: point.mean)
    text = f"The tokens are most alike behind block {worst.depth - 1}, at a mean cosine of {worst.mean:.3f}."
    return PageSection(id="flattest", title="The flattest layer", blocks=(Words(text=text),))
