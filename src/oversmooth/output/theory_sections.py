"""Sections of the report about theory: spectra, heads, norms, regimes, the ladder, what-ifs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from oversmooth.output.blocks import Block, PageSection, Plot, Slider, Strip, StripItem, Words, heat_map, table_of
from oversmooth.results import Inspection, LayerInspection, LayerPrediction, Prediction, Spectrum
from oversmooth.results.base import NOTHING, signed
from oversmooth.results.wording import known_range, range_words

# --- the part of a report that weights alone can fill: eigenvalues, heads, norm signs ---

DIGITS = 4
"""Significant digits of plotted numbers; the JSON result has them all."""

PLANE_CAPTION = (
    "Each point is an eigenvalue of H = W_V W_O. The distance from -1 is what counts: |1 + λ| is the growth of that "
    "direction in what all tokens share. "
)
PLANE_WITH_AC = (
    "The dashed circle is ρ_ac, the growth of what tokens do not share: with points outside it the layer smooths, "
    "otherwise it sharpens."
)
PLANE_WITHOUT_AC = "The solid circle is the largest, ρ_dc."


def layer_name(layer: LayerInspection) -> str:
    name = f"{layer.stack} {layer.layer}" if layer.stack else f"layer {layer.layer}"
    return f"{name} (×{len(layer.passes)})" if len(layer.passes) > 1 else name


def short_place(stack: str, layer: int) -> str:
    """A layer on a card that has room for a number."""
    return f"{stack[:3]} {layer}" if stack else str(layer)


def rounded(values: Sequence[float]) -> list[float]:
    """For a figure; what rounding left of zero is zero, as in tables."""
    return [0.0 if abs(value) < NOTHING else float(f"{value:.{DIGITS}g}") for value in values]


def spectra_section(inspection: Inspection, rho_ac: dict[tuple[str, int], float]) -> PageSection:
    """Eigenvalues of H in the complex plane, a layer at a time; `rho_ac` by stack and layer where it is known."""
    layers = [layer for layer in inspection.layers if layer.plain is not None]
    blocks: list[Block] = []
    if layers:
        steps = [_plane(layer, rho_ac.get((layer.stack, layer.layer))) for layer in layers]
        blocks.append(
            Plot(
                id="eigenvalues",
                figure={"steps": steps, "layout": _plane_layout(layers)},
                caption=PLANE_CAPTION + (PLANE_WITH_AC if rho_ac else PLANE_WITHOUT_AC),
                alt="Scatter plot of one layer's eigenvalues in the complex plane; the table below has the extremes.",
                slider=Slider(count=len(steps), first=steps[0]["words"]),
            )
        )
    residuals = {stack.name: stack.residual for stack in inspection.stacks}
    rows = [_row(layer, residuals.get(layer.stack, "")) for layer in inspection.layers]
    blocks.append(table_of("layers", "Spectra per layer", rows))
    if words := range_words("tendency", list(residuals.values())):
        blocks.append(Words(text=words))
    blocks += _unreadable(inspection)
    return PageSection(
        id="spectra",
        title="Eigenvalues of the value map",
        lead="What each layer's value and output weights do, before attention decides which tokens they act on.",
        blocks=blocks,
    )


def _row(layer: LayerInspection, residual: str) -> dict[str, object]:
    plain, folded = layer.plain, layer.folded
    known = known_range("tendency", residual)
    return {
        "layer": layer_name(layer),
        "ρ_dc": plain and plain.rho_dc,
        "at λ": "" if plain is None else _complex(plain),
        "Re min": plain and plain.min_real,
        "Re max": plain and plain.max_real,
        "share Re<0": plain and plain.negative_share,
        "ρ_dc with norm": folded and folded.rho_dc,
        "tendency": layer.tendency,
        "known range": known.cell if known else "",
        "asymmetry": layer.asymmetry,
        "value bias": layer.bias_norm,
        "note": layer.unreadable or ("not diagonalizable" if plain and plain.is_defective else ""),
    }


def _complex(spectrum: Spectrum) -> str:
    real, imaginary = spectrum.dominating
    return f"{real:.3f}" if abs(imaginary) < 5e-4 else f"{real:.3f}±{abs(imaginary):.3f}i"


def _plane(layer: LayerInspection, rho_ac: float | None) -> dict[str, Any]:
    assert layer.plain is not None
    traces = []
    if layer.folded is not None and layer.folded.eigenvalues:
        traces.append(_points(layer.folded, "with norm folded in", "var(--soft)", "x-thin-open", 5))
    if layer.plain.eigenvalues:
        traces.append(_points(layer.plain, "H", "var(--ink)", "circle-open", 6))
    real, imaginary = layer.plain.dominating
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "dominating",
            "x": rounded([real, real]),
            "y": rounded([imaginary, -imaginary]),
            "marker": {"color": "var(--ink)", "symbol": "diamond", "size": 10},
        }
    )
    traces.append(_circle(layer.plain.rho_dc, f"|1 + λ| = ρ_dc = {layer.plain.rho_dc:.3f}", "var(--smooth)", "solid"))
    words = f"{layer_name(layer)}: ρ_dc {layer.plain.rho_dc:.3f}"
    if rho_ac is not None:
        traces.append(_circle(rho_ac, f"|1 + λ| = ρ_ac = {rho_ac:.3f}", "var(--sharpen)", "dash"))
        words += f", ρ_ac {rho_ac:.3f}"
    return {"traces": traces, "words": words}


def _points(spectrum: Spectrum, name: str, colour: str, symbol: str, size: int) -> dict[str, Any]:
    values = spectrum.eigenvalues or ()
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": rounded([value[0] for value in values]),
        "y": rounded([value[1] for value in values]),
        "marker": {"color": colour, "symbol": symbol, "size": size, "opacity": 0.75, "line": {"width": 1.2}},
        "hovertemplate": "λ = %{x} + %{y} i<extra></extra>",
    }


def _circle(radius: float, name: str, colour: str, dash: str) -> dict[str, Any]:
    turn = [2 * math.pi * k / 120 for k in range(121)]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": rounded([radius * math.cos(t) - 1 for t in turn]),
        "y": rounded([radius * math.sin(t) for t in turn]),
        "line": {"color": colour, "dash": dash, "width": 2},
        "hoverinfo": "skip",
    }


def _plane_layout(layers: Sequence[LayerInspection]) -> dict[str, Any]:
    reach = max(layer.plain.rho_dc for layer in layers if layer.plain) * 1.08
    return {
        "height": 460,
        "xaxis": {"title": {"text": "Re λ"}, "range": [-1 - reach, reach - 1], "constrain": "domain"},
        "yaxis": {"title": {"text": "Im λ"}, "scaleanchor": "x", "range": [-reach, reach]},
    }


def _unreadable(inspection: Inspection) -> list[Block]:
    return [
        Words(text=f"{layer_name(layer)} could not be read: {layer.unreadable}.", kind="note")
        for layer in inspection.layers
        if layer.unreadable
    ]


def heads_section(inspection: Inspection, exponents: dict[tuple[str, int, int], float]) -> PageSection | None:
    """Layer by head: the head's own exponent where it is predicted, otherwise log rho_dc from weights."""
    layers = [layer for layer in inspection.layers if layer.heads]
    if not layers:
        return None
    predicted = bool(exponents)
    z = [
        [
            exponents.get((layer.stack, layer.layer, head.head)) if predicted else -math.log(head.rho_dc)
            for head in layer.heads
        ]
        for layer in layers
    ]
    kind = (
        "predicted exponent of the head alone" if predicted else "-log ρ_dc of the head's weights (uniform attention)"
    )
    return PageSection(
        id="heads",
        title="Heads",
        lead="Blue smooths, orange sharpens, if this head acted alone.",
        blocks=[
            Plot(
                id="head-map",
                figure=_head_map(layers, z),
                caption=f"Each cell is the {kind}.",
                alt=f"Heat map of layers by heads: {kind}.",
            )
        ],
    )


