"""Layers by heads, or by something else, as a heat map."""

from collections.abc import Sequence
from typing import Any

HIGHEST = 900
"""Pixels; of deep models rows become thinner."""
WIDTH_OF_NAMES = 16


def heat_map(
    rows: Sequence[str],
    z: Sequence[Sequence[float | None]],
    *,
    bounds: tuple[float, float],
    colours: Sequence[tuple[float, str]],
    title: str,
    hover: str = "%{y}, head %{x}: %{z}<extra></extra>",
    text: Sequence[Sequence[str]] | None = None,
    columns: Sequence[str] | None = None,
    across: str = "head",
) -> dict[str, Any]:
    """A cell per head, or per named column; `text` is what hovering shows where `hover` asks for it."""
    widest = max(len(row) for row in z)
    trace = {
        "type": "heatmap",
        "x": list(range(widest)) if columns is None else list(columns),
        "y": list(rows),
        "z": [[None if value is None else float(f"{value:.4g}") for value in row] for row in z],
        "zmin": bounds[0],
        "zmax": bounds[1],
        "colorscale": [list(colour) for colour in colours],
        "colorbar": {"title": {"text": title}, "thickness": 12},
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": hover,
    }
    return {
        "traces": [trace if text is None else {**trace, "text": [list(row) for row in text]}],
        "layout": {
            "height": min(HIGHEST, 130 + 24 * len(rows)),
            "xaxis": {
                "title": {"text": across},
                "dtick": max(1, widest // WIDTH_OF_NAMES),
                **({} if columns is None else {"type": "category"}),
            },
            "yaxis": {"autorange": "reversed", "type": "category"},
        },
    }
