"""Several analyses on one page: aligned by relative depth, differences with error bars."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oversmooth.output.findings import Finding
from oversmooth.output.report.blocks import Block, Page, Pair, Plot, Section, Words, table_of
from oversmooth.output.report.features import AXIS_TITLES
from oversmooth.output.report.losses import Found, losses_section
from oversmooth.output.report.weights import rounded
from oversmooth.results import Analysis, PlaceValue
from oversmooth.results.output_drift import OutputDrift

GRID = tuple(k / 10 for k in range(11))
"""Relative depths at which models of different depth are compared; values between layers are interpolated."""
COLOURS = ("var(--series-1)", "var(--series-2)", "var(--series-3)", "var(--series-4)")
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over relative depth: 0 is the embedding, 1 the last block."""

    depth: list[float]
    mean: list[float]
    error: list[float]

    def at(self, depth: float) -> tuple[float, float]:
        """Mean and standard error at a relative depth, linear between layers."""
        above = next((k for k, d in enumerate(self.depth) if d >= depth - 1e-9), len(self.depth) - 1)
        below = max(above - 1, 0)
        gap = self.depth[above] - self.depth[below]
        share = (depth - self.depth[below]) / gap if gap else 0.0
        mix = [(1 - share) * series[below] + share * series[above] for series in (self.mean, self.error)]
        return mix[0], mix[1]


def names_of(analyses: Sequence[Analysis]) -> list[str]:
    """Short names that differ: the last parts of the targets, numbered where they are the same."""
    names = [analysis.inspection.provenance.target.rstrip("/").split("/")[-1] for analysis in analyses]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({index + 1})" for index, name in enumerate(names)]


def compare_page(
    analyses: Sequence[Analysis], losses: Sequence[Found] = (), drifts: Sequence[OutputDrift | None] = ()
) -> Page:
    """The first analysis is what the others are compared with.

    `losses` are those of the same models, if asked for; `drifts` are those of the others' outputs, where they were run.
    """
    names = names_of(analyses)
    measured = [(name, a) for name, a in zip(names, analyses, strict=True) if a.measurement]
    blocks: list[Block] = []
    for name, analysis in zip(names, analyses, strict=True):
        blocks += [
            Words(text=f"{name}: {missing.field} is missing. {missing.reason}", kind="note")
            for missing in analysis.missing
        ]
    sections = []
    if len(measured) > 1:
        plots = tuple(_overlay(measured, metric) for metric in ("cosine", "hfc_lfc"))
        blocks.append(Pair(plots=(plots[0], plots[1])))
        sections.append(_differences(measured))
    if losses:
        sections.insert(0, losses_section(names, analyses, losses))
    known = [(name, drift) for name, drift in zip(names[1:], drifts, strict=False) if drift is not None]
    if known:
        sections.insert(0, _outputs(names[0], known))
    sections.append(_weights(names, analyses))
    return Page(
        title="oversmooth: " + " / ".join(names),
        eyebrow=" / ".join(analysis.inspection.provenance.target for analysis in analyses),
        findings=tuple(
            Finding(text=drift_words(names[0], name, drift), section="outputs", title="Outputs")
            for name, drift in known
        ),
        verdict=_verdict(measured) or "Weights compared; nothing was measured.",
        facts=tuple(
            (name, f"{len(a.inspection.layers)} layers, weights {a.inspection.provenance.weights_sha256[:12]}")
            for name, a in zip(names, analyses, strict=True)
        ),
        sections=(Section(id="top", blocks=blocks), *sections),
        footer="Made by oversmooth. This page needs no network and sends nothing anywhere.",
    )


def curve_of(analysis: Analysis, metric: str) -> Curve:
    assert analysis.measurement is not None
    points: list[PlaceValue] = [p for p in analysis.measurement.curve(metric) if p.mean is not None]
    last = max(point.depth for point in points) or 1
    return Curve(
        depth=[point.depth / last for point in points],
        mean=[point.mean or 0.0 for point in points],
        error=[point.standard_error or 0.0 for point in points],
    )


def _verdict(measured: Sequence[tuple[str, Analysis]]) -> str:
    if len(measured) < 2:
        return ""
    ends = {name: curve_of(analysis, "cosine").at(1.0) for name, analysis in measured}
    first, *others = ends
    parts = []
    for name in others:
        difference, error = ends[name][0] - ends[first][0], math.hypot(ends[name][1], ends[first][1])
        word = "smoother than" if difference > 0 else "sharper than"
        word = "about as smooth as" if abs(difference) <= 2 * error else word
        parts.append(f"{name} ends {word} {first}: mean cosine {ends[name][0]:.2f} against {ends[first][0]:.2f}")
    return "; ".join(parts) + "."