def _head_map(layers: Sequence[LayerInspection], z: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """The same distance from zero in the same strength of colour."""
    reach = max((abs(value) for row in z for value in row if value is not None), default=1.0) or 1.0
    return heat_map(
        [layer_name(layer) for layer in layers],
        z,
        bounds=(-reach, reach),
        colours=((0.0, "var(--smooth)"), (0.5, "var(--panel)"), (1.0, "var(--sharpen)")),
        title="exponent",
    )


def norms_section(inspection: Inspection) -> PageSection | None:
    """Signs and sizes of normalization weights."""
    rows = [
        {
            "layer": layer_name(layer),
            "norm": norm.role.replace("_", " "),
            "kind": norm.kind,
            "share below 0": norm.negative_share,
            "smallest": norm.smallest,
            "largest": norm.largest,
        }
        for layer in inspection.layers
        for norm in layer.norms
    ]
    if not rows:
        return None
    negative = [row for row in rows if row["share below 0"]]
    words = (
        f"{len(negative)} of {len(rows)} norms have negative weights. A negative weight flips the sign of a channel "
        "before the value map, and with it whether that channel smooths or sharpens."
        if negative
        else f"All weights of all {len(rows)} norms are positive, so they cannot flip the sign of any channel."
    )
    return PageSection(
        id="norms", title="Signs of the norm weights", lead=words, blocks=[table_of("norm-signs", "Norm weights", rows)]
    )


# --- the part of a report that a prediction fills: regimes, the ladder of explanation, what-ifs, verdicts ---

DIRECTION_WORDS = {"smoothing": "▼ smooths", "sharpening": "▲ sharpens", "no clear change": "≈ no clear change"}
"""What one pass was seen to do."""
REGIME_WORDS = {
    "smoothing": "would smooth if repeated",
    "sharpening": "would sharpen if repeated",
    "neutral": "would neither smooth nor sharpen if repeated",
    "undecided": "if repeated: undecided",
    "mixed": "if repeated: depends on the input",
}
"""What infinite repetition would do."""
RUNG_WORDS = {
    0: "infinite repetition: the theorem",
    1: "one step, isotropic features",
    2: "+ the real features",
    3: "+ coupling of differences into the mean",
    4: "+ biases",
    5: "+ each token's own scale: exact without gains",
    6: "+ each token's own gains: exact",
}
LABEL = 0.09
"""Share of the axis that the number at a bar takes up."""
LEAK_WORDS = (
    "The leak says how much of what all tokens share is turned into differences, because a gate, a sink or a norm on heads "
    "lets every token write with a gain of its own; it works against smoothing."
)


def place_name(layer: LayerPrediction) -> str:
    name = f"{layer.stack} {layer.layer}" if layer.stack else f"layer {layer.layer}"
    return name if layer.depth == layer.layer + 1 else f"{name}, pass {layer.depth}"


def regime_strip(prediction: Prediction) -> Strip:
    """One tile per layer: what one pass was seen to do, and in a line of its own what repetition would do."""
    items = []
    for layer in prediction.layers:
        tone = layer.direction if layer.direction in ("smoothing", "sharpening") else "neutral"
        items.append(
            StripItem(
                title=place_name(layer),
                word=DIRECTION_WORDS.get(layer.direction, "not measured"),
                tone=tone,
                lines=(_measured_words(layer), REGIME_WORDS[layer.regime]),
                short_title=short_place(layer.stack, layer.layer),
                short_word=_short_word(layer),
            )
        )
    return Strip(
        label="What one pass of each layer's attention was seen to do to log(HFC/LFC), and what repeating it would do",
        items=tuple(items),
    )


def _short_word(layer: LayerPrediction) -> str:
    if layer.measured is None:
        return "no value"
    return f"{DIRECTION_WORDS.get(layer.direction, '')[:1]} {signed(layer.measured)}".strip()


def _measured_words(layer: LayerPrediction) -> str:
    if layer.measured is None:
        return "no value"
    if layer.measured_interval is None:
        return f"measured {signed(layer.measured)}"
    low, high = layer.measured_interval
    return f"measured {signed(layer.measured)} ({signed(low)} to {signed(high)})"


def rho_ac_by_layer(prediction: Prediction) -> dict[tuple[str, int], float]:
    """`rho_ac` of the plain map, of the first pass through each block."""
    found: dict[tuple[str, int], float] = {}
    for layer in prediction.layers:
        found.setdefault((layer.stack, layer.layer), layer.plain.rho_ac)
    return found


def head_exponents(prediction: Prediction) -> dict[tuple[str, int, int], float]:
    found: dict[tuple[str, int, int], float] = {}
    for layer in prediction.layers:
        for head in layer.heads:
            if head.exponent is not None:
                found.setdefault((layer.stack, layer.layer, head.head), head.exponent)
    return found


def ladder_section(prediction: Prediction, residuals: Mapping[str, str]) -> PageSection:
    """From the theorem to the measurement, layer by layer, and how well each rung agrees over all layers.

    `residuals` is the residual form of every stack, which says what known models a layer is compared with.
    """
    layout = _ladder_layout(prediction)
    steps = [_ladder(layer, layout["yaxis"]["range"]) for layer in prediction.layers]
    blocks: list[Block] = []
    if steps:
        blocks.append(
            Plot(
                id="ladder",
                figure={"steps": steps, "layout": layout},
                caption=(
                    "Each bar adds one thing to the one before it; the last is computed from weights and attention "
                    "with everything in, and equals the measurement (dashed). The longest jump names what matters."
                ),
                alt="Bar chart of the rungs for one layer, with the measured change as a line; the table has all.",
                slider=Slider(count=len(steps), first=steps[0]["words"]),
            )
        )
    blocks.append(table_of("ladder-table", "The ladder of every layer", _ladder_rows(prediction, residuals)))
    if words := range_words("exponent", list(residuals.values())):
        blocks.append(Words(text=words.replace("the exponent", "the exponent (rung 0)")))
    if any(layer.leak for layer in prediction.layers):
        blocks.append(Words(text=LEAK_WORDS))
    blocks.append(Words(text="How well each rung agrees with the measurement, over all layers:"))
    blocks.append(table_of("agreement", "Agreement of each rung", _agreement_rows(prediction)))
    return PageSection(
        id="ladder-section",
        title="From the theorem to the measurement",
        lead=(
            "The theorem speaks of infinitely many repetitions of one layer. What one real layer does to real features "
            "is something else; every step between the two is computed, so the difference has a name."
        ),
        blocks=blocks,
    )


def _ladder_rows(prediction: Prediction, residuals: Mapping[str, str]) -> list[dict[str, Any]]:
    ranges = {stack: known_range("exponent", residual) for stack, residual in residuals.items()}
    leaks = any(layer.leak for layer in prediction.layers)
    longest = max((len(layer.rungs) for layer in prediction.layers), default=0)
    return [
        {
            "layer": place_name(layer),
            "one pass": layer.direction or "not measured",
            "measured": layer.measured,
            **({"leak": layer.leak} if leaks else {}),
            "if repeated": layer.regime,
            "rung 0": layer.rungs[0].mean if layer.rungs else None,
            "known range of rung 0": known.cell if (known := ranges.get(layer.stack)) else "",
            **dict.fromkeys((f"rung {k}" for k in range(1, longest)), None),
            **{f"rung {rung.rung}": rung.mean for rung in layer.rungs[1:]},
            "carried by": layer.carries or "",
            "right from rung": layer.explained_from,
        }
        for layer in prediction.layers
    ]


def _agreement_rows(prediction: Prediction) -> list[dict[str, Any]]:
    return [
        {
            "stack": item.stack,
            "rung": f"{item.rung} {item.name}",
            "uses": RUNG_WORDS[item.rung],
            "right sign": item.sign_agreement,
            "rank correlation": item.rank_correlation,
            "mean error": item.mean_error,
        }
        for item in prediction.agreements
    ]


def _label_side(value: float, measured: float | None, span: float) -> str:
    """Behind the end of a bar, unless the line of the measurement would strike the label out and the bar has room for it."""
    beyond = None if measured is None else math.copysign(1.0, value) * (measured - value)
    is_struck = beyond is not None and 0.005 * span < beyond < LABEL * span
    return "inside" if is_struck and abs(value) > LABEL * span else "outside"


def _ladder(layer: LayerPrediction, axis: Sequence[float]) -> dict[str, Any]:
    known = [rung for rung in layer.rungs if rung.mean is not None]
    values = [rung.mean or 0.0 for rung in known]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "x": [f"{rung.rung} {rung.name}" for rung in known],
            "y": rounded(values),
            "text": [signed(value, 3) for value in values],
            "textposition": [_label_side(value, layer.measured, axis[1] - axis[0]) for value in values],
            "insidetextanchor": "end",
            "insidetextfont": {"color": "var(--panel)"},
            "textangle": 0,
            "constraintext": "none",
            "cliponaxis": False,
            "marker": {"color": ["var(--smooth)" if value < 0 else "var(--sharpen)" for value in values]},
            "showlegend": False,
            "hovertext": [RUNG_WORDS[rung.rung] for rung in known],
        }
    ]
    if layer.measured is not None:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"measured {signed(layer.measured, 3)}",
                "x": [f"{rung.rung} {rung.name}" for rung in known],
                "y": rounded([layer.measured] * len(known)),
                "line": {"color": "var(--ink)", "dash": "dash", "width": 1.5},
            }
        )
    carried = f"; the step that matters most: {layer.carries}" if layer.carries else ""
    did = DIRECTION_WORDS.get(layer.direction, "not measured")
    return {"traces": traces, "words": f"{place_name(layer)}: {did}; {REGIME_WORDS[layer.regime]}{carried}"}


