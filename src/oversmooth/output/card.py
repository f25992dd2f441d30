"""The first screen of a report: one `Answer` as gauge, headings, chart, and as a picture to share."""

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise

from oversmooth.output.blocks import Brief, Card, identifier
from oversmooth.output.charts import (
    PARTS,
    Axis,
    Chart,
    Columns,
    Fan,
    Gauge,
    Line,
    Mark,
    Panel,
    drawn,
    extent,
    lettering,
    numbers,
    picture,
    places,
    text_width,
    wrapped,
)
from oversmooth.results.answer import SEEN, Answer, CurvePoint, Told
from oversmooth.results.reading import BANDS, shown_layers, shown_parts, shown_total
from oversmooth.results.wording import YARDSTICK, change_words, first_large, level, stack_words

STARTS = tuple((max(band.start, 0.0), band.state) for band in BANDS)
"""Where each band begins on a gauge."""
COSINE = Axis(
    low=0.0,
    high=1.0,
    ticks=(*((start, f"{start:g}") for start, _ in STARTS), (1.0, "1")),
    zones=tuple((low, high, name) for (low, name), (high, _) in pairwise((*STARTS, (1.0, "")))),
)
"""Always from 0 to 1, so that two charts can be compared; lower where pairs are."""


def card_of(answer: Answer) -> Card:
    """The card of one stack."""
    return Card(
        gauges=(gauge_of(answer),),
        told=told_of(answer),
        chart=chart_of(answer),
        yardstick=YARDSTICK,
        picture=picture_of(answer),
    )


def brief_of(answer: Answer) -> Brief:
    """A stack beside the one of the card."""
    name = first_large(stack_words(answer.stack).removeprefix("the "))
    return Brief(
        name=name, headline=answer.headline, deck=answer.deck, gauge=gauge_of(answer), told=told_of(answer)[:2]
    )


def told_of(answer: Answer) -> tuple[tuple[str, Told], ...]:
    return (("Where", answer.where), ("Who", answer.who), ("How sure", answer.sure), ("What now", answer.now))


def gauge_of(answer: Answer, title: str = "") -> Gauge:
    """The output between 0 and 1, beside where it came from."""
    untrained = answer.points[-1].untrained
    return Gauge(
        id=identifier("gauge", answer.stack),
        title=title,
        alt=f"Gauge from 0 to 1: mean cosine {level(answer.output)}, {answer.state}; at the input {level(answer.input)}.",
        value=answer.output,
        said=answer.state if answer.is_sure else f"{answer.state}, not sure",
        bands=STARTS,
        start=answer.input,
        interval=answer.interval,
        before=answer.before_norm if abs((answer.before_norm or 0.0) - answer.output) >= SEEN else None,
        untrained=untrained,
        limit=answer.limit if answer.now.command.find("--max-cosine") > 0 else None,
    )


# --- the cosine over depth, and below it what each part adds ---


def chart_of(answer: Answer) -> Chart:
    """Both panels over one axis: the input, every layer, the final norm."""
    ends = {answer.points[-1].label: "norm"} if answer.points[-1].label == "final norm" else {}
    labels = [ends.get(point.label, point.label) for point in answer.points]
    name = f", {answer.stack}" if answer.stack else ""
    return Chart(
        id="depth",
        alt=(
            f"Mean cosine{name} from {level(answer.input)} at the input to {level(answer.output)} at the output over "
            f"{sum(point.label.isdigit() for point in answer.points)} layers; below it what each part adds to it."
        ),
        x=places(labels, "layer; norm: the final norm" if ends else "layer"),
        panels=(curve_panel(answer, f"How alike tokens are, layer by layer (mean cosine){name}"), _columns(answer)),
        notes=tuple((float(k), _note(answer, k)) for k in range(len(labels))),
    )


def cosine_axis(curves: Sequence[Sequence[CurvePoint]]) -> Axis:
    """0 to 1, lower where pairs are."""
    lowest = min((p.quantiles[0] if p.quantiles else p.mean) for points in curves for p in points)
    return replace(COSINE, low=min(0.0, lowest - 0.01))


def curve_panel(answer: Answer, title: str) -> Panel:
    """The mean as a line, half and 80% of all pairs as a fan, the untrained copy dashed."""
    points = answer.points
    x = tuple(float(k) for k in range(len(points)))
    marks: list[Mark] = [*fans_of(points)]
    fresh = tuple(point.untrained for point in points)
    if fresh[-1] is not None:
        end = level(fresh[-1])
        marks.append(Line(name="untrained copy", x=x, y=fresh, tone="null", dash="5 4", width=1.6, value=end))
    mean = tuple(point.mean for point in points)
    marks.append(Line(name="mean of all pairs", x=x, y=mean, dots=True, value=level(mean[-1])))
    return Panel(title=title, y=cosine_axis([points]), marks=tuple(marks))


