"""Pages of training runs: one that is watched, or several side by side with what became of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from oversmooth.output.findings import Finding
from oversmooth.output.report.blocks import Block, Page, Pair, Plot, Section, table_of
from oversmooth.output.report.compare import GRID, Curve, curve_of
from oversmooth.output.report.features import AXIS_TITLES
from oversmooth.output.report.intention import end_of, intention_words, kind_changes, token_scale
from oversmooth.output.report.runs import (
    BANDS,
    RunGroup,
    TrainedRun,
    band,
    figures_over_steps,
    grouped,
    line_style,
    run_names,
)
from oversmooth.output.report.training import NAME, smoothing_figures
from oversmooth.output.report.weights import rounded

FOOTER = "Made by oversmooth. This page needs no network and sends nothing anywhere."
SHOWN = 3
"""Variants that the headline has room for."""
ACCURACY = ("eval_accuracy", "test_accuracy")


def runs_page(runs: Sequence[TrainedRun]) -> Page:
    """Several runs: what became of them, whether they ended as intended, and their curves."""
    groups = grouped(runs)
    finished = [group for group in groups if any(run.analysis for run in group.runs)]
    blocks: list[Block] = list(_paired(figures_over_steps(runs)))
    sections = [Section(id="steps", title="Over training", blocks=blocks)]
    if finished:
        sections.insert(0, Section(id="depth", blocks=[_depth_pair(finished)]))
    sections.append(Section(id="runs", title="Runs", blocks=[table_of("runs-table", "Every run", _rows(runs, groups))]))
    return Page(
        title="oversmooth: " + " / ".join(group.name for group in groups),
        eyebrow=" / ".join(dict.fromkeys(run.recipe for run in runs)),
        verdict=_ends_words(groups),
        findings=tuple(Finding(text=text, section="runs", title="Runs") for text in intention_words(groups)),
        facts=tuple((group.words, _state_words(group)) for group in groups),
        sections=tuple(sections),
        footer=FOOTER,
    )


def watched_page(runs: Sequence[TrainedRun]) -> Page:
    """A page of runs that may not have finished: loss, accuracy and smoothing so far."""
    if len(runs) > 1:
        return runs_page(runs)
    (run,) = runs
    blocks: list[Block] = [*_paired(figures_over_steps(runs)), *smoothing_figures(run.points)]
    return Page(
        title=f"oversmooth: {run.variant}, seed {run.seed}",
        eyebrow=run.where,
        verdict=_progress_words(run),
        facts=_counts(run),
        sections=(Section(id="steps", blocks=blocks),),
        footer=FOOTER,
    )


def _counts(run: TrainedRun) -> tuple[tuple[str, str], ...]:
    """What was logged so far, and what each number counts."""
    measured = sum(any(NAME.fullmatch(name) for name in point) for point in run.points)
    evaluated = sum("eval_loss" in point or "eval_accuracy" in point for point in run.points)
    losses = sum("loss" in point for point in run.points)
    return (
        ("recipe", run.recipe),
        ("variant", run.variant),
        ("seed", str(run.seed)),
        ("steps with a loss", str(losses)),
        ("evaluations", str(evaluated)),
        ("measurements of smoothing", str(measured)),
    )


def _progress_words(run: TrainedRun) -> str:
    """How far it is, and the last numbers."""
    of = f" of {run.steps:,}" if run.steps else ""
    lead = f"{run.variant}, seed {run.seed}: " + (
        f"finished after {run.last_step:,} steps" if run.is_finished else f"step {run.last_step:,}{of}"
    )
    numbers = []
    for key, name in (("loss", "loss"), ("eval_accuracy", "accuracy")):
        known = [point[key] for point in run.points if point.get(key) is not None]
        numbers += [f"{name} {known[-1]:.3f}"] if known else []
    return "; ".join([lead, *numbers]) + "."


def _state_words(group: RunGroup) -> str:
    done = sum(run.is_finished for run in group.runs)
    if done == len(group.runs):
        return "finished"
    steps = ", ".join(f"step {run.last_step:,} of {run.steps:,}" for run in group.runs if not run.is_finished)
    return f"{done} of {len(group.runs)} finished; {steps}"


def _ends_words(groups: Sequence[RunGroup]) -> str:
    """Accuracy and mean cosine of every variant, in two sentences; of many, between which two variants they lie."""
    accuracies = {group.said: value for group in groups if (value := _mean_result(group)) is not None}
    ends = {group.said: end.mean for group in groups if (end := end_of(group)) is not None}
    parts = [
        f"{title}: {_values_words(values, form)}"
        for title, values, form in (("Accuracy", accuracies, ".1%"), ("Mean cosine", ends, ".2f"))
        if values
    ]
    without = [group for group in groups if group.said not in ends]
    for title, is_done in (("Not finished", False), ("Not analysed", True)):
        names = [group.said for group in without if all(run.is_finished for run in group.runs) == is_done]
        if len(names) > SHOWN:
            parts.append(f"{title}: {len(names)} of {len(groups)}")
        elif names:
            parts.append(f"{title}: {', '.join(names)}")
    return ". ".join(parts) + "."


def _values_words(values: Mapping[str, float], form: str) -> str:
    if len(values) <= SHOWN:
        return ", ".join(f"{name} {value:{form}}" for name, value in values.items())
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    return f"from {values[low]:{form}} ({low}) to {values[high]:{form}} ({high})"


def _accuracy(run: TrainedRun) -> float | None:
    return next((run.results[name] for name in ACCURACY if name in run.results), None)


def _mean_result(group: RunGroup) -> float | None:
    found = [value for run in group.runs if (value := _accuracy(run)) is not None]
    return sum(found) / len(found) if found else None


def _rows(runs: Sequence[TrainedRun], groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    kinds = dict.fromkeys(kind for group in groups for kind in kind_changes(group))
    rows = []
    for name, run in zip(run_names(runs), runs, strict=True):
        alone = RunGroup(name=name, runs=(run,))
        end, changes = end_of(alone), kind_changes(alone)
        rows.append(
            {
                "run": name,
                "recipe": run.recipe,
                "steps": run.last_step,
                "of": run.steps,
                "accuracy": _accuracy(run),
                "loss": run.results.get("eval_loss"),
                "mean cosine at the output": end.mean if end else None,
                **{f"{kind}: change": changes.get(kind) for kind in kinds},
                "token scale": token_scale(alone),
                "folder": run.where,
            }
        )
    return rows


def _paired(plots: Sequence[Plot]) -> list[Block]:
    """Side by side, two and two; a last one that is left over stands alone."""
    pairs: list[Block] = [Pair(plots=(a, b)) for a, b in zip(plots[::2], plots[1::2], strict=False)]
    return [*pairs, *plots[len(pairs) * 2 :]]


# --- over depth -----------------------------------------------------------------------------------------------------


def _depth_pair(groups: Sequence[RunGroup]) -> Pair:
    cosine, ratio = (_depth_plot(groups, metric) for metric in ("cosine", "hfc_lfc"))
    return Pair(plots=(cosine, ratio))


def _depth_plot(groups: Sequence[RunGroup], metric: str) -> Plot:
    """One metric over relative depth in the trained models: a line per variant, seeds as a band."""
    traces: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        curves = [curve_of(run.analysis, metric) for run in group.runs if run.analysis and run.analysis.measurement]
        if curves:
            traces += _depth_traces(group, curves, index)
    title = AXIS_TITLES.get(metric, metric)
    several = f" {BANDS}" if any(len(group.runs) > 1 for group in groups) else ""
    return Plot(
        id=f"runs-{metric.replace('_', '-')}",
        figure={
            "traces": traces,
            "layout": {
                "height": 310,
                "xaxis": {"title": {"text": "relative depth (0 = embedding, 1 = last block)"}},
                "yaxis": {"title": {"text": title}, "rangemode": "tozero"},
            },
        },
        caption=f"{title[:1].upper()}{title[1:]} in the trained models.{several}",
        alt=f"Line plot of {title} over relative depth: {', '.join(group.words for group in groups)}.",
    )


def _depth_traces(group: RunGroup, curves: Sequence[Curve], index: int) -> list[dict[str, Any]]:
    depths = curves[0].depth if all(curve.depth == curves[0].depth for curve in curves) else list(GRID)
    values = [[curve.at(depth)[0] for curve in curves] for depth in depths]
    style = line_style(index)
    line = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": group.words,
        "x": rounded(depths),
        "y": rounded([sum(found) / len(found) for found in values]),
        "line": style,
    }
    if len(curves) < 2:
        return [line]
    return [band(rounded(depths), [min(v) for v in values], [max(v) for v in values], style["color"]), line]
