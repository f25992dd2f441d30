"""Training runs as values, and their curves over steps: a line per variant, seeds as a band."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oversmooth.output.report.blocks import Plot
from oversmooth.output.report.training import NAME, Point
from oversmooth.output.report.weights import rounded
from oversmooth.results import Analysis

COLOURS = ("var(--series-1)", "var(--series-2)", "var(--series-3)", "var(--series-4)")
DASHES = ("solid", "dash", "dot", "dashdot")
BANDS = "Bands reach from the smallest to the largest of the seeds."
FEW = 40
"""Points up to which a line has markers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """One run, finished or not: what it was, what it logged and what became of it."""

    where: str
    recipe: str
    variant: str
    seed: int
    settings: tuple[str, ...] = ()
    """What was set otherwise than the recipe says, as key=value."""
    intends: str = ""
    """smoothing or sharpening, for a variant that is made for it."""
    eigenvalues: str = ""
    """Where a variant keeps the eigenvalues of H, in words; empty where it does not."""
    steps: int = 0
    """As planned."""
    is_finished: bool = False
    points: Sequence[Point] = ()
    results: Mapping[str, float] = field(default_factory=dict)
    analysis: Analysis | None = None

    @property
    def last_step(self) -> int:
        return int(self.points[-1]["step"]) if self.points else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGroup:
    """The seeds of one variant."""

    name: str
    runs: tuple[TrainedRun, ...]
    short: str = ""
    """The variant alone, where no other group has it: for sentences. Empty where only the whole name tells groups apart."""

    @property
    def said(self) -> str:
        """The name in sentences."""
        return self.short or self.name

    @property
    def words(self) -> str:
        count = len(self.runs)
        what = "seeds" if len({run.seed for run in self.runs}) == count else "runs"
        return self.name + (f" ({count} {what})" if count > 1 else "")


def grouped(runs: Sequence[TrainedRun]) -> list[RunGroup]:
    """Runs by variant, in the order given; what else differs between them is named too: recipe and settings."""
    several = len({run.recipe for run in runs}) > 1
    shared = set.intersection(*(set(run.settings) for run in runs)) if runs else set()
    by_name: dict[str, list[TrainedRun]] = {}
    for run in runs:
        own = [setting for setting in run.settings if setting not in shared]
        name = ", ".join([f"{run.recipe} {run.variant}" if several else run.variant, *own])
        by_name.setdefault(name, []).append(run)
    variants = [members[0].variant for members in by_name.values()]
    return [
        RunGroup(name=name, runs=tuple(members), short=variant if variants.count(variant) == 1 and not several else "")
        for (name, members), variant in zip(by_name.items(), variants, strict=True)
    ]


def run_names(runs: Sequence[TrainedRun]) -> list[str]:
    """Variant and seed; the same ones twice are numbered."""
    names = [f"{run.variant}, seed {run.seed}" for run in runs]
    return [f"{name} ({k + 1})" if names.count(name) > 1 else name for k, name in enumerate(names)]


# --- over steps -----------------------------------------------------------------------------------------------------


def figures_over_steps(runs: Sequence[TrainedRun]) -> list[Plot]:
    """Loss, accuracy and smoothing at the output, each where any run has logged it."""
    groups = grouped(runs)
    found = []
    for title, words, key_of in (
        ("loss", "Training loss.", lambda run: "loss"),
        ("loss on held-out data", "Loss on held-out data.", lambda run: "eval_loss"),
        ("accuracy", "Accuracy on held-out data.", lambda run: "eval_accuracy"),
        ("mean cosine, last depth", "How parallel tokens leave the last layer.", _deepest("cosine")),
        ("HFC / LFC, last depth", "What differs between tokens over what they share.", _deepest("hfc_lfc")),
    ):
        traces = [trace for k, group in enumerate(groups) for trace in _group_traces(group, k, key_of)]
        if traces:
            found.append(_plot(title, words, traces, groups))
    return found


def _plot(title: str, words: str, traces: list[dict[str, Any]], groups: Sequence[RunGroup]) -> Plot:
    band = f" {BANDS}" if any(len(group.runs) > 1 for group in groups) else ""
    names = ", ".join(group.words for group in groups)
    return Plot(
        id="steps-" + re.sub(r"[^a-z]+", "-", title.lower()),
        figure={
            "traces": traces,
            "layout": {
                "height": 300,
                "xaxis": {"title": {"text": "step"}},
                "yaxis": {"title": {"text": title}},
                "showlegend": len(groups) > 1,
            },
        },
        caption=words + band,
        alt=f"Line plot of {title} over training steps: {names}.",
    )


def _deepest(metric: str) -> Callable[[TrainedRun], str]:
    """The name under which a run logs a metric of its first stack at its last depth."""

    def key(run: TrainedRun) -> str:
        matches = [
            m for point in run.points[:50] for name in point if (m := NAME.fullmatch(name)) and m["metric"] == metric
        ]
        stack = matches[0]["stack"] if matches else None
        mine = [m for m in matches if m["stack"] == stack]
        return max(mine, key=lambda m: int(m["place"])).group() if mine else ""

    return key


def series(run: TrainedRun, key: str) -> dict[int, float]:
    """What a run logged under one name, by step."""
    return {int(point["step"]): float(point[key]) for point in run.points if key in point and point[key] is not None}


def _group_traces(group: RunGroup, index: int, key_of: Callable[[TrainedRun], str]) -> list[dict[str, Any]]:
    """The mean over seeds at the steps that all of them have, and the band between the smallest and the largest."""
    each = [found for run in group.runs if (found := series(run, key_of(run)))]
    if not each:
        return []
    steps = sorted(set.intersection(*(set(found) for found in each)))
    values = [[found[step] for found in each] for step in steps]
    style = line_style(index)
    line = {
        "type": "scatter",
        "mode": "lines+markers" if len(steps) <= FEW else "lines",
        "name": group.words,
        "x": steps,
        "y": rounded([sum(found) / len(found) for found in values]),
        "line": style,
        "marker": {"size": 5},
    }
    if len(each) < 2:
        return [line]
    return [band(steps, [min(v) for v in values], [max(v) for v in values], style["color"]), line]


def line_style(index: int) -> dict[str, Any]:
    """Colour and dash of a group: the first four differ in both, the first sixteen in one of them."""
    dash = DASHES[(index + index // len(COLOURS)) % len(DASHES)]
    return {"color": COLOURS[index % len(COLOURS)], "dash": dash, "width": 2.5}


def band(x: Sequence[float | int], low: Sequence[float], high: Sequence[float], colour: str) -> dict[str, Any]:
    """What lies between two curves, behind their line."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [*x, *reversed(x)],
        "y": rounded([*high, *reversed(low)]),
        "fill": "toself",
        "fillcolor": colour,
        "opacity": 0.18,
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
    }
