"""The comparisons of a claim as a picture: effects with their 95% intervals, over bands of differences that do not matter."""

from collections.abc import Mapping, Sequence
from typing import Any

from oversmooth.output.report.blocks import Plot
from oversmooth.training.reproduce.materials import Row

ROW_PIXELS = 46
"""For a line of words and the interval below it."""
CLEAR, EQUAL, OPEN = "clear by itself", "no difference larger than the margin", "undecided"
STYLES = {
    CLEAR: {"symbol": "circle", "color": "var(--series-1)"},
    EQUAL: {"symbol": "diamond", "color": "var(--series-3)"},
    OPEN: {"symbol": "circle-open", "color": "var(--neutral)"},
}
"""Of the marker, by what a comparison came to."""


def effects_plot(id: str, rows: Sequence[Row]) -> tuple[Plot, ...]:
    """One picture of all comparisons that were run, the first at the top; none where none was."""
    there = [row for row in rows if row["effect"] is not None]
    if not there:
        return ()
    heights = {row["comparison"]: len(there) - position for position, row in enumerate(there)}
    clear = sum(_kind(row) == CLEAR for row in there)
    figure = {
        "traces": [
            _trace(kind, found, heights) for kind in STYLES if (found := [row for row in there if _kind(row) == kind])
        ],
        "layout": {
            "height": 90 + ROW_PIXELS * len(there),
            "xaxis": {"title": {"text": "effect"}, "zeroline": True},
            "yaxis": {"showticklabels": False, "showgrid": False, "range": [0.4, len(there) + 0.8], "zeroline": False},
            "shapes": [_margin(row, heights[row["comparison"]]) for row in there],
            "annotations": [_words(name, height) for name, height in heights.items()],
            "margin": {"l": 12, "r": 12, "t": 14, "b": 44},
        },
    }
    plot = Plot(
        id=id,
        figure=figure,
        caption="Effects with 95% intervals over paired units; the bands are the margins.",
        alt=f"Effects and 95% intervals of {len(there)} comparisons, {clear} of them clear by themselves; the table "
        "below has the same numbers.",
    )
    return (plot,)


def _kind(row: Row) -> str:
    return CLEAR if row["outcome"] in ("higher", "lower") else str(row["outcome"])


def _trace(kind: str, rows: Sequence[Row], heights: Mapping[str, int]) -> dict[str, Any]:
    reach = [round(row["high"] - row["effect"], 4) for row in rows]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": kind,
        "x": [row["effect"] for row in rows],
        "y": [heights[row["comparison"]] for row in rows],
        "error_x": {"type": "data", "array": reach, "color": STYLES[kind]["color"]},
        "marker": {"size": 9, **STYLES[kind]},
        "text": [row["comparison"] for row in rows],
        "hovertemplate": "%{text}<br>%{x:+.3f} ± %{error_x.array:.3f}<extra></extra>",
    }


def _margin(row: Row, height: int) -> dict[str, Any]:
    return {
        "type": "rect",
        "layer": "below",
        "x0": -row["margin"],
        "x1": row["margin"],
        "y0": height - 0.28,
        "y1": height + 0.28,
        "fillcolor": "var(--grid)",
        "line": {"width": 0},
    }


def _words(name: str, height: int) -> dict[str, Any]:
    """Above the interval, from the left edge: beside it a narrow screen would have no room for both."""
    place = {"xref": "paper", "x": 0, "xanchor": "left", "y": height, "yanchor": "bottom", "yshift": 8}
    return {**place, "text": name, "showarrow": False, "font": {"size": 12}}
