"""The pages of one model over lengths, and over the strength of an edit."""

import math
from collections.abc import Sequence

from oversmooth.output.blocks import Block, Page, PageSection, Pair, Words, identifier, paired, table_of
from oversmooth.output.charts import (
    DASHES,
    Axis,
    Chart,
    Fan,
    HeatMap,
    Line,
    Mark,
    Panel,
    Points,
    extent,
    numbers,
    places,
)
from oversmooth.output.run_pages import axis_of
from oversmooth.output.sections import suffix
from oversmooth.results import EditCurve, EditPoint, LengthCurves, LengthPrediction
from oversmooth.results.wording import how_much

# --- A page about length: the same texts, cut to several lengths ---

TITLES = {"cosine": "How alike tokens are (mean cosine)", "hfc_lfc": "HFC/LFC"}
NOTE = (
    "change: of log(HFC/LFC) at unit length, from embedding to output; below 0 the model smooths. HFC/LFC itself "
    "depends on the number of tokens; the mean cosine over distinct tokens does not, so it is what lengths are "
    "compared by."
)


def lengths_page(result: LengthCurves) -> Page:
    """The verdict, curves over depth and over length, and what the theory says of every layer."""
    stacks = list(dict.fromkeys(value.stack for value in result.values))
    shown = [metric for metric in TITLES if any(value.metric == metric for value in result.values)]
    charts = [
        c for stack in stacks for m in shown for c in (_over_depth(result, m, stack), _over_length(result, m, stack))
    ]
    changes = [
        {"stack": c.stack, "tokens": c.length, "change": c.change, "direction": c.direction} for c in result.changes
    ]
    tables: list[Block] = [
        table_of("length-changes", "What the whole model does", changes),
        Words(text=NOTE),
        table_of("length-values", "Metrics over length and depth", result.rows()),
    ]
    short = f", {result.left_out} shorter ones left out" if result.left_out else ""
    return Page(
        title=f"oversmooth over length: {result.provenance.name}",
        eyebrow=result.provenance.name,
        subject=f"{result.texts} texts of at least {result.lengths[-1]} tokens{short}",
        verdict=result.verdict,
        facts=(("measured on", how_much(result.data)),),
        sections=(
            PageSection(id="top", blocks=paired(charts)),
            *([_theory(result)] if result.predictions else []),
            PageSection(id="numbers", title="Every length", blocks=tables),
        ),
    )


def _over_depth(result: LengthCurves, metric: str, stack: str) -> Chart:
    """A line per length; longer texts are drawn stronger."""
    marks: list[Mark] = []
    for k, length in enumerate(result.lengths):
        points = [v for v in result.values if (v.metric, v.stack, v.length) == (metric, stack, length)]
        known = [(float(point.depth), point.mean) for point in points if point.mean is not None]
        if known:
            x, y = zip(*known, strict=True)
            is_longest = k == len(result.lengths) - 1
            dash = "" if is_longest else DASHES[1 + (len(result.lengths) - 2 - k) % 3]
            tone, width = ("ink", 2.6) if is_longest else ("null", 1.8)
            marks.append(
                Line(name=f"{length} tokens", x=x, y=y, tone=tone, dash=dash, width=width, value=f"{y[-1]:.3g}")
            )
    last = max((value.depth for value in result.values if value.stack == stack), default=0)
    return Chart(
        id=f"depth-{identifier(metric.replace('_', '-'), stack)}",
        alt=f"{TITLES[metric]}{suffix(stack)} over depth, one line per length; the table below has every number.",
        x=places(["input", *map(str, range(last))], "layer"),
        panels=(_panel(f"{TITLES[metric]}{suffix(stack)}, layer by layer", marks, metric),),
    )


def _panel(title: str, marks: Sequence[Mark], metric: str) -> Panel:
    return Panel(title=title, y=axis_of(marks, is_cosine=metric == "cosine", zero=True), marks=tuple(marks), height=180)


def _over_length(result: LengthCurves, metric: str, stack: str) -> Chart:
    ends = [result.last(metric, length, stack) for length in result.lengths]
    known = [(math.log2(v.length), v, v.mean) for v in ends if v is not None and v.mean is not None]
    x, y = tuple(at for at, _, _ in known), tuple(mean for _, _, mean in known)
    low, high = (tuple(mean + side * (v.standard_error or 0.0) for _, v, mean in known) for side in (-1, 1))
    marks: list[Mark] = [Fan(name="one standard error", x=x, low=low, high=high)] if len(known) > 1 else []
    marks += [Line(name="behind the last block", x=x, y=y, dots=True)] if known else []
    said = f": {y[0]:.3f} at {known[0][1].length} tokens, {y[-1]:.3f} at {known[-1][1].length}" if known else ""
    logs = [math.log2(length) for length in result.lengths]
    ticks = tuple(zip(logs, map(str, result.lengths), strict=True))
    axis = Axis(low=logs[0] - 0.2, high=logs[-1] + 0.2, ticks=ticks, title="tokens of each text")
    return Chart(
        id=f"length-{identifier(metric.replace('_', '-'), stack)}",
        alt=f"{TITLES[metric]}{suffix(stack)} behind the last block over length{said}.",
        x=axis,
        panels=(_panel(f"{TITLES[metric]}{suffix(stack)}, over length", marks, metric),),
    )


