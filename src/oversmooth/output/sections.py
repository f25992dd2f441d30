"""The closed parts of a report: why (theory beside the measurement), heads, and every number."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from oversmooth.output.blocks import Block, Items, PageSection, Pair, Words, identifier, table_of
from oversmooth.output.charts import Chart, Fan, HeatMap, Line, Mark, Panel, extent, numbers, places
from oversmooth.results import (
    Analysis,
    HeadAttention,
    Inspection,
    LayerInspection,
    LayerPrediction,
    Measurement,
    Prediction,
    Row,
)
from oversmooth.results.answer import Answer
from oversmooth.results.base import apportioned, fields_of
from oversmooth.results.reading import shown_layers
from oversmooth.results.wording import findings, read_parts, worth_words

RUNG_WORDS = {
    0: "infinite repetition: the theorem",
    1: "one step, isotropic features",
    2: "+ the real features",
    3: "+ coupling of differences into the mean",
    4: "+ biases",
    5: "+ each token's own scale: exact without gains",
    6: "+ each token's own gains: exact",
}
LEAK_WORDS = (
    "The leak says how much of what all tokens share is turned into differences, because a gate, a sink or a norm on "
    "heads lets every token write with a gain of its own; it works against smoothing."
)
SPECTRUM = (
    *("stack", "layer", "rho_dc", "min_real", "max_real", "negative_share", "folded_rho_dc", "null_rho_dc"),
    *("excess", "excess_spread", "positivity", "positivity_spread"),
    *("asymmetry", "bias_norm", "unreadable"),
)
LADDER_ROW = ("stack", "layer", "depth", "direction", "regime", "measured", "carries", "explained_from", "leak")
TURN = ("stack", "layer", "part", "degrees", "smoothing", "shared", "differing", "undone", "weak because")
"""Columns of wide tables that a page shows; `--tables` writes all."""
ROUNDED = 1e-6
"""Norm weights this close to zero are zero."""
EXACT = 4
"""Digits of a mean cosine in tables, where changes add up as well."""
MOST_CELLS = 1500
"""Of a table with several rows per layer; larger ones are left to `--tables`."""


def layer_name(layer: LayerInspection) -> str:
    name = f"{layer.stack} {layer.layer}" if layer.stack else f"layer {layer.layer}"
    return f"{name} (×{len(layer.passes)})" if len(layer.passes) > 1 else name


def place_name(layer: LayerPrediction) -> str:
    name = f"{layer.stack} {layer.layer}" if layer.stack else f"layer {layer.layer}"
    return name if layer.depth == layer.layer + 1 else f"{name}, pass {layer.depth}"


def layered(rows: Iterable[Row]) -> list[Row]:
    """Rows that count layers from 0 only, as everything on a page does; of shared layers the pass stays beside them."""
    found = [{"layer": row["depth"] - 1, **row} for row in rows]
    has_passes = any(row["layer"] != row["depth"] - 1 for row in found)
    return [{name: value for name, value in row.items() if name != "depth" or has_passes} for row in found]


def heading(text: str) -> Words:
    return Words(text=text, kind="heading")


def suffix(stack: str) -> str:
    return f" ({stack})" if stack else ""


def columns(rows: Iterable[Row], names: Sequence[str]) -> list[Row]:
    """Rows with these columns only, and of a ladder with all rungs."""
    return [{name: value for name, value in row.items() if name in names or name.startswith("rung_")} for row in rows]


# --- why: what the weights lead to, and how far that is from what was measured ---


def why_section(analysis: Analysis) -> PageSection:
    inspection, measurement, prediction = analysis.inspection, analysis.measurement, analysis.prediction
    blocks: list[Block] = []
    if measurement is not None and (found := findings(measurement)):
        blocks += [heading("What stands out"), Items(items=tuple(item.text for item in found))]
    blocks += [heading("What repeating a layer would do"), Words(text=GROWTH)]
    blocks += list(growth_charts(inspection, prediction))
    if prediction is not None:
        blocks += [heading("From the theorem to the measurement"), Words(text=LADDER)]
        blocks += [ladder_of(stack, prediction) for stack in dict.fromkeys(layer.stack for layer in prediction.layers)]
        blocks.append(table_of("agreement", "Agreement of each rung", _agreement_rows(prediction)))
        blocks += [Words(text=item.text[:1].upper() + item.text[1:], mark=item.basis) for item in prediction.verdict]
        blocks += [Words(text=problem, kind="note") for problem in prediction.problems]
    blocks += _norms(inspection.layers)
    blocks += [
        Words(text=f"{layer_name(layer)} could not be read: {layer.unreadable}.", kind="note")
        for layer in inspection.layers
        if layer.unreadable
    ]
    return PageSection(id="why", title="Why", lead=why_words(prediction), blocks=blocks, is_closed=True)


GROWTH = (
    "Each layer's value map, with the norms of the layer, has eigenvalues λ, and |1 + λ| is how much a direction that all "
    "tokens share grows when the layer is repeated. ρ_dc is the largest of them. Where ρ_ac, the growth of what differs "
    "between tokens, lies below it, repeating the layer would smooth; a real layer acts once."
)
LADDER = (
    "The change of log(HFC/LFC) across attention, layer by layer: at the top what the theorem says, at the bottom "
    "what was measured; every rung between them adds one thing that the theorem leaves out. Dark: more alike."
)


def why_words(prediction: Prediction | None) -> str:
    """How far the theorem carries."""
    if prediction is None:
        return "the eigenvalues of each layer's value map, and the signs of its norms"
    rungs: dict[int, list[tuple[float, int]]] = {}
    for item in prediction.agreements:
        if item.sign_agreement is not None:
            rungs.setdefault(item.rung, []).append((item.sign_agreement * item.layers, item.layers))
    if 0 not in rungs:
        return "what the weights alone lead to, beside what was measured"
    right, layers = (round(sum(values)) for values in zip(*rungs[0], strict=True))
    known = [(rung, round(sum(right for right, _ in found))) for rung, found in rungs.items() if rung]
    better = [rung for rung, count in known if count == layers]
    rest = f"; from rung {min(better)} on all {layers}" if better and right < layers else ""
    return f"the theorem alone gets the sign of attention's effect right in {right} of {layers} layers{rest}"


def growth_charts(inspection: Inspection, prediction: Prediction | None = None) -> Iterator[Chart]:
    """One per stack."""
    predicted: dict[tuple[str, int], LayerPrediction] = {}
    for layer in prediction.layers if prediction is not None else ():
        predicted.setdefault((layer.stack, layer.layer), layer)
    readable = [layer for layer in inspection.layers if layer.plain is not None]
    for stack in dict.fromkeys(layer.stack for layer in readable):
        own = [layer for layer in readable if layer.stack == stack]
        yield _growth_chart(stack, own, [predicted.get((stack, layer.layer)) for layer in own])


def _growth_chart(stack: str, layers: Sequence[LayerInspection], predicted: Sequence[LayerPrediction | None]) -> Chart:
    rho_dc, rho_ac, spread = [], [], []
    for layer, found in zip(layers, predicted, strict=True):
        whole = found.whole if found else None
        spectrum = layer.folded or layer.plain
        rho_dc.append(whole.rho_dc if whole else spectrum.rho_dc if spectrum else 0.0)
        rho_ac.append(whole.rho_ac if whole else None)
        spread.append(_growths(layer, found))
    x = tuple(float(k) for k in range(len(layers)))
    marks: list[Mark] = []
    if all(spread):
        below, above = (tuple(found[int(q * (len(found) - 1))] for found in spread) for q in (0.1, 0.9))
        marks.append(Fan(name="80% of all |1 + λ|", x=x, low=below, high=above))
    marks.append(Line(name="ρ_dc", x=x, y=tuple(rho_dc), dots=True, value=f"{rho_dc[-1]:.2f}"))
    if any(value is not None for value in rho_ac):
        end = "" if rho_ac[-1] is None else f"{rho_ac[-1]:.2f}"
        marks.append(Line(name="ρ_ac", x=x, y=tuple(rho_ac), tone="apart", dash="7 4", dots=True, value=end))
    lows = [value for mark in marks if isinstance(mark, Fan) for value in mark.low]
    low, high = extent([*rho_dc, *rho_ac, *lows])
    return Chart(
        id=identifier("growth", stack),
        alt=f"Growth of shared directions in every layer{suffix(stack)}: ρ_dc from {rho_dc[0]:.2f} to {rho_dc[-1]:.2f}.",
        caption=_repeated_words([found.whole.regime for found in predicted if found is not None]),
        x=places([str(layer.layer) for layer in layers], "layer"),
        panels=(
            Panel(title=f"Growth when a layer is repeated{suffix(stack)}", y=numbers(low, high), marks=tuple(marks)),
        ),
        notes=tuple(
            (k, f"{layer_name(layer)}: ρ_dc {dc:.3f}" + ("" if ac is None else f", ρ_ac {ac:.3f}"))
            for k, layer, dc, ac in zip(x, layers, rho_dc, rho_ac, strict=True)
        ),
    )


REPEATED = {"smoothing": "would smooth", "sharpening": "would sharpen"}


def _repeated_words(regimes: Sequence[str]) -> str:
    """How many layers would do what, the same as the verdict below says."""
    if not regimes:
        return ""
    counts = [f"{count} {REPEATED.get(word, f'would be {word}')}" for word, count in Counter(regimes).most_common()]
    return f"If repeated with their norms, of {len(regimes)} layers {', '.join(counts)}."


def _growths(layer: LayerInspection, found: LayerPrediction | None) -> list[float]:
    """|1 + λ| of every eigenvalue, norms multiplied in, sorted; empty where they are not known at the measured scale."""
    spectrum = layer.folded or layer.plain
    scale = 1.0 if layer.folded is None or found is None or found.scale is None else found.scale
    if spectrum is None or not spectrum.eigenvalues:
        return []
    growths = sorted(abs(1 + complex(*value) / scale) for value in spectrum.eigenvalues)
    is_same = found is None or math.isclose(growths[-1], found.whole.rho_dc, rel_tol=0.05)
    return growths if is_same else []


def ladder_of(stack: str, prediction: Prediction) -> HeatMap:
    layers = [layer for layer in prediction.layers if layer.stack == stack]
    names = {rung.rung: f"{rung.rung} {rung.name}" for layer in layers for rung in layer.rungs}
    by_rung = [{rung.rung: rung.mean for rung in layer.rungs} for layer in layers]
    values = [tuple(found.get(rung) for found in by_rung) for rung in sorted(names)]
    values.append(tuple(layer.measured for layer in layers))
    known = sorted(abs(value) for row in values[1:] for value in row if value is not None)
    reach = (known[int(0.98 * (len(known) - 1))] if known else 0.0) or 1.0
    return HeatMap(
        id=identifier("ladder", stack),
        alt=f"Heat map of rungs by layers{suffix(stack)}: predicted and measured change of log(HFC/LFC); the table below "
        "says how well they agree.",
        title=f"The ladder{suffix(stack)}",
        rows=(*(names[rung] for rung in sorted(names)), "measured"),
        columns=tuple(str(layer.depth - 1) for layer in layers),
        values=tuple(values),
        low=-reach,
        high=reach,
        middle=0.0,
        ink_below=True,
        column_title="layer",
        unit="change of log(HFC/LFC): below 0 smooths",
    )


def _agreement_rows(prediction: Prediction) -> list[dict[str, Any]]:
    return [{**fields_of(item), "uses": RUNG_WORDS[item.rung], "missing": ""} for item in prediction.agreements]


def _norms(layers: Sequence[LayerInspection]) -> list[Block]:
    rows = [
        {
            "layer": layer_name(layer),
            "norm": norm.role.replace("_", " "),
            "share below 0": norm.negative_share if norm.smallest < -ROUNDED else 0.0,
            "smallest": norm.smallest if abs(norm.smallest) > ROUNDED else 0.0,
            "largest": norm.largest,
        }
        for layer in layers
        for norm in layer.norms
    ]
    if not rows:
        return []
    negative = sum(bool(norm.negative_share) and norm.smallest < -ROUNDED for layer in layers for norm in layer.norms)
    words = (
        f"{negative} of {len(rows)} norms have negative weights. A negative weight flips the sign of a channel before the "
        "value map, and with it whether that channel smooths or sharpens."
        if negative
        else f"All weights of all {len(rows)} norms are positive or zero, so they cannot flip the sign of any channel."
    )
    table = [table_of("norm-signs", "Norm weights", rows)] if negative else []
    return [heading("Signs of the norm weights"), Words(text=words), *table]


# --- heads ---

SINK = 0.3
"""Of all attention of a head; above it the head has a sink."""
COLLAPSED, UNIFORM = 0.1, 0.95
"""Entropies below which a head looks at one token, and above which at all alike."""


def heads_section(analysis: Analysis) -> PageSection | None:
    """Layers by heads: what a head alone would do, and how it attends."""
    measured = analysis.measurement.heads if analysis.measurement else ()
    layers = [layer for layer in analysis.inspection.layers if layer.heads]
    blocks: list[Block] = [_head_map(layers, _exponents(analysis.prediction))] if layers else []
    count = sum(len(layer.heads) for layer in layers) or len(measured)
    for stack in dict.fromkeys(head.stack for head in measured):
        blocks.append(_attention_maps(stack, [head for head in measured if head.stack == stack]))
    if measured:
        rows = layered(fields_of(head) for head in measured)
        blocks.append(_table_unless_large("attention-heads", "How every head attends", rows))
    if analysis.measurement is not None and not measured:
        values = [value for value in analysis.measurement.values if value.place == "attention"]
        reasons = dict.fromkeys(missing.reason for value in values for missing in value.missing[:1])
        blocks += [Words(text=f"Attention could not be seen: {reason}.", kind="note") for reason in reasons]
    if not blocks:
        return None
    said = attention_words(measured) if measured else "what each would do by itself, from its weights"
    return PageSection(id="heads", title="Heads", lead=f"{count} heads. {said}", blocks=blocks, is_closed=True)


def _table_unless_large(id: str, label: str, rows: Sequence[Row]) -> Block:
    if sum(map(len, rows)) <= MOST_CELLS:
        return table_of(id, label, rows)
    return Words(text=f"{label}, a table of {len(rows)} rows: oversmooth report --tables DIR")


def attention_words(heads: Sequence[HeadAttention]) -> str:
    """Sinks and where they are, heads that look at one token or at all alike."""
    sinks = [head for head in heads if head.sink > SINK]
    one, uniform = (sum(head.entropy < COLLAPSED for head in heads), sum(head.entropy > UNIFORM for head in heads))
    where = ""
    if sinks:
        ((position, count),) = Counter(head.sink_position for head in sinks).most_common(1)
        where = f", {'all' if count == len(sinks) else f'{count} of them'} at position {position}"
    learned = [head.learned_sink for head in heads if head.learned_sink is not None]
    last = f" A learned sink beside the tokens gets {sum(learned) / len(learned):.0%} of attention." if learned else ""
    look = "looks" if one == 1 else "look"
    return (
        f"{len(sinks)} give more than {SINK} of their attention to one position{where}. {one} {look} at hardly more than one "
        f"token, {uniform} at all tokens nearly alike.{last}"
    )


def _exponents(prediction: Prediction | None) -> dict[tuple[str, int, int], float]:
    found: dict[tuple[str, int, int], float] = {}
    for layer in prediction.layers if prediction else ():
        for head in layer.heads:
            if head.exponent is not None:
                found.setdefault((layer.stack, layer.layer, head.head), head.exponent)
    return found


def _head_map(layers: Sequence[LayerInspection], exponents: Mapping[tuple[str, int, int], float]) -> HeatMap:
    widest = max(head.head for layer in layers for head in layer.heads) + 1
    values = []
    for layer in layers:
        own = {
            head.head: exponents.get((layer.stack, layer.layer, head.head)) if exponents else -math.log(head.rho_dc)
            for head in layer.heads
        }
        values.append(tuple(own.get(k) for k in range(widest)))
    reach = max((abs(value) for row in values for value in row if value is not None), default=1.0) or 1.0
    kind = "predicted exponent of the head alone" if exponents else "-log ρ_dc of the head's weights"
    return HeatMap(
        id="head-map",
        alt=f"Heat map of layers by heads: {kind}.",
        title="What each head would do by itself (dark: would smooth)",
        rows=tuple(layer_name(layer) for layer in layers),
        columns=tuple(str(k) for k in range(widest)),
        values=tuple(values),
        low=-reach,
        high=reach,
        middle=0.0,
        ink_below=True,
        column_title="head",
        unit=f"{kind}: below 0 smooths",
    )


def _attention_maps(stack: str, heads: Sequence[HeadAttention]) -> Pair:
    depths = sorted({head.depth for head in heads})
    at = {(head.depth, head.head): head for head in heads}
    widest = max(head.head for head in heads) + 1
    rows = tuple(f"{stack + ' ' if stack else 'layer '}{depth - 1}" for depth in depths)

    def map_of(name: str, title: str, unit: str) -> HeatMap:
        table = [[at.get((depth, number)) for number in range(widest)] for depth in depths]
        return HeatMap(
            id=identifier(f"head-{name}", stack),
            alt=f"Heat map of layers by heads{suffix(stack)}: {unit}.",
            title=f"{title}{suffix(stack)}",
            rows=rows,
            columns=tuple(str(k) for k in range(widest)),
            values=tuple(tuple(None if head is None else getattr(head, name) for head in row) for row in table),
            low=0.0,
            high=1.0,
            column_title="head",
            unit=unit,
        )

    entropy = map_of(
        "entropy", "How evenly each head looks", "entropy: 0 at one token, 1 at all alike, which smooths most"
    )
    return Pair(
        charts=(
            entropy,
            map_of("sink", "Where attention piles up", f"largest share that one position gets; above {SINK} a sink"),
        )
    )


# --- all numbers: the distribution, the tables ---


def cosine_blocks(answers: Sequence[Answer]) -> Iterator[Block]:
    """The numbers of the first screen: every place, layer and part, and how all pairs are spread."""
    if not answers:
        return
    yield heading("The mean cosine, place by place")
    yield from (found for answer in answers if (found := _distribution(answer)) is not None)
    yield table_of("places", "Mean cosine at every place", [row for answer in answers for row in _place_rows(answer)])
    names = list(dict.fromkeys(name for answer in answers for layer in answer.layers for name, _ in layer.parts))
    changes = [
        {
            "stack": answer.stack,
            "layer": layer.label,
            "change": layer.change,
            **{n: dict(layer.parts).get(n) for n in names},
        }
        for answer in answers
        for layer in shown_layers(answer.points, answer.layers, EXACT)
    ]
    yield table_of("changes", "What each part adds in every layer", changes)
    sums = [
        {
            "stack": answer.stack,
            "part": part.part,
            "change": change,
            "95% from": part.interval and part.interval[0],
            "to": part.interval and part.interval[1],
        }
        for answer in answers
        for part, change in zip(answer.parts, _sums(answer), strict=True)
    ]
    yield table_of("parts", "What each part adds in all layers together", sums)
    values = [{"stack": a.stack, "input": k, "mean cosine": v} for a in answers for k, v in enumerate(a.values)]
    yield table_of("values", "Mean cosine at the output, input by input", values)


def _sums(answer: Answer) -> tuple[float, ...]:
    total = round(answer.output, EXACT) - round(answer.input, EXACT)
    return apportioned([part.change for part in answer.parts], total, EXACT)


def _place_rows(answer: Answer) -> Iterator[dict[str, object]]:
    names = ("10%", "25%", "median", "75%", "90%")
    for point in answer.points:
        spread = dict(zip(names, point.quantiles, strict=True)) if point.quantiles else dict.fromkeys(names)
        yield {
            "stack": answer.stack,
            "place": point.label,
            "mean cosine": round(point.mean, EXACT),
            **spread,
            "pairs above 0.9": point.share_above,
            "untrained copy": point.untrained,
        }


def _distribution(answer: Answer) -> HeatMap | None:
    """Depth by cosine: how many pairs are where."""
    points = [point for point in answer.points if any(share > 0 for share in point.histogram)]
    if not points:
        return None
    bins = len(points[0].histogram)
    used = [k for k in range(bins) if any(point.histogram[k] > 0 for point in points)]
    order = range(max(used), min(used) - 1, -1)
    top = max(max(point.histogram) for point in points)
    return HeatMap(
        id=identifier("distribution", answer.stack),
        alt=f"Heat map{suffix(answer.stack)}: share of all pairs by cosine and depth; the table has their quantiles.",
        title=f"How the cosines of all pairs are spread{suffix(answer.stack)}",
        rows=tuple(f"{-1 + 2 * (k + 0.5) / bins:.2f}" for k in order),
        columns=tuple(point.label for point in points),
        values=tuple(tuple(point.histogram[k] for point in points) for k in order),
        low=0.0,
        high=top,
        row_title="cosine",
        column_title="layer",
        unit="share of pairs",
        caption="Collapse is a cloud that closes at 1; a cloud that splits is groups.",
    )


def log_blocks(measurement: Measurement) -> Iterator[Block]:
    """The logarithm of HFC/LFC, which tells 0.97 from 0.99, and what each sub-block does to it."""
    yield heading("log(HFC/LFC): what differs between tokens over what they share")
    yield Words(
        text="At unit length no token decides it; of tokens as they are a single large one may. Below 0 a part smooths; the "
        "parts add up exactly to the change from input to output."
    )
    yield from (chart for stack in _stacks(measurement) if (chart := _ratio_chart(measurement, stack)) is not None)
    raw = measurement.raw_attributions
    as_they_are = {(p.stack, p.depth, p.place): p.change for item in raw for p in item.parts}
    rows = [
        {
            "stack": p.stack,
            "layer": p.depth - 1,
            "part": p.part,
            "ends at": p.place,
            "change at unit length": p.change,
            "±": p.standard_error,
            "direction": p.direction,
            "of tokens as they are": as_they_are.get((p.stack, p.depth, p.place)),
        }
        for attribution in measurement.unit_attributions
        for p in attribution.parts
    ]
    yield _table_unless_large("attribution-parts", "Change of log(HFC/LFC) per sub-block", rows)


def _stacks(measurement: Measurement) -> list[str]:
    return list(dict.fromkeys(value.stack for value in measurement.values))


def _ratio_chart(measurement: Measurement, stack: str) -> Chart | None:
    points = [point for point in measurement.curve("hfc_lfc", stack) if point.mean is not None]
    if not points:
        return None
    marks: list[Mark] = list(band_and_line("HFC/LFC", points))
    without = [(float(k), point.mean_without_largest) for k, point in enumerate(points)]
    if any(value is not None for _, value in without):
        x, y = zip(*without, strict=True)
        marks.append(Line(name="without the largest token", x=x, y=y, tone="null", dash="5 4", width=1.6))
    low, high = extent([*(p.mean for p in points), *(value for _, value in without)], zero=True)
    return Chart(
        id=identifier("hfc-lfc", stack),
        alt=f"HFC/LFC{suffix(stack)} goes from {points[0].mean:.3f} to {points[-1].mean:.3f} over {len(points) - 1} layers.",
        x=places(["input", *(str(point.depth - 1) for point in points[1:])], "layer"),
        panels=(
            Panel(title=f"HFC/LFC of tokens as they are{suffix(stack)}", y=numbers(low, high), marks=tuple(marks)),
        ),
        notes=tuple((float(k), f"depth {point.depth}: {point.mean:.4g}") for k, point in enumerate(points)),
    )


def band_and_line(name: str, points: Sequence[Any], tone: str = "ink", dash: str = "") -> Iterator[Mark]:
    """A mean over depth, with a band of one standard error."""
    x = tuple(float(k) for k in range(len(points)))
    low, high = (tuple(p.mean + side * (p.standard_error or 0.0) for p in points) for side in (-1, 1))
    if any(point.standard_error for point in points):
        yield Fan(name="one standard error", x=x, low=low, high=high)
    yield Line(
        name=name, x=x, y=tuple(p.mean for p in points), tone=tone, dash=dash, dots=True, value=f"{points[-1].mean:.3g}"
    )


HOW = (
    "A turn is split into what differs between tokens, what they share, and the balance of the two. A long stream "
    "dilutes what is added to it, so the same branch turns tokens less in a deeper layer. What removing a layer "
    "costs is another question, which oversmooth ablate answers."
)


def turn_blocks(measurement: Measurement) -> Iterator[Block]:
    """By how many degrees each sub-block turns tokens."""
    readings = read_parts(measurement)
    if not readings:
        return
    yield heading("How far each layer turns tokens")
    yield Words(text=f"{worth_words(readings)} {HOW}")
    rows = layered({**fields_of(r), "degrees": r.angle, "weak because": r.reason} for r in readings)
    yield _table_unless_large("turns", "What every sub-block and block does", columns(rows, TURN))


def theory_blocks(analysis: Analysis) -> Iterator[Block]:
    """Spectra, the ladder in numbers, what-ifs, verdicts."""
    yield heading("Eigenvalues of the value map")
    yield table_of("layers", "Spectra per layer", columns(analysis.inspection.rows(), SPECTRUM))
    if (prediction := analysis.prediction) is None:
        return
    yield heading("The ladder in numbers")
    yield table_of("ladder-table", "The ladder of every layer", columns(layered(prediction.rows()), LADDER_ROW))
    if any(layer.leak for layer in prediction.layers):
        yield Words(text=LEAK_WORDS)
    if any(layer.what_ifs for layer in prediction.layers):
        yield heading("What if?")
        yield Words(text="The same features and attention through a changed layer, without touching the model.")
        yield _table_unless_large("what-if-table", "What-if predictions", layered(prediction.what_if_rows()))
    verdicts = [
        {"layer": place_name(layer), "statement": item.text, "known how": item.basis}
        for layer in prediction.layers
        for item in layer.verdict
        if item.is_remark
    ]
    if verdicts:
        yield heading("What else is known of single layers")
        yield table_of("verdicts", "What else is known of single layers", verdicts)


def rank_words(answer: Answer) -> str:
    """How many directions tokens differ in, at both ends."""
    if answer.rank is None:
        return ""
    start, end, largest = answer.rank
    return f"effective rank {start:.0f} at the input, {end:.0f} at the output, of {largest}"
