"""Curves over training, from the JSONL file that the monitor writes."""

import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from oversmooth.errors import BrokenFile
from oversmooth.output.report.blocks import Block, Page, Plot, Section, table_of
from oversmooth.output.report.weights import rounded
from oversmooth.results.json_text import json_object
from oversmooth.results.text_files import read_text_file

NAME = re.compile(r"smoothing/(?P<stack>[^/]+/)?(?P<metric>[^/]+)/(?:depth|layer)_(?P<place>\d+)")
Point = dict[str, float | int]
TITLES = {
    "cosine": "mean cosine between tokens",
    "hfc_lfc": "HFC / LFC",
    "rho_dc": "ρ_dc of H",
    "min_real": "smallest Re λ",
    "max_real": "largest Re λ",
}


def read_run(path: Path) -> list[Point]:
    """The monitor's lines, in order of step; a last line cut off by a crash is left out."""
    points: list[Point] = []
    lines = read_text_file(path, "a JSONL file written by the monitor").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            points.append(_point(f"{path}, line {number}", line))
        except BrokenFile:
            if number == len(lines) and points:
                break
            raise
    if not points:
        raise BrokenFile(str(path), "at least one line", "none", "Train for a step first.")
    merged: dict[int, Point] = {}
    for point in points:  # a run writes its loss, its evaluation and its smoothing in lines of their own
        merged.setdefault(int(point["step"]), {}).update(point)
    return [merged[step] for step in sorted(merged)]


def _point(place: str, line: str) -> Point:
    """One line: a step, and numbers by name."""
    point = json_object(line, place, "a JSON object with a step")
    if type(point.get("step")) is not int or not 0 <= point["step"] < 2**63:
        found = f"the step {point['step']!r:.40}" if "step" in point else "none"
        raise BrokenFile(place, "a step that is a whole number", found, "Remove the line.")
    return point


def smoothing_figures(points: Sequence[Point]) -> list[Plot]:
    """One figure per metric, a line per depth or layer, dark to light."""
    return [_figure(title, list(names), points) for title, names in _metrics(points).items()]


def _metrics(points: Sequence[Point]) -> dict[str, dict[tuple[str, int], None]]:
    """Names and places of every metric of smoothing that was logged."""
    metrics: dict[str, dict[tuple[str, int], None]] = {}
    for name in dict.fromkeys(key for point in points for key in point):
        if match := NAME.fullmatch(name):
            title = (match["stack"] or "") + match["metric"]
            metrics.setdefault(title, {})[name, int(match["place"])] = None
    return metrics


def training_page(path: PurePath, points: Sequence[Point]) -> Page:
    """What a monitor wrote, or the steps of a series: smoothing over training, and every number."""
    last = points[-1]
    deepest = [name for title, names in _metrics(points).items() if title.endswith("cosine") for name, _ in names]
    verdict = "No smoothing metric was found in this run."
    if deepest:
        measured = [point[deepest[-1]] for point in points if point.get(deepest[-1]) is not None]
        if measured:
            first_value, last_value = measured[0], measured[-1]
            change = f"went from {first_value:.2f} to {last_value:.2f}"
            verdict = f"Over {last['step']} steps the mean cosine of the last layer {change}; 1 means fully smoothed."
    smoothing = [point for point in points if any(NAME.fullmatch(key) for key in point)]
    shown = smoothing or points
    names = dict.fromkeys(["step", *(key for point in shown for key in point)])
    rows = [{name: point.get(name) for name in names} for point in shown]
    table = table_of("run", "Every number of the run", rows)
    blocks: list[Block] = list(smoothing_figures(points))
    return Page(
        title=f"oversmooth: {path.name}",
        eyebrow=str(path),
        verdict=verdict,
        facts=(("measurements of smoothing", str(len(smoothing))), ("last step", str(last["step"]))),
        sections=(Section(id="curves", blocks=blocks), Section(id="numbers", title="Numbers", blocks=[table])),
        footer="Made by oversmooth. This page needs no network and sends nothing anywhere.",
    )


def _figure(title: str, names: list[tuple[str, int]], points: Sequence[Point]) -> Plot:
    ordered = sorted(names, key=lambda item: item[1])
    traces: list[dict[str, Any]] = []
    for rank, (name, place) in enumerate(ordered):
        known = [(point["step"], point[name]) for point in points if name in point]
        share = rank / max(len(ordered) - 1, 1)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(known) < 30 else "lines",
                "name": str(place),
                "x": [step for step, _ in known],
                "y": rounded([value for _, value in known]),
                "line": {"color": f"hsl(285, {20 + 45 * share:.0f}%, {68 - 30 * share:.0f}%)", "width": 2},
                "marker": {"size": 5},
            }
        )
    metric = title.rpartition("/")[2]
    line = "layer" if "/layer_" in names[0][0] else "depth"
    ends = [trace["y"][k] for trace in traces[-1:] if trace["y"] for k in (0, -1)]
    deepest = f"; the deepest goes from {ends[0]:.3g} to {ends[1]:.3g}" if ends else ""
    return Plot(
        id=f"training-{re.sub(r'[^a-z0-9]+', '-', title.lower())}",
        figure={
            "traces": traces,
            "layout": {
                "height": 320,
                "xaxis": {"title": {"text": "step"}},
                "yaxis": {"title": {"text": TITLES.get(metric, metric)}},
            },
        },
        caption=f"{TITLES.get(metric, metric)} over training; one line per {line}, pale is shallow, strong is deep.",
        alt=f"Line plot of {title} over training steps, one line per {line}{deepest}.",
    )
