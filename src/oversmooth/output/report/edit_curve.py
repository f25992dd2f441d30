"""A page about one edit: loss and features over its strength, and loss against features."""

from collections.abc import Sequence
from typing import Any

from oversmooth.output.data_words import how_much
from oversmooth.output.report.blocks import Page, Pair, Plot, Section, Words, table_of
from oversmooth.output.report.weights import rounded
from oversmooth.results import EditCurve, EditPoint


def edit_curve_page(result: EditCurve) -> Page:
    """The verdict, both curves, and every number."""
    return Page(
        title=f"oversmooth: {result.change_words}",
        eyebrow=result.provenance.target,
        verdict=result.verdict,
        facts=(("change", result.change_words), ("task", result.task), ("measured on", how_much(result.data))),
        sections=(
            Section(id="top", blocks=[_curves(result)]),
            Section(
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
