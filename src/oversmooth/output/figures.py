"""Figures for papers and notebooks, and static plots of pages."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from oversmooth.environment.files import make_folder, write_whole
from oversmooth.errors import MissingDependency
from oversmooth.output.theory_sections import layer_name
from oversmooth.results import Analysis, Measurement

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# --- figures of results through matplotlib, for notebooks and papers ---


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


# --- figures for papers: PDF, PNG and SVG through matplotlib ---

FORMATS = ("pdf", "png", "svg")
COLUMN = 3.4
"""Inches; the width of one column of a two-column paper."""


def write_figures(analysis: Analysis, folder: Path) -> list[Path]:
    """Writes every figure in every format and returns the paths."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency("matplotlib", "report", "--figures") from error
    make_folder(folder)
    figures: dict[str, Figure] = {"eigenvalues": _eigenvalues(analysis)}
    if analysis.measurement:
        for metric in ("cosine", "hfc_lfc"):
            figures[metric] = _curve(analysis.measurement, metric)
        figures["attribution"] = _attribution(analysis.measurement)
    written = []
    # Text as text, and no time stamp: the same analysis gives the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "oversmooth"}):
        for name, figure in figures.items():
            for ending in FORMATS:
                path = folder / f"{name}.{ending}"
                undated = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}[ending]
                write_whole(path, partial(figure.savefig, format=ending, dpi=200, metadata=undated))
                written.append(path)
    return written


def _curve(measurement: Measurement, metric: str) -> "Figure":
    figure = curve_figure(measurement, metric)
    figure.set_size_inches(COLUMN, 2.4)
    figure.axes[0].set_title("")
    return figure


def _eigenvalues(analysis: Analysis) -> "Figure":
    from matplotlib.patches import Circle

    layers = [layer for layer in analysis.inspection.layers if layer.plain and layer.plain.eigenvalues][:48]
    columns = min(4, max(len(layers), 1))
    rows = max(1, -(-len(layers) // columns))
    figure = new_figure(1.9 * columns, 1.9 * rows)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis in axes.flat[len(layers) :]:
        axis.set_visible(False)
    for axis, layer in zip(axes.flat, layers, strict=False):
        assert layer.plain is not None
        values = layer.plain.eigenvalues or ()
        axis.plot([v[0] for v in values], [v[1] for v in values], ".", ms=2, color="#0072b2")
        axis.add_patch(Circle((-1, 0), layer.plain.rho_dc, fill=False, lw=0.8, color="#c85a00"))
        axis.set_aspect("equal", adjustable="box")
        axis.set_title(f"{layer_name(layer)}, $\\rho_{{dc}}$ = {layer.plain.rho_dc:.2f}", fontsize=7)
        axis.tick_params(labelsize=6)
    return figure


def _attribution(measurement: Measurement) -> "Figure":
    figure = new_figure(COLUMN, 2.4)
    axes = figure.subplots()
    attribution = measurement.unit_attributions[0]
    depths = sorted({part.depth for part in attribution.parts})
    colours = {
        "attention": "#7b3fc4",
        "feed-forward": "#2f8f4e",
        "norm after attention": "#5c4a00",
        "norm after feed-forward": "#8a7a30",
        "final norm": "#a08a3c",
        "cross-attention": "#d0479b",
    }
    below, above = dict.fromkeys(depths, 0.0), dict.fromkeys(depths, 0.0)
    for kind, colour in colours.items():
        sums = {d: sum(p.change for p in attribution.parts if (p.depth, p.part) == (d, kind)) for d in depths}
        if not any(sums.values()):
            continue
        bottoms = [below[d] if sums[d] < 0 else above[d] for d in depths]
        axes.bar(depths, list(sums.values()), bottom=bottoms, color=colour, label=kind)
        for depth, change in sums.items():
            stack = below if change < 0 else above
            stack[depth] += change
    axes.axhline(0, color="black", lw=0.6)
    axes.set(xlabel="depth", ylabel="$\\Delta\\,\\log(\\mathrm{HFC}/\\mathrm{LFC})$")
    axes.legend(fontsize=6)
    return figure