def fans_of(points: Sequence[CurvePoint]) -> list[Fan]:
    """Half and 80% of the pairs, where they were sampled at two places or more."""
    known = [(float(k), point.quantiles) for k, point in enumerate(points) if point.quantiles is not None]
    if len(known) < 2:
        return []
    x = tuple(k for k, _ in known)
    return [
        Fan(
            name=f"{share} of all pairs",
            x=x,
            low=tuple(found[low] for _, found in known),
            high=tuple(found[high] for _, found in known),
            strength=strength,
        )
        for share, low, high, strength in (("80%", 0, 4, 0.34), ("half", 1, 3, 0.5))
    ]


def _columns(answer: Answer) -> Panel:
    """One column per layer, with the parts that add up to its change; their names are the table of sums."""
    where = {point.label: float(k) for k, point in enumerate(answer.points)}
    layers = [layer for layer in answer.layers if layer.label in where]
    return columns_panel(
        "What each part adds, layer by layer and in all (up: more alike; down: more distinct)",
        [where[layer.label] for layer in layers],
        [dict(layer.parts) for layer in layers],
        shown_parts(answer.points, answer.parts),
        shown_total(answer.points),
    )


def columns_panel(
    title: str, x: Sequence[float], layers: Sequence[dict[str, float]], sums: dict[str, float], total: float
) -> Panel:
    parts = tuple(
        (name, tone, tuple(layer.get(name, 0.0) for layer in layers), change_words(sums[name]))
        for name, tone in PARTS.items()
        if name in sums
    )
    reach = [sum((v for v in layer.values() if (v > 0) == up), 0.0) for layer in layers for up in (True, False)]
    low, high = extent(reach, zero=True)
    if high - low < 0.1:
        low, high = min(low, -0.05), max(high, 0.05)
    height = max(130, 18 * (len(parts) + 1))
    marks = (Columns(x=tuple(x), parts=parts, total=change_words(total)),)
    return Panel(title=title, y=numbers(low, high, count=4, is_change=True), marks=marks, height=height)


def _note(answer: Answer, k: int) -> str:
    """Everything that is known of one place."""
    point = answer.points[k]
    place = point.label if k == 0 or point.label == "final norm" else f"layer {point.label}"
    change = shown_layers(answer.points, answer.layers)[k - 1] if k else None
    lines = [f"{place}: mean cosine {level(point.mean)}" + (f" ({change_words(change.change)})" if change else "")]
    if change:
        lines.append(", ".join(f"{part} {change_words(value)}" for part, value in change.parts))
    if point.quantiles:
        low, quarter, _, three, high = point.quantiles
        lines.append(f"half of pairs {level(quarter)} to {level(three)}, 80% {level(low)} to {level(high)}")
    if point.share_above is not None:
        lines.append(f"{point.share_above:.0%} of pairs above 0.9")
    if point.untrained is not None:
        lines.append(f"untrained copy {level(point.untrained)}")
    return "\n".join(lines)


# --- the card as a picture ---

WIDTH, HEIGHT, EDGE = 1200.0, 630.0, 56.0
"""Pixels, as sites that show a link want them."""
ZOOM = 1.9
"""Of the chart in the picture."""


def picture_of(answer: Answer) -> str:
    """1200 x 630: name, headline, curve, and who it was."""
    room = WIDTH - 2 * EDGE
    sizes = ((52.0, 2), (44.0, 2), (36.0, 3), (28.0, 4))
    size, lines = next(
        (
            (size, found)
            for size, most in sizes
            if len(found := wrapped(answer.headline, room, size, bold=True)) <= most
        ),
        (22.0, wrapped(answer.headline, room, 22.0, bold=True)),
    )
    name = lettering(EDGE, 74.0, answer.model, "f-ink b", 25.0)
    if text_width(f"{answer.model}  {answer.subject}", 25.0, bold=True) <= room:
        subject = f'<tspan class="f-soft" style="font-weight:400" dx="14">{escape(answer.subject)}</tspan>'
        name = name.replace("</text>", f"{subject}</text>")
    parts = [name]
    y = 84.0
    for line in lines:
        y += size * 1.14
        parts.append(lettering(EDGE, y, line, "f-ink b", size))
    foot = HEIGHT - 40
    top_of_foot = foot - 34 - 26 * (len(wrapped(answer.who.title, room - 170, 21.0)) - 1)
    chart = chart_of(answer)
    frame = (
        drawn(replace(chart, panels=(replace(chart.panels[0], title="", height=200),), notes=()), room / ZOOM)[1] - 200
    )
    height = int((top_of_foot - y - 24) / ZOOM - frame)
    panel = replace(chart.panels[0], title="", height=max(height, 60))
    inside, _ = drawn(replace(chart, panels=(panel,), notes=()), room / ZOOM)
    parts.append(f'<g transform="translate({EDGE:g} {y + 16:.0f}) scale({ZOOM})">{inside}</g>')
    who = wrapped(answer.who.title, room - 170, 21.0)
    parts += [lettering(EDGE, foot - 26 * (len(who) - 1 - k), line, "f-soft", 21.0) for k, line in enumerate(who)]
    parts.append(lettering(WIDTH - EDGE, foot, "oversmooth", "f-ink b e", 24.0))
    return picture("".join(parts), WIDTH, HEIGHT)
