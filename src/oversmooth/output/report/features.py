"""The part of a report that a measurement fills: curves over depth, and who changed them."""

from collections.abc import Sequence
from typing import Any

from oversmooth.output.numbers import signed
from oversmooth.output.report.blocks import Block, Pair, Plot, Section, table_of
from oversmooth.output.report.weights import rounded
from oversmooth.output.report.words import colour_of
from oversmooth.results import Attribution, Measurement, PlaceValue

STACK_DASHES = ("solid", "dash", "dot", "dashdot")
"""Stacks of one model differ by their line, because colours already say what happens and who does it."""
PARTS = {
    "attention": "var(--attention)",
    "cross-attention": "var(--cross-attention)",
    "feed-forward": "var(--feed-forward)",
    "norm": "var(--norm)",
    "final norm": "var(--norm)",
    "other": "var(--other)",
}
PATTERNS = {"final norm": "/", "other": "x"}
"""Of bars whose colour another part has too, or that no colour is kept for."""
AXIS_TITLES = {"cosine": "mean cosine between tokens", "hfc_lfc": "HFC / LFC"}


def curve_figure(measurement: Measurement, metric: str) -> dict[str, Any]:
    """One metric over depth with a band of one standard error, a line per stack, and behind it the final norm."""
    traces: list[dict[str, Any]] = []
    stacks = list(dict.fromkeys(value.stack for value in measurement.values))
    depths, has_norm = [0], False
    for index, stack in enumerate(stacks):
        points = [point for point in measurement.curve(metric, stack) if point.mean is not None]
        dash = STACK_DASHES[index % len(STACK_DASHES)]
        traces += _band_and_line(points, stack or metric, dash, in_legend=len(stacks) > 1)
        depths += [point.depth for point in points]
        final = measurement.final(metric, stack)
        if points and final is not None and final.mean is not None:
            has_norm = True
            traces.append(_final_norm(points[-1], final))
    layout = {
        "height": 290,
        "xaxis": depth_axis(max(depths), has_norm, "depth (0 = embedding)"),
        "yaxis": {"title": {"text": AXIS_TITLES.get(metric, metric)}, "rangemode": "tozero"},
    }
    return {"traces": traces, "layout": layout}


def depth_axis(last: int, has_norm: bool, title: str) -> dict[str, Any]:
    """Depths as ticks, and the final norm one step behind the last."""
    step = 1 if last < 16 else -(-last // 12)
    nearest = step if has_norm else 0  # to the label of the norm, at last + 1
    ticks = [tick for tick in range(0, last + 1, step) if last + 1 - tick >= nearest]
    names = [str(tick) for tick in ticks]
    if has_norm:
        ticks, names = [*ticks, last + 1], [*names, "norm"]
    title += "; norm = behind the final norm" if has_norm else ""
    return {"title": {"text": title}, "tickvals": ticks, "ticktext": names, "tickangle": 0}


def _band_and_line(points: Sequence[PlaceValue], name: str, dash: str, *, in_legend: bool) -> list[dict[str, Any]]:
    depth = [point.depth for point in points]
    mean = [point.mean or 0.0 for point in points]
    band = [point.standard_error or 0.0 for point in points]
    above = [m + b for m, b in zip(mean, band, strict=True)]
    below = [m - b for m, b in zip(mean, band, strict=True)]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": depth + depth[::-1],
            "y": rounded(above + below[::-1]),
            "fill": "toself",
            "fillcolor": "var(--ink)",
            "opacity": 0.2,
            "line": {"width": 0},
            "hoverinfo": "skip",
            "showlegend": False,
        },
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": depth,
            "y": rounded(mean),
            "line": {"color": "var(--ink)", "dash": dash, "width": 2.5},
            "marker": {"size": 6},
            "showlegend": in_legend,
            "hovertemplate": "depth %{x}: %{y}<extra></extra>",
        },
    ]