def _ladder_layout(prediction: Prediction) -> dict[str, Any]:
    values = [rung.mean for layer in prediction.layers for rung in layer.rungs if rung.mean is not None]
    values += [layer.measured for layer in prediction.layers if layer.measured is not None]
    low, high = min([0.0, *values]), max([0.0, *values])
    margin = 0.14 * (high - low or 1.0)
    return {
        "height": 360,
        "xaxis": {},
        "yaxis": {"title": {"text": "Δ log(HFC/LFC)"}, "range": [low - margin, high + margin]},
    }


def what_if_section(prediction: Prediction) -> PageSection | None:
    """Each change beside the layer as it is."""
    longest = max((len(layer.rungs) for layer in prediction.layers), default=0)
    rows = [
        {
            "layer": f"{row['stack']} {row['layer']}".strip(),
            "what if": row["what_if"],
            "if repeated": row["regime"] or "",
            "ρ_dc": row["rho_dc"],
            "ρ_ac": row["rho_ac"],
            **{f"rung {k}": row.get(f"rung_{k}") for k in range(longest)},
            "note": row["not_applicable"] or "",
        }
        for row in prediction.what_if_rows()
    ]
    if len(rows) <= len(prediction.layers):
        return None
    return PageSection(
        id="what-if",
        title="What if?",
        lead="The same features and attention through a changed layer, without touching the model.",
        blocks=[table_of("what-if-table", "What-if predictions", rows)],
    )


def verdict_section(prediction: Prediction) -> PageSection:
    """What is proved, what is computed at the measured attention, what is only observed."""
    blocks: list[Block] = [
        Words(text=item.text[:1].upper() + item.text[1:], mark=item.basis) for item in prediction.verdict
    ]
    blocks += [Words(text=problem, kind="note") for problem in prediction.problems]
    rows = [
        {"layer": place_name(layer), "statement": item.text, "known how": item.basis}
        for layer in prediction.layers
        for item in layer.verdict
    ]
    if rows:
        blocks.append(table_of("verdicts", "Verdict of every layer", rows))
    return PageSection(id="verdict", title="Verdict, part by part", blocks=blocks)
