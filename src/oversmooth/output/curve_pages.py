"""The pages of one model over lengths, and over the strength of an edit."""

from collections.abc import Sequence
from typing import Any

from oversmooth.output.blocks import Block, Page, PageSection, Pair, Plot, Words, heat_map, table_of
from oversmooth.output.measured_sections import AXIS_TITLES, depth_axis
from oversmooth.output.theory_sections import rounded
from oversmooth.results import EditCurve, EditPoint, LengthCurves, LengthPrediction, LengthValue
from oversmooth.results.wording import how_much

# --- A page about length: the same texts, cut to several lengths ---

METRICS = ("cosine", "hfc_lfc")
DASHES = ("dot", "dashdot", "dash", "longdash", "solid")


def lengths_page(result: LengthCurves) -> Page:
    """The verdict, curves over depth and over length, and what the theory says of every layer."""
    stacks = list(dict.fromkeys(value.stack for value in result.values))
    shown = [metric for metric in METRICS if any(value.metric == metric for value in result.values)]
    blocks: list[Block] = [_pair(result, metric, stack) for stack in stacks for metric in shown]
    sections = [PageSection(id="top", blocks=blocks)]
    if result.predictions:
        sections.append(_theory(result))
    changes = [
        {"stack": c.stack, "tokens": c.length, "change": c.change, "direction": c.direction} for c in result.changes
    ]
    note = (
        "change: of log(HFC/LFC) at unit length, from embedding to output; below 0 the model smooths. HFC/LFC itself depends "
        "on the number of tokens; the mean cosine over distinct tokens does not, so it is what lengths are compared by."
    )
    sections.append(
        PageSection(
            id="numbers",
            title="Every length",
            blocks=[
                table_of("length-changes", "What the whole model does", changes),
                Words(text=note),
                table_of("length-values", "Metrics over length and depth", result.rows()),
            ],
        )
    )
    short = f", {result.left_out} shorter ones left out" if result.left_out else ""
    return Page(
        title=f"oversmooth over length: {result.provenance.target}",
        eyebrow=result.provenance.target,
        verdict=result.verdict,
        facts=(
            ("texts", f"{result.texts} of at least {result.lengths[-1]} tokens{short}"),
            ("measured on", how_much(result.data)),
        ),
        sections=tuple(sections),
        footer="Made by oversmooth. This page needs no network and sends nothing anywhere.",
    )


def _pair(result: LengthCurves, metric: str, stack: str) -> Pair:
    title = AXIS_TITLES.get(metric, metric)
    suffix = f"{metric.replace('_', '-')}{'-' + stack if stack else ''}"
    name = f" ({stack})" if stack else ""
    ends = [result.last(metric, length, stack) for length in result.lengths]
    known = [value for value in ends if value is not None and value.mean is not None]
    said = (
        f"{known[0].mean:.3f} at {known[0].length} tokens, {known[-1].mean:.3f} at {known[-1].length}" if known else ""
    )
    return Pair(
        plots=(
            Plot(
                id=f"depth-{suffix}",
                figure=_over_depth(result, metric, stack, title),
                caption=f"Over depth{name}, a line per length.",
                alt=f"Line plot of the {title} over depth, one line per length; the table below has every number.",
            ),
            Plot(
                id=f"length-{suffix}",
                figure=_over_length(known, result.lengths, title),
                caption=f"Behind the last block{name}, over length. Bars: one standard error over texts.",
                alt=f"Line plot of the {title} behind the last block over length: {said}.",
            ),
        )
    )


def _over_depth(result: LengthCurves, metric: str, stack: str, title: str) -> dict[str, Any]:
    traces = []
    shades = max(len(result.lengths) - 1, 1)
    for number, length in enumerate(result.lengths):
        of_length = [v for v in result.values if (v.metric, v.stack, v.length) == (metric, stack, length)]
        points = [value for value in of_length if value.mean is not None]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{length} tokens",
                "x": [point.depth for point in points],
                "y": rounded([point.mean or 0.0 for point in points]),
                # Longer texts are drawn stronger, so that the order shows without the legend.
                "opacity": round(0.4 + 0.6 * number / shades, 2),
                "line": {
                    "color": "var(--accent)",
                    "width": 2.5,
                    "dash": DASHES[-1 - (len(result.lengths) - 1 - number) % 5],
                },
                "hovertemplate": f"{length} tokens, depth %{{x}}: %{{y}}<extra></extra>",
            }
        )
    last = max((value.depth for value in result.values if value.stack == stack), default=0)
    return {
        "traces": traces,
        "layout": {
            "height": 320,
            "xaxis": depth_axis(last, False, "depth (0 = embedding)"),
            "yaxis": {"title": {"text": title}, "rangemode": "tozero"},
            "legend": {"orientation": "h", "y": 1.15, "x": 0},
        },
    }