def _theory(result: LengthCurves) -> PageSection:
    by_place: dict[tuple[str, int], dict[int, LengthPrediction]] = {}
    for item in result.predictions:
        by_place.setdefault((item.stack, item.depth), {})[item.length] = item
    values = tuple(
        tuple(found[length].exponent if length in found else None for length in result.lengths)
        for found in by_place.values()
    )
    reach = max((abs(value) for row in values for value in row if value is not None), default=1.0) or 1.0
    counts = {n: [p.regime for p in result.predictions if p.length == n] for n in result.lengths}
    words = ", ".join(f"{found.count('smoothing')} of {len(found)} at {n} tokens" for n, found in counts.items())
    chart = HeatMap(
        id="exponents-over-length",
        alt=f"Heat map of layers by lengths: exponents. Layers that would smooth: {words}.",
        title="Exponent of every layer at the attention of every length (dark: would smooth)",
        rows=tuple(f"{stack + ' ' if stack else 'layer '}{depth - 1}" for stack, depth in by_place),
        columns=tuple(str(length) for length in result.lengths),
        values=values,
        low=-reach,
        high=reach,
        middle=0.0,
        ink_below=True,
        column_title="tokens of each text",
        unit="exponent: below 0 smooths",
    )
    return PageSection(
        id="theory",
        title="What the theory says",
        lead=f"Iterated at fixed attention, layers that would smooth: {words}.",
        blocks=[chart, table_of("length-predictions", "Predictions over length", result.prediction_rows())],
    )


# --- A page about one edit: loss and features over its strength, and loss against features ---


def edit_curve_page(result: EditCurve) -> Page:
    """The verdict, both curves, and every number."""
    tables: list[Block] = [
        table_of("edit-points", "Loss and features over strength", result.rows()),
        Words(
            text="increase: of the loss. change: of log(HFC/LFC) at unit length from embedding to output; below 0 the model "
            "smooths. moved: how far the value map of a layer moved at most, relative to its norm."
        ),
    ]
    return Page(
        title=f"oversmooth: {result.change_words}",
        eyebrow=result.provenance.name,
        subject=result.change_words,
        verdict=result.verdict,
        facts=(("task", result.task), ("measured on", how_much(result.data))),
        sections=(
            PageSection(id="top", blocks=[_curves(result)]),
            PageSection(id="numbers", title="Every strength", blocks=tables),
        ),
    )


def _curves(result: EditCurve) -> Pair:
    """Loss over strength, and loss against features."""
    points = [point for point in result.points if point.cosine is not None]
    named = "loss" if result.task != "similarity" else "1 - rank correlation of similarities"
    losses, cosines = [point.loss.loss for point in points], [point.cosine or 0.0 for point in points]
    strengths = [point.strength for point in points]
    over = Chart(
        id="loss-over-strength",
        alt=f"Line plot: the {named} goes from {_ends(losses)}.",
        caption="Strength 0 is the model as it is. The band is one standard error.",
        x=_axis(strengths, "strength of the edit"),
        panels=(_loss_panel(f"What the edit costs: {named}", strengths, points),),
    )
    against = Chart(
        id="loss-against-features",
        alt=f"Line plot: meanwhile the mean cosine goes from {_ends(cosines)}.",
        caption="Numbers at the points are strengths.",
        x=_axis(cosines, "mean cosine behind the last block"),
        panels=(_loss_panel("Against what it does to features", cosines, points, with_names=True),),
    )
    return Pair(charts=(over, against))


def _axis(values: Sequence[float], title: str) -> Axis:
    low, high = extent(values)
    return numbers(low, high, title=title)


def _loss_panel(title: str, x: Sequence[float], points: Sequence[EditPoint], *, with_names: bool = False) -> Panel:
    at = tuple(x)
    y = tuple(point.loss.loss for point in points)
    low, high = (tuple(p.loss.loss + side * (p.loss.standard_error or 0.0) for p in points) for side in (-1, 1))
    marks: list[Mark] = [] if with_names or not at else [Fan(name="", x=at, low=low, high=high)]
    labels = tuple(f"{point.strength:g}" for point in points) if with_names else ()
    titles = tuple(
        f"strength {p.strength:g}: loss {p.loss.loss:.4g}, mean cosine {p.cosine or 0.0:.3f}" for p in points
    )
    marks += [Line(name="", x=at, y=y), Points(name="", x=at, y=y, labels=labels, titles=titles)]
    bounds = extent([*low, *high], margin=0.12)
    return Panel(title=title, y=numbers(*bounds), marks=tuple(marks), height=220)


def _ends(values: Sequence[float]) -> str:
    return f"{values[0]:.3g} to {values[-1]:.3g}" if values else "nothing to nothing"
