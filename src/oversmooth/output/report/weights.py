"""The part of a report that weights alone can fill: eigenvalues, heads, norm signs."""

import math
from collections.abc import Sequence
from typing import Any

from oversmooth.output.numbers import NOTHING
from oversmooth.output.reference import known_range, range_words
from oversmooth.output.report.blocks import Block, Plot, Section, Slider, Words, table_of
from oversmooth.output.report.heat_map import heat_map
from oversmooth.results import Inspection, LayerInspection, Spectrum

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


def spectra_section(inspection: Inspection, rho_ac: dict[tuple[str, int], float]) -> Section:
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
    return Section(
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


def heads_section(inspection: Inspection, exponents: dict[tuple[str, int, int], float]) -> Section | None:
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
    return Section(
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


def norms_section(inspection: Inspection) -> Section | None:
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
    return Section(
        id="norms", title="Signs of the norm weights", lead=words, blocks=[table_of("norm-signs", "Norm weights", rows)]
    )