def _over_length(points: Sequence[LengthValue], lengths: Sequence[int], title: str) -> dict[str, Any]:
    trace = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [point.length for point in points],
        "y": rounded([point.mean or 0.0 for point in points]),
        "error_y": {"type": "data", "array": rounded([p.standard_error or 0.0 for p in points]), "thickness": 1},
        "line": {"color": "var(--accent)", "width": 2.5},
        "hovertemplate": "%{x} tokens: %{y}<extra></extra>",
    }
    axis = {
        "title": {"text": "tokens of each text"},
        "type": "log",
        "tickvals": list(lengths),
        "ticktext": [str(length) for length in lengths],
    }
    return {
        "traces": [trace],
        "layout": {"height": 320, "xaxis": axis, "yaxis": {"title": {"text": title}, "rangemode": "tozero"}},
    }


def _theory(result: LengthCurves) -> PageSection:
    by_place: dict[tuple[str, int], dict[int, LengthPrediction]] = {}
    for item in result.predictions:
        by_place.setdefault((item.stack, item.depth), {})[item.length] = item
    rows = [f"{stack + ' ' if stack else 'layer '}{depth - 1}" for stack, depth in by_place]
    z = [
        [found[length].exponent if length in found else None for length in result.lengths]
        for found in by_place.values()
    ]
    reach = max((abs(value) for row in z for value in row if value is not None), default=1.0) or 1.0
    counts = {n: [p.regime for p in result.predictions if p.length == n] for n in result.lengths}
    words = ", ".join(f"{found.count('smoothing')} of {len(found)} at {n} tokens" for n, found in counts.items())
    return PageSection(
        id="theory",
        title="What the theory says",
        lead=f"Iterated at fixed attention, layers that would smooth: {words}.",
        blocks=[
            Plot(
                id="exponents-over-length",
                figure=heat_map(
                    rows,
                    z,
                    bounds=(-reach, reach),
                    colours=((0.0, "var(--smooth)"), (0.5, "var(--panel)"), (1.0, "var(--sharpen)")),
                    title="exponent",
                    hover="%{y}, %{x} tokens: %{z}<extra></extra>",
                    columns=[str(length) for length in result.lengths],
                    across="tokens of each text",
                ),
                caption="Exponent of every layer at the attention of every length: below 0 it smooths.",
                alt=f"Heat map of layers by lengths: exponents. Layers that would smooth: {words}.",
            ),
            table_of("length-predictions", "Predictions over length", result.prediction_rows()),
        ],
    )


# --- A page about one edit: loss and features over its strength, and loss against features ---


def edit_curve_page(result: EditCurve) -> Page:
    """The verdict, both curves, and every number."""
    return Page(
        title=f"oversmooth: {result.change_words}",
        eyebrow=result.provenance.target,
        verdict=result.verdict,
        facts=(("change", result.change_words), ("task", result.task), ("measured on", how_much(result.data))),
        sections=(
            PageSection(id="top", blocks=[_curves(result)]),
            PageSection(
                id="numbers",
                title="Every strength",
                blocks=[
                    table_of("edit-points", "Loss and features over strength", result.rows()),
                    Words(
                        text="increase: of the loss. change: of log(HFC/LFC) at unit length from embedding to output; below "
                        "0 the model smooths. moved: how far the value map of a layer moved at most, relative to its norm."
                    ),
                ],
            ),
        ),
        footer="Made by oversmooth. This page needs no network and sends nothing anywhere.",
    )


def _curves(result: EditCurve) -> Pair:
    """Loss over strength, and loss against features."""
    points = [point for point in result.points if point.cosine is not None]
    named = "loss" if result.task != "similarity" else "1 - rank correlation of similarities"
    return Pair(
        plots=(
            Plot(
                id="loss-over-strength",
                figure=_figure(
                    [point.strength for point in points], points, "strength of the edit", named, with_names=False
                ),
                caption="What the edit costs. Strength 0 is the model as it is.",
                alt=f"Line plot: the {named} goes from {_ends([p.loss.loss for p in points])}.",
            ),
            Plot(
                id="loss-against-features",
                figure=_figure(
                    [p.cosine or 0.0 for p in points],
                    points,
                    "mean cosine behind the last block",
                    named,
                    with_names=True,
                ),
                caption="What the edit costs against what it does to features; numbers are strengths.",
                alt=f"Line plot: meanwhile the mean cosine goes from {_ends([p.cosine or 0.0 for p in points])}.",
            ),
        )
    )


def _figure(
    x: Sequence[float], points: Sequence[EditPoint], title: str, named: str, *, with_names: bool
) -> dict[str, Any]:
    trace = {
        "type": "scatter",
        "mode": "lines+markers+text" if with_names else "lines+markers",
        "x": rounded(x),
        "y": rounded([point.loss.loss for point in points]),
        "error_y": {"type": "data", "array": rounded([p.loss.standard_error or 0.0 for p in points]), "thickness": 1},
        "text": [f"{point.strength:g}" for point in points],
        "textposition": "top center",
        "line": {"color": "var(--accent)", "width": 2.5},
        "hovertemplate": "strength %{text}: %{y}<extra></extra>",
    }
    return {
        "traces": [trace],
        "layout": {"height": 340, "xaxis": {"title": {"text": title}}, "yaxis": {"title": {"text": named}}},
    }


def _ends(values: Sequence[float]) -> str:
    return f"{values[0]:.3g} to {values[-1]:.3g}" if values else "nothing to nothing"
