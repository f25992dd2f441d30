"""The page that compares several analyses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oversmooth.output.blocks import Block, Page, PageSection, Pair, Plot, Words, table_of
from oversmooth.output.measured_sections import AXIS_TITLES
from oversmooth.output.theory_sections import rounded
from oversmooth.results import Analysis, PlaceValue, TaskLoss
from oversmooth.results.base import signed
from oversmooth.results.measurement import OutputDrift
from oversmooth.results.wording import Highlight

# --- what models cost, beside what they do to features: the part of a comparison that losses fill ---

Found = TaskLoss | str
"""A loss, or why there is none."""


def losses_section(names: Sequence[str], analyses: Sequence[Analysis], losses: Sequence[Found]) -> PageSection:
    """A row per model: its loss and its features, each also as the difference to the first model."""
    rows = []
    first = losses[0]
    for name, analysis, found in zip(names, analyses, losses, strict=True):
        if isinstance(found, str):
            continue
        cosine, before = _last_cosine(analysis), _last_cosine(analyses[0])
        is_comparable = isinstance(first, TaskLoss) and first.task == found.task
        rows.append(
            {
                "model": name,
                "task": found.task,
                "loss": found.found.loss,
                "±": found.found.standard_error,
                "perplexity": found.found.perplexity,
                "accuracy": found.found.accuracy,
                "loss grows by": found.found.loss - first.found.loss
                if is_comparable and isinstance(first, TaskLoss)
                else None,
                "mean cosine": cosine,
                "cosine moves by": None if cosine is None or before is None else cosine - before,
            }
        )
    reasons = [
        Words(text=f"{name} has no loss: {found}", kind="note")
        for name, found in zip(names, losses, strict=True)
        if isinstance(found, str)
    ]
    return PageSection(
        id="losses",
        title="What it costs",
        lead=losses_words(names, analyses, losses),
        blocks=[*reasons, *([table_of("losses-table", "Loss beside features", rows)] if rows else [])],
    )


def losses_words(names: Sequence[str], analyses: Sequence[Analysis], losses: Sequence[Found]) -> str:
    """How far each model moved the cosine of the first, and what that cost."""
    first, start = losses[0], _last_cosine(analyses[0])
    told = []
    for name, analysis, found in list(zip(names, analyses, losses, strict=True))[1:]:
        cosine = _last_cosine(analysis)
        if isinstance(found, str) or isinstance(first, str) or found.task != first.task:
            continue
        growth = found.found.loss - first.found.loss
        cost = f"its loss is {abs(growth):.3g} {'higher' if growth > 0 else 'lower'}"
        if start is not None and cosine is not None:
            told.append(f"{name} ends {cosine - start:+.3f} in mean cosine, and {cost}")
        else:
            told.append(f"{name}: {cost}")
    return "; ".join(told) + ("." if told else "")


def _last_cosine(analysis: Analysis) -> float | None:
    curve = analysis.measurement.curve("cosine") if analysis.measurement is not None else []
    return curve[-1].mean if curve else None


# --- several analyses on one page: aligned by relative depth, differences with error bars ---

GRID = tuple(k / 10 for k in range(11))
"""Relative depths at which models of different depth are compared; values between layers are interpolated."""
RANDOM = "random ids"
"""The origin of data that were drawn, where a model has no tokenizer."""
COLOURS = ("var(--series-1)", "var(--series-2)", "var(--series-3)", "var(--series-4)")
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over relative depth: 0 is the embedding, 1 the last block."""

    depth: list[float]
    mean: list[float]
    error: list[float]
    has_errors: bool = True
    """False where one sequence was measured, which has no standard error."""

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
        blocks += _notes(name, analysis)
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
            Highlight(text=drift_words(names[0], name, drift), section="outputs", title="Outputs")
            for name, drift in known
        ),
        verdict=_verdict(measured) or "Weights compared; nothing was measured.",
        facts=tuple(
            (name, f"{len(a.inspection.layers)} layers, weights {a.inspection.provenance.weights_sha256[:12]}")
            for name, a in zip(names, analyses, strict=True)
        ),
        sections=(PageSection(id="top", blocks=blocks), *sections),
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
        has_errors=all(point.standard_error is not None for point in points),
    )


def _verdict(measured: Sequence[tuple[str, Analysis]]) -> str:
    """How mean cosine changes over depth in each, with both ends, and whether the others change more than the first."""
    if len(measured) < 2:
        return ""
    curves = {name: curve_of(analysis, "cosine") for name, analysis in measured}
    first, *others = curves
    changes = [
        f"by {signed(curve.mean[-1] - curve.mean[0])} in {name} (from {curve.mean[0]:.2f} to {curve.mean[-1]:.2f})"
        for name, curve in curves.items()
    ]
    lead = f"{_inputs(measured)}mean cosine changes over depth {', '.join(changes[:-1])} and {changes[-1]}"
    judged = "; ".join(text for name in others if (text := _judged(name, curves[name], first, curves[first])))
    return f"{lead[:1].upper()}{lead[1:]}{': ' if judged else ''}{judged}."


def _judged(name: str, own: Curve, first: str, other: Curve) -> str:
    """Which of two changes more; empty where one of them rests on a single sequence."""
    if not own.has_errors or not other.has_errors:
        return ""
    change = own.mean[-1] - own.mean[0]
    difference = change - (other.mean[-1] - other.mean[0])
    error = math.hypot(own.error[0], own.error[-1], other.error[0], other.error[-1])
    if abs(difference) <= 2 * error:
        return f"{name} changes about as much as {first}"
    more = (difference > 0) == (change > 0)
    return f"{name} {'smooths' if change > 0 else 'sharpens'} {'more' if more else 'less'} than {first}"


def _inputs(measured: Sequence[tuple[str, Analysis]]) -> str:
    """Which models ran on random token ids; empty where none did."""
    drawn = [name for name, a in measured if a.measurement and a.measurement.data.origin == RANDOM]
    if not drawn:
        return ""
    which = "" if len(drawn) == len(measured) else f" for {' and '.join(drawn)} only, so that the inputs differ"
    return f"On random token ids{which}: "


def _notes(name: str, analysis: Analysis) -> list[Block]:
    """What is missing of one model, and what makes its numbers say less than they seem to."""
    texts = [f"{missing.field} is missing. {missing.reason}" for missing in analysis.missing]
    if analysis.measurement is not None:
        texts += analysis.measurement.data.warnings
        stream = analysis.measurement.stream
        texts += [f"{stream.partial}."] if stream is not None and stream.partial else []
    return [Words(text=f"{name}: {text}", kind="note") for text in texts]


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


def _differences(measured: Sequence[tuple[str, Analysis]]) -> PageSection:
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
    return PageSection(
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


def _outputs(first: str, drifts: Sequence[tuple[str, OutputDrift]]) -> PageSection:
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
    return PageSection(
        id="outputs",
        title="Outputs",
        lead=(
            "Features behind the last block and the final norm, on the same inputs. Features may change over depth while "
            "outputs stay, and outputs may drift, or become alike between sequences, where curves look the same."
        ),
        blocks=[table_of("outputs-table", "Outputs compared", rows)],
    )


def _weights(names: Sequence[str], analyses: Sequence[Analysis]) -> PageSection:
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
    return PageSection(
        id="weights",
        title="Weights",
        blocks=[plot, table_of("compare-weights", "Weights per layer", rows)],
    )