def _overlay(measured: Sequence[tuple[str, Analysis]], metric: str) -> Plot:
    traces: list[dict[str, Any]] = []
    for index, (name, analysis) in enumerate(measured):
        curve = curve_of(analysis, metric)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": rounded(curve.depth),
                "y": rounded(curve.mean),
                "error_y": {"type": "data", "array": rounded(curve.error), "width": 3, "thickness": 1},
                "line": {"color": COLOURS[index % len(COLOURS)], "dash": DASHES[index % len(DASHES)], "width": 2.5},
            }
        )
    return Plot(
        id=f"compare-{metric.replace('_', '-')}",
        figure={
            "traces": traces,
            "layout": {
                "height": 320,
                "xaxis": {"title": {"text": "relative depth (0 = embedding, 1 = last block)"}},
                "yaxis": {"title": {"text": AXIS_TITLES.get(metric, metric)}, "rangemode": "tozero"},
            },
        },
        caption=f"{AXIS_TITLES.get(metric, metric)}; bars are one standard error over sequences.",
        alt=f"Line plot of {metric} over relative depth, one line per model; the table below has the differences.",
    )


def _differences(measured: Sequence[tuple[str, Analysis]]) -> Section:
    first_name, first = measured[0]
    rows = []
    for name, other in measured[1:]:
        for metric in ("cosine", "hfc_lfc"):
            a, b = curve_of(first, metric), curve_of(other, metric)
            for depth in GRID:
                (mean_a, error_a), (mean_b, error_b) = a.at(depth), b.at(depth)
                rows.append(
                    {
                        "compared": f"{name} minus {first_name}",
                        "metric": metric,
                        "relative depth": depth,
                        "difference": mean_b - mean_a,
                        "±": math.hypot(error_a, error_b),
                    }
                )
    return Section(
        id="differences",
        title="Differences",
        lead=(
            "At the same relative depth, interpolated between layers. ± is the standard error of the difference as if "
            "the sequences were independent, which overstates it when both saw the same data."
        ),
        blocks=[table_of("differences-table", "Differences", rows)],
    )


def drift_words(first: str, name: str, drift: OutputDrift) -> str:
    """How far the output moved, and whether sequences became more alike."""
    text = (
        f"The output of {name} is {drift.relative_distance:.0%} away from that of {first} "
        f"(mean cosine {drift.cosine:.3f} token by token)"
    )
    if drift.similarity is None or drift.other_similarity is None:
        return f"{text}."
    return (
        f"{text}; different sequences are {drift.other_similarity:.2f} alike in it, {drift.similarity:.2f} in {first}."
    )


def _outputs(first: str, drifts: Sequence[tuple[str, OutputDrift]]) -> Section:
    rows = [
        {
            "model": name,
            "relative distance": drift.relative_distance,
            "cosine to the first": drift.cosine,
            "similarity between sequences": drift.other_similarity,
            f"the same in {first}": drift.similarity,
            "sequences": drift.sequences,
            "tokens": drift.tokens,
        }
        for name, drift in drifts
    ]
    return Section(
        id="outputs",
        title="Outputs",
        lead=(
            "Features behind the last block and the final norm, on the same inputs. Features may change over depth while "
            "outputs stay, and outputs may drift, or become alike between sequences, where curves look the same."
        ),
        blocks=[table_of("outputs-table", "Outputs compared", rows)],
    )


def _weights(names: Sequence[str], analyses: Sequence[Analysis]) -> Section:
    traces = []
    for index, (name, analysis) in enumerate(zip(names, analyses, strict=True)):
        layers = [layer for layer in analysis.inspection.layers if layer.plain is not None]
        count = max(len(layers) - 1, 1)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": rounded([k / count for k in range(len(layers))]),
                "y": rounded([layer.plain.rho_dc for layer in layers if layer.plain]),
                "line": {"color": COLOURS[index % len(COLOURS)], "dash": DASHES[index % len(DASHES)], "width": 2.5},
            }
        )
    plot = Plot(
        id="compare-rho",
        figure={
            "traces": traces,
            "layout": {
                "height": 300,
                "xaxis": {"title": {"text": "relative depth"}},
                "yaxis": {"title": {"text": "ρ_dc of H"}},
            },
        },
        caption="Growth per layer of what all tokens share, from weights alone. Below 1 it shrinks.",
        alt="Line plot of rho_dc over relative depth, one line per model.",
    )
    rows = [
        {"model": name, **{key: row[key] for key in ("stack", "layer", "rho_dc", "min_real", "max_real", "tendency")}}
        for name, analysis in zip(names, analyses, strict=True)
        for row in analysis.inspection.rows()
    ]
    return Section(
        id="weights",
        title="Weights",
        blocks=[plot, table_of("compare-weights", "Weights per layer", rows)],
    )
