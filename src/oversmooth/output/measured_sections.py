"""Sections of the report about the measurement: curves, attribution, attention, sub-blocks."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from oversmooth.output.blocks import (
    Bar,
    BarRow,
    Bars,
    Block,
    PageSection,
    Pair,
    Plot,
    Segment,
    Words,
    heat_map,
    table_of,
)
from oversmooth.output.theory_sections import rounded
from oversmooth.results import Attribution, HeadAttention, Measurement, PlaceValue
from oversmooth.results.base import signed
from oversmooth.results.wording import SMALL, TAKEN_BACK_SHARE, PartReading, colour_of, read_parts, worth_words

# --- the part of a report that a measurement fills: curves over depth, and who changed them ---

STACK_DASHES = ("solid", "dash", "dot", "dashdot")
"""Stacks of one model differ by their line, because colours already say what happens and who does it."""
PARTS = {
    "attention": "var(--attention)",
    "norm after attention": "var(--norm)",
    "cross-attention": "var(--cross-attention)",
    "norm after cross-attention": "var(--norm)",
    "feed-forward": "var(--feed-forward)",
    "norm after feed-forward": "var(--norm)",
    "other blocks": "var(--other)",
    "between blocks": "var(--other)",
    "final norm": "var(--norm)",
}
PATTERNS = {"final norm": "/", "other blocks": "x", "between blocks": "."}
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


def scale_section(measurement: Measurement) -> PageSection:
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
    return PageSection(
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


def attribution_section(measurement: Measurement) -> PageSection:
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
    return PageSection(
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


# --- the section on whether attention is healthy: heads that see one position only, or all alike ---

SINK = 0.3
"""Of all attention of a head; above it the head has a sink."""
COLLAPSED, UNIFORM = 0.1, 0.95
"""Entropies below which a head looks at one token, and above which at all alike."""


def attention_section(measurement: Measurement) -> PageSection | None:
    """`None` where attention was not asked for."""
    heads = measurement.heads
    reasons = [m.reason for value in measurement.values if value.place == "attention" for m in value.missing[:1]]
    unseen = [reason for reason in dict.fromkeys(reasons) if not heads]
    if not heads and not unseen:
        return None
    blocks: list[Block] = [Words(text=f"Attention could not be seen: {reason}.", kind="note") for reason in unseen]
    for stack in dict.fromkeys(head.stack for head in heads):
        blocks.append(_maps(stack, [head for head in heads if head.stack == stack]))
    if heads:
        blocks.append(table_of("attention-heads", "How every head attends", [_head_row(head) for head in heads]))
    lead = attention_words(heads) if heads else ""
    return PageSection(id="attention-health", title="Is attention healthy?", lead=lead, blocks=blocks)


def attention_words(heads: Sequence[HeadAttention]) -> str:
    """One or two sentences: sinks and where they are, heads that look at one token or at all alike."""
    sinks = [head for head in heads if head.sink > SINK]
    collapsed = sum(head.entropy < COLLAPSED for head in heads)
    uniform = sum(head.entropy > UNIFORM for head in heads)
    where = ""
    if sinks:
        ((position, count),) = Counter(head.sink_position for head in sinks).most_common(1)
        where = f", {'all' if count == len(sinks) else f'{count} of them'} at position {position}"
    first = f"{len(sinks)} of {len(heads)} heads give more than {SINK} of their attention to one position{where}."
    look = "looks" if collapsed == 1 else "look"
    learned = [head.learned_sink for head in heads if head.learned_sink is not None]
    last = (
        f" To a learned sink beside the tokens goes {sum(learned) / len(learned):.0%} of attention." if learned else ""
    )
    return f"{first} {collapsed} {look} at hardly more than one token, {uniform} at all tokens nearly alike.{last}"


def _maps(stack: str, heads: Sequence[HeadAttention]) -> Pair:
    depths = sorted({head.depth for head in heads})
    by_place = {(head.depth, head.head): head for head in heads}
    widest = max(head.head for head in heads) + 1
    table = [[by_place.get((depth, number)) for number in range(widest)] for depth in depths]
    rows = [f"{stack + ' ' if stack else 'layer '}{depth - 1}" for depth in depths]
    text = [[_hover(head) for head in row] for row in table]
    suffix, name = (f"-{stack}", f" ({stack})") if stack else ("", "")
    hover = "%{y}, head %{x}<br>%{text}<extra></extra>"
    return Pair(
        plots=(
            Plot(
                id=f"head-entropy{suffix}",
                figure=heat_map(
                    rows,
                    [[None if head is None else head.entropy for head in row] for row in table],
                    bounds=(0.0, 1.0),
                    colours=((0.0, "var(--sharpen)"), (0.5, "var(--panel)"), (1.0, "var(--smooth)")),
                    title="entropy",
                    hover=hover,
                    text=text,
                ),
                caption=f"Entropy of each head's attention{name}: 0 looks at one token, 1 at all alike, which smooths most.",
                alt=f"Heat map of layers by heads{name}: entropy of attention. {attention_words(heads)}",
            ),
            Plot(
                id=f"head-sinks{suffix}",
                figure=heat_map(
                    rows,
                    [[None if head is None else head.sink for head in row] for row in table],
                    bounds=(0.0, 1.0),
                    colours=((0.0, "var(--panel)"), (1.0, "var(--attention)")),
                    title="share",
                    hover=hover,
                    text=text,
                ),
                caption=f"Largest share of a head's attention that goes to one position{name}; above {SINK} it is a sink.",
                alt=f"Heat map of layers by heads{name}: largest share of attention that one position gets.",
            ),
        )
    )


def _hover(head: HeadAttention | None) -> str:
    if head is None:
        return ""
    learned = "" if head.learned_sink is None else f", {head.learned_sink:.0%} to the learned sink"
    return (
        f"entropy {head.entropy:.2f}, sees {head.effective_tokens:.1f} tokens<br>"
        f"{head.sink:.0%} to position {head.sink_position}{learned}, rank {head.rank:.1f}"
    )


def _head_row(head: HeadAttention) -> dict[str, object]:
    learned = {} if head.learned_sink is None else {"to the learned sink": head.learned_sink}
    return {
        "stack": head.stack,
        "layer": head.depth - 1,
        "head": head.head,
        "entropy": head.entropy,
        "tokens seen": head.effective_tokens,
        "largest share": head.sink,
        "at position": head.sink_position,
        "rank": head.rank,
        **learned,
    }


# --- the section "Is each layer worth it?": a row of small bars per layer, and why a weak one is weak ---

LEGEND = (
    ("differing", "turns what differs between tokens"),
    ("shared", "turns what all tokens share"),
    ("smoothing", "moves the balance of the two: smooths or sharpens"),
)
LEAD = (
    "Bars show by how many degrees a sub-block turns tokens on average, and what that turn is made of. A long stream dilutes "
    "what is added to it, so the same branch turns tokens less in a deeper layer."
)
HOW = (
    f"Too small to matter: a branch of this size cannot have an influence of {SMALL}, a turn of 6 degrees, whichever way it "
    "points. Moves only what all tokens share: four fifths of its turn are alike. Undone: the next sub-block takes "
    f"back at least {TAKEN_BACK_SHARE:.0%} of it. What dropping a layer costs is another question, which oversmooth ablate "
    "answers."
)


def worth_section(measurement: Measurement) -> PageSection | None:
    """`None` for measurements without metrics of steps."""
    readings = read_parts(measurement)
    if not readings:
        return None
    return PageSection(
        id="worth",
        title="Is each layer worth it?",
        lead=worth_words(readings),
        blocks=[
            Words(text=LEAD),
            *(_bars(stack, readings) for stack in dict.fromkeys(reading.stack for reading in readings)),
            Words(text=HOW),
            table_of(
                "worth-parts", "What every sub-block and block does", [_part_row(reading) for reading in readings]
            ),
        ],
    )


def _bars(stack: str, readings: Sequence[PartReading]) -> Bars:
    own = [reading for reading in readings if reading.stack == stack and reading.part != "block"]
    by_place = {(reading.depth, reading.part): reading for reading in own}
    parts = tuple(dict.fromkeys(reading.part for reading in own))
    widest = max(reading.angle for reading in own) or 1.0
    rows = tuple(
        BarRow(
            title=f"{stack + ' ' if stack else 'layer '}{depth - 1}",
            bars=tuple(_bar(by_place.get((depth, part)), widest) for part in parts),
            words=_words([by_place[depth, part] for part in parts if (depth, part) in by_place]),
        )
        for depth in sorted({reading.depth for reading in own})
    )
    label = f"How far each sub-block{' of the ' + stack if stack else ''} turns tokens"
    return Bars(label=label, columns=parts, rows=rows, legend=LEGEND)


def _bar(reading: PartReading | None, widest: float) -> Bar:
    if reading is None:
        return Bar(shown="", segments=())
    length = 100 * reading.angle / widest
    shares = (("differing", reading.differing), ("shared", reading.shared), ("smoothing", reading.smoothing))
    whole = sum(max(value, 0.0) for _, value in shares) or 1.0
    return Bar(
        shown=f"{reading.angle:.0f}°" if reading.angle >= 9.5 else f"{reading.angle:.1f}°",
        segments=tuple(
            Segment(tone=tone, percent=round(length * max(value, 0.0) / whole, 2)) for tone, value in shares
        ),
    )


def _words(readings: Sequence[PartReading]) -> str:
    """Why sub-blocks of one layer are weak."""
    reasons = dict.fromkeys(reading.reason for reading in readings if reading.reason)
    told = []
    for reason in reasons:
        parts = [reading.part for reading in readings if reading.reason == reason]
        told.append(reason if len(parts) == len(readings) > 1 else f"{' and '.join(parts)} {reason}")
    return "; ".join(told)


def _part_row(reading: PartReading) -> dict[str, object]:
    return {
        "stack": reading.stack,
        "layer": reading.depth - 1,
        "part": reading.part,
        "influence": reading.influence,
        "smoothing": reading.smoothing,
        "shared": reading.shared,
        "differing": reading.differing,
        "contribution": reading.contribution,
        "ceiling": reading.ceiling,
        "undone": reading.undone,
        "weak because": reading.reason,
    }