def _final_norm(last: PlaceValue, final: PlaceValue) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [last.depth, last.depth + 1],
        "y": rounded([last.mean or 0.0, final.mean or 0.0]),
        "error_y": {
            "type": "data",
            "array": [0.0, rounded([final.standard_error or 0.0])[0]],
            "width": 3,
            "thickness": 1,
        },
        "line": {"color": "var(--ink)", "width": 1.5, "dash": "dot"},
        "marker": {"size": [0, 8], "symbol": "diamond", "color": "var(--ink)"},
        "showlegend": False,
        "hovertemplate": "behind the final norm: %{y}<extra></extra>",
    }


def first_figures(measurement: Measurement) -> Plot | Pair:
    """What the first screen shows: how parallel tokens become, and who does it."""
    cosine = Plot(
        id="cosine",
        figure=curve_figure(measurement, "cosine"),
        caption="How parallel tokens are. 1 means fully smoothed. Bands: one standard error over sequences.",
        alt=f"Line plot: mean cosine {_ends(measurement, 'cosine')}.",
    )
    shown = measurement.shown_attributions
    return Pair(plots=(cosine, _waterfall_plot(shown[0]))) if shown else cosine


def scale_section(measurement: Measurement) -> Section:
    """HFC/LFC of tokens with their lengths, and without the largest one, which alone may decide it."""
    figure = curve_figure(measurement, "hfc_lfc")
    without = [
        (point.depth, point.mean_without_largest)
        for point in measurement.curve("hfc_lfc")
        if point.mean_without_largest is not None
    ]
    if without:
        figure["traces"].append(_without_largest(without))
    words = " The thin line leaves the largest token of every sequence out." if without else ""
    return Section(
        id="scale",
        title="Tokens as they are",
        lead="HFC/LFC depends on how long tokens are, so that a single long one can decide it; what theory speaks of.",
        blocks=[
            Plot(
                id="hfc-lfc",
                figure=figure,
                caption=f"What differs between tokens over what they share. 0 means fully smoothed.{words}",
                alt=f"Line plot: HFC/LFC {_ends(measurement, 'hfc_lfc')}.",
            )
        ],
    )


def _without_largest(points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "without the largest token",
        "x": [depth for depth, _ in points],
        "y": rounded([value for _, value in points]),
        "line": {"color": "var(--soft)", "dash": "dash", "width": 1.5},
        "showlegend": True,
        "hovertemplate": "without the largest token, depth %{x}: %{y}<extra></extra>",
    }


def _ends(measurement: Measurement, metric: str) -> str:
    known = [point.mean for point in measurement.curve(metric) if point.mean is not None]
    final = measurement.final(metric)
    behind = "" if final is None or final.mean is None else f", and to {final.mean:.3f} behind the final norm"
    return (
        f"goes from {known[0]:.3f} to {known[-1]:.3f} over {len(known) - 1} layers{behind}" if known else "has no value"
    )


def attribution_section(measurement: Measurement) -> Section:
    """Attention, feed-forward and norms: what each did to log(HFC/LFC), in total and per layer."""
    first, *others = measurement.shown_attributions or (None,)
    blocks: list[Block] = [] if first is None else [_parts_plot(first)]
    blocks += [Pair(plots=(_waterfall_plot(other), _parts_plot(other))) for other in others if other is not None]
    as_they_are = {(p.stack, p.depth, p.place): p.change for item in measurement.attributions for p in item.parts}
    rows = [
        {
            "stack": p.stack,
            "depth": p.depth,
            "part": p.part,
            "ends at": p.place,
            "change": p.change,
            "±": p.standard_error,
            "direction": p.direction,
            "change of tokens as they are": as_they_are.get((p.stack, p.depth, p.place)),
        }
        for attribution in measurement.shown_attributions
        for p in attribution.parts
    ]
    return Section(
        id="attribution",
        title=measurement.attribution_title,
        lead=(
            "The change of log(HFC/LFC) of tokens at unit length across each sub-block, measured on the residual stream. The "
            "parts add up exactly to the change from embedding to output, and no single large token decides them. The "
            "table has the same for tokens as they are, which theory speaks of."
        ),
        blocks=[*blocks, table_of("attribution-parts", "Change per sub-block", rows)],
    )


