"""The part of a report that a measurement fills: curves over depth, and who changed them."""

from typing import Any

from oversmooth.output.report.blocks import Pair, Plot, Section, table_of
from oversmooth.output.report.weights import rounded
from oversmooth.results import Attribution, Measurement

COLOURS = ("var(--accent)", "var(--sharpen)", "var(--neutral)", "var(--undecided)")
PARTS = {
    "attention": "var(--smooth)",
    "cross-attention": "var(--undecided)",
    "feed-forward": "var(--sharpen)",
    "norm": "var(--neutral)",
    "other": "var(--line)",
}
AXIS_TITLES = {"cosine": "mean cosine between tokens", "hfc_lfc": "HFC / LFC"}


def curve_figure(measurement: Measurement, metric: str) -> dict[str, Any]:
    """One metric over depth with a band of one standard error, a line per stack."""
    traces: list[dict[str, Any]] = []
    stacks = list(dict.fromkeys(value.stack for value in measurement.values))
    for index, stack in enumerate(stacks):
        points = [point for point in measurement.curve(metric, stack) if point.mean is not None]
        depth = [point.depth for point in points]
        mean = [point.mean or 0.0 for point in points]
        band = [point.standard_error or 0.0 for point in points]
        colour = COLOURS[index % len(COLOURS)]
        edges = [m + b for m, b in zip(mean, band, strict=True)] + [m - b for m, b in zip(mean, band, strict=True)][
            ::-1
        ]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": depth + depth[::-1],
                "y": rounded(edges),
                "fill": "toself",
                "fillcolor": colour,
                "opacity": 0.2,
                "line": {"width": 0},
                "hoverinfo": "skip",
                "showlegend": False,
            }
        )
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": stack or metric,
                "x": depth,
                "y": rounded(mean),
                "line": {"color": colour, "width": 2.5},
                "marker": {"size": 6},
                "showlegend": len(stacks) > 1,
                "hovertemplate": "depth %{x}: %{y}<extra></extra>",
            }
        )
    layout = {
        "height": 290,
        "xaxis": {"title": {"text": "depth (0 = embedding)"}, "dtick": 1 if len(traces[-1]["x"]) < 16 else None},
        "yaxis": {"title": {"text": AXIS_TITLES.get(metric, metric)}, "rangemode": "tozero"},
    }
    return {"traces": traces, "layout": layout}


def curves(measurement: Measurement) -> Pair:
    """The two curves of the first screen."""
    return Pair(
        plots=(
            Plot(
                id="cosine",
                figure=curve_figure(measurement, "cosine"),
                caption="How parallel tokens are. 1 means fully smoothed. Bands: one standard error over sequences.",
                alt=f"Line plot: mean cosine {_ends(measurement, 'cosine')}.",
            ),
            Plot(
                id="hfc-lfc",
                figure=curve_figure(measurement, "hfc_lfc"),
                caption="What differs between tokens over what they share. 0 means fully smoothed.",
                alt=f"Line plot: HFC/LFC {_ends(measurement, 'hfc_lfc')}.",
            ),
        )
    )


def _ends(measurement: Measurement, metric: str) -> str:
    known = [point.mean for point in measurement.curve(metric) if point.mean is not None]
    return f"goes from {known[0]:.3f} to {known[-1]:.3f} over {len(known) - 1} layers" if known else "has no value"


def attribution_section(measurement: Measurement) -> Section:
    """Attention, feed-forward and norms: what each did to log(HFC/LFC), in total and per layer."""
    blocks = []
    for attribution in measurement.attributions:
        suffix = f"-{attribution.stack}" if attribution.stack else ""
        name = f" ({attribution.stack})" if attribution.stack else ""
        blocks.append(
            Pair(
                plots=(
                    Plot(
                        id=f"waterfall{suffix}",
                        figure=_waterfall(attribution),
                        caption=f"From embedding to output{name}: what each kind of sub-block did. Down smooths.",
                        alt=f"Waterfall: {attribution_words(attribution)}.",
                    ),
                    Plot(
                        id=f"parts{suffix}",
                        figure=_parts_per_depth(attribution),
                        caption=f"The same per layer{name}. Below 0 smooths; the line is the sum.",
                        alt="Stacked bars per layer of the same parts; the table has the numbers.",
                    ),
                )
            )
        )
    rows = [
        {
            "stack": p.stack,
            "depth": p.depth,
            "part": p.part,
            "ends at": p.place,
            "change": p.change,
            "±": p.standard_error,
        }
        for attribution in measurement.attributions
        for p in attribution.parts
    ]
    return Section(
        id="attribution",
        title="Who smooths?",
        lead=(
            "The change of log(HFC/LFC) across each sub-block, measured on the residual stream. The parts add up "
            "exactly to the change from embedding to output."
        ),
        blocks=[*blocks, table_of("attribution-parts", "Change per sub-block", rows)],
    )


def attribution_words(attribution: Attribution) -> str:
    parts = _kinds(attribution)
    return f"total {attribution.total:+.2f} = " + ", ".join(f"{name} {value:+.2f}" for name, value in parts.items())


def _kinds(attribution: Attribution) -> dict[str, float]:
    kinds = {
        "attention": attribution.attention,
        "cross-attention": attribution.cross_attention,
        "feed-forward": attribution.feed_forward,
        "norm": attribution.norms,
        "other": attribution.other,
    }
    return {name: value for name, value in kinds.items() if value}


def _waterfall(attribution: Attribution) -> dict[str, Any]:
    kinds = _kinds(attribution)
    trace = {
        "type": "waterfall",
        "x": [*kinds, "total"],
        "y": rounded([*kinds.values(), attribution.total]),
        "measure": [*["relative"] * len(kinds), "total"],
        "text": [f"{value:+.2f}" for value in (*kinds.values(), attribution.total)],
        "textposition": "outside",
        "cliponaxis": False,
        "decreasing": {"marker": {"color": "var(--smooth)"}},
        "increasing": {"marker": {"color": "var(--sharpen)"}},
        "totals": {"marker": {"color": "var(--neutral)"}},
        "connector": {"line": {"color": "var(--line)"}},
    }
    return {"traces": [trace], "layout": {"height": 320, "xaxis": {}, "yaxis": {"title": {"text": "Δ log(HFC/LFC)"}}}}


def _parts_per_depth(attribution: Attribution) -> dict[str, Any]:
    depths = sorted({part.depth for part in attribution.parts})
    sums = {depth: sum(part.change for part in attribution.parts if part.depth == depth) for depth in depths}
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": kind,
            "x": depths,
            "y": rounded([sum(p.change for p in attribution.parts if (p.depth, p.part) == (d, kind)) for d in depths]),
            "marker": {"color": colour},
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
            "y": rounded(list(sums.values())),
            "line": {"color": "var(--ink)", "width": 1.5},
        }
    )
    layout = {
        "height": 320,
        "barmode": "relative",
        "xaxis": {"title": {"text": "depth"}},
        "yaxis": {"title": {"text": "Δ log(HFC/LFC)"}},
    }
    return {"traces": traces, "layout": layout}
