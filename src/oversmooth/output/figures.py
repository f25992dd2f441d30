"""Figures of results through matplotlib, for notebooks and papers."""

from typing import TYPE_CHECKING

from oversmooth.errors import MissingDependency
from oversmooth.results import Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curve_figure(measurement: Measurement, metric: str) -> "Figure":
    """A metric over depth with bands of one standard error, and what the final norm makes of it."""
    figure = new_figure(6.0, 3.6)
    axes = figure.subplots()
    for stack in dict.fromkeys(value.stack for value in measurement.values):
        points = [point for point in measurement.curve(metric, stack) if point.mean is not None]
        depth = [point.depth for point in points]
        mean = [point.mean or 0.0 for point in points]
        band = [point.standard_error or 0.0 for point in points]
        axes.plot(depth, mean, marker="o", label=stack or None)
        low = [value - half for value, half in zip(mean, band, strict=True)]
        high = [value + half for value, half in zip(mean, band, strict=True)]
        axes.fill_between(depth, low, high, alpha=0.25)
        final = measurement.final(metric, stack)
        if final is not None and final.mean is not None:
            ends = ([depth[-1], depth[-1] + 1], [mean[-1], final.mean])
            axes.plot(*ends, ":D", color=axes.lines[-1].get_color(), markevery=[1])  # behind the final norm
    axes.set(xlabel="depth (0 = embedding)", ylabel=metric, title=measurement.provenance.target)
    if len({value.stack for value in measurement.values}) > 1:
        axes.legend()
    return figure


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, in inches; it is never shown by itself."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("matplotlib", "report", "a figure") from error
    return Figure(figsize=(width, height), layout="constrained")