def _waterfall_plot(attribution: Attribution) -> Plot:
    """The sum of each kind of sub-block."""
    name = f" ({attribution.stack})" if attribution.stack else ""
    return Plot(
        id=f"waterfall-{attribution.stack}" if attribution.stack else "waterfall",
        figure=_waterfall(attribution),
        caption=f"From embedding to output{name}: what each kind of sub-block did. Down smooths; grey: no clear change.",
        alt=f"Waterfall: {attribution_words(attribution)}.",
    )


def _parts_plot(attribution: Attribution) -> Plot:
    """The same per layer."""
    name = f" ({attribution.stack})" if attribution.stack else ""
    return Plot(
        id=f"parts-{attribution.stack}" if attribution.stack else "parts",
        figure=_parts_per_depth(attribution),
        caption=f"Who did what in which layer{name}. Below 0 smooths; the line is the sum.",
        alt="Stacked bars per layer of the same parts; the table has the numbers.",
    )


def change_title(attribution: Attribution) -> str:
    """What an axis of changes shows: of tokens as they are, or at unit length."""
    return "Δ log(HFC/LFC)" + (" at unit length" if "unit length" in attribution.quantity else "")


def attribution_words(attribution: Attribution) -> str:
    parts = ", ".join(f"{name} {signed(value)}" for name, value in _kinds(attribution).items())
    return f"total {signed(attribution.total)} = {parts}"


def _kinds(attribution: Attribution) -> dict[str, float]:
    """What each kind of sub-block changed, in the order in which they are drawn."""
    found = {kind: sum(part.change for part in attribution.parts if part.part == kind) for kind in PARTS}
    return {kind: change for kind, change in found.items() if any(part.part == kind for part in attribution.parts)}


def _waterfall(attribution: Attribution) -> dict[str, Any]:
    """A bar per kind, each from where the last one ended; grey where there is no clear change, as the sentences say."""
    names, changes = [*_kinds(attribution), "total"], [*_kinds(attribution).values(), attribution.total]
    directions = {kind.part: kind.direction for kind in attribution.kinds} | {"total": attribution.direction}
    trace = {
        "type": "bar",
        "x": names,
        "y": rounded(changes),
        "base": rounded([*(sum(changes[:k], 0.0) for k in range(len(names) - 1)), 0.0]),
        "text": [signed(change) for change in changes],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": [colour_of(directions.get(name), x) for name, x in zip(names, changes, strict=True)]},
    }
    return {"traces": [trace], "layout": {"height": 290, "yaxis": {"title": {"text": change_title(attribution)}}}}


def _parts_per_depth(attribution: Attribution) -> dict[str, Any]:
    """Bars per layer; the final norm has a bar of its own, behind the last layer."""
    last = max(part.depth for part in attribution.parts)
    changes: dict[tuple[int, str], float] = {}
    for part in attribution.parts:
        key = (last + 1 if part.part == "final norm" else part.depth, part.part)
        changes[key] = changes.get(key, 0.0) + part.change
    depths = sorted({depth for depth, _ in changes})
    sums = [sum(change for (at, _), change in changes.items() if at == depth) for depth in depths]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": kind,
            "x": depths,
            "y": rounded([changes.get((depth, kind), 0.0) for depth in depths]),
            "marker": {"color": colour, "pattern": {"shape": PATTERNS.get(kind, ""), "solidity": 0.4}},
        }
        for kind, colour in PARTS.items()
        if any(part.part == kind for part in attribution.parts)
    ]
    traces.append(
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "sum",
            "x": depths,
            "y": rounded(sums),
            "line": {"color": "var(--ink)", "width": 1.5},
        }
    )
    layout = {
        "height": 320,
        "barmode": "relative",
        "xaxis": depth_axis(last, depths[-1] > last, "depth"),
        "yaxis": {"title": {"text": change_title(attribution)}},
    }
    return {"traces": traces, "layout": layout}
