"""The pages of training runs and of series of checkpoints."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from statistics import mean
from typing import Any

from oversmooth.output.blocks import Block, Page, PageSection, Pair, Plot, Words, table_of
from oversmooth.output.compare_page import GRID, Curve, curve_of
from oversmooth.output.measured_sections import AXIS_TITLES
from oversmooth.output.theory_sections import rounded
from oversmooth.results import Analysis, Measurement
from oversmooth.results.base import signed
from oversmooth.results.runs import Point, RunGroup, TrainedRun, grouped, run_names
from oversmooth.results.wording import NAMES, Highlight

# --- curves over training, from the JSONL file that the monitor writes ---

NAME = re.compile(r"smoothing/(?P<stack>[^/]+/)?(?P<metric>[^/]+)/(?:depth|layer)_(?P<place>\d+)")
TITLES = {
    "cosine": "mean cosine between tokens",
    "hfc_lfc": "HFC / LFC",
    "rho_dc": "ρ_dc of H",
    "min_real": "smallest Re λ",
    "max_real": "largest Re λ",
}


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
        sections=(PageSection(id="curves", blocks=blocks), PageSection(id="numbers", title="Numbers", blocks=[table])),
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


# --- training runs as values, and their curves over steps: a line per variant, seeds as a band ---

COLOURS = ("var(--series-1)", "var(--series-2)", "var(--series-3)", "var(--series-4)")
DASHES = ("solid", "dash", "dot", "dashdot")
BANDS = "Bands reach from the smallest to the largest of the seeds."
FEW = 40
"""Points up to which a line has markers."""


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


# --- whether a controlled run ended as its variant intends, and if not, why: who works against it ---

PLAIN = "vanilla"
WITHIN = 2.0
"""Standard errors over sequences within which two single runs count as equal."""


@dataclass(frozen=True, slots=True)
class End:
    """The mean cosine where a model ends, over its seeds or, of a single run, over its sequences."""

    mean: float
    low: float
    high: float


def end_of(group: RunGroup) -> End | None:
    """Behind the final norm where there is one, otherwise behind the last layer."""
    found = [point for run in group.runs if run.analysis and (point := _last(run.analysis.measurement)) is not None]
    if not found:
        return None
    values = [value for value, _ in found]
    if len(values) > 1:
        return End(mean(values), min(values), max(values))
    reach = WITHIN * found[0][1]
    return End(values[0], values[0] - reach, values[0] + reach)


def _last(measurement: Measurement | None) -> tuple[float, float] | None:
    if measurement is None or not measurement.values:
        return None
    point = measurement.final("cosine") or next(reversed(measurement.curve("cosine")), None)
    return None if point is None or point.mean is None else (point.mean, point.standard_error or 0.0)


def intention_words(groups: Sequence[RunGroup]) -> list[str]:
    """A sentence or two for every variant that intends something, compared with the plain runs among the others."""
    plain = next((group for group in groups if group.runs[0].variant == PLAIN), None)
    return [words for group in groups if group.runs[0].intends and (words := _judged(group, plain))]


def _judged(group: RunGroup, plain: RunGroup | None) -> str:
    if plain is None:
        return f"{group.said} intends {group.runs[0].intends}; whether it did needs a {PLAIN} run beside it."
    end, other = end_of(group), end_of(plain)
    if end is None or other is None:
        missing = "not every run has finished and been analysed, so nothing is judged yet"
        return f"{group.said} intends {group.runs[0].intends}; {missing}."
    numbers = f"mean cosine {end.mean:.2f} at the output, {plain.said} {other.mean:.2f}"
    if end.low <= other.high and other.low <= end.high:
        return (
            f"{group.said} ended where {plain.said} did, within what {_spread_words(group, plain)} differ: {numbers}."
        )
    if (end.mean > other.mean) == (group.runs[0].intends == "smoothing"):
        return f"{group.said} ended as intended: {numbers}."
    why = " ".join(part for part in (_who_words(group, plain), _scale_words(group)) if part)
    return f"{group.said} ended against its intention ({group.runs[0].intends}): {numbers}. {why}".strip()


def _spread_words(*groups: RunGroup) -> str:
    return "seeds" if any(len(group.runs) > 1 for group in groups) else "sequences"


def _who_words(group: RunGroup, plain: RunGroup) -> str:
    """The kind of sub-block that pulls most against the intention, compared with the plain runs."""
    mine, others = kind_changes(group), kind_changes(plain)
    sign = -1.0 if group.runs[0].intends == "smoothing" else 1.0
    against = {kind: sign * (mine[kind] - others.get(kind, 0.0)) for kind in mine}
    if not against:
        return ""
    kind = min(against, key=against.__getitem__)
    if against[kind] >= 0:
        return ""
    own = mine.get("attention")
    attention = f", while its attention changes {signed(own)}" if own is not None and kind != "attention" else ""
    name = NAMES.get(kind, kind)
    return (
        f"Against it works {name}: log(HFC/LFC) at unit length changes by {signed(mine[kind])} there, and by "
        f"{signed(others.get(kind, 0.0))} in {plain.said}{attention}."
    )


def kind_changes(group: RunGroup) -> Mapping[str, float]:
    """What every kind of sub-block changes, mean over the seeds."""
    each = [_kinds(run.analysis) for run in group.runs if run.analysis]
    names = dict.fromkeys(name for kinds in each for name in kinds)
    return {name: mean(kinds[name] for kinds in each if name in kinds) for name in names}


def _kinds(analysis: Analysis) -> dict[str, float]:
    if analysis.measurement is None or not analysis.measurement.shown_attributions:
        return {}
    return {kind.part: kind.change for kind in analysis.measurement.shown_attributions[0].kinds}


def token_scale(group: RunGroup) -> float | None:
    """What the norms divide tokens by before attention, mean over layers and seeds."""
    scales = [
        layer.scale
        for run in group.runs
        if run.analysis and run.analysis.prediction
        for layer in run.analysis.prediction.layers
        if layer.scale is not None
    ]
    return mean(scales) if scales else None


def _scale_words(group: RunGroup) -> str:
    """How much a norm takes from eigenvalues that are kept without regard to it."""
    scale, kept = token_scale(group), group.runs[0].eigenvalues
    if scale is None or not kept or scale < 1.5:
        return ""
    comma = "" if kept.endswith("]") else ","
    return (
        f"Its {kept}{comma} act divided by the token scale, {scale:.1f} on average, so that attention has that much less "
        "to say beside the skip connection."
    )


# --- pages of training runs: one that is watched, or several side by side with what became of them ---

FOOTER = "Made by oversmooth. This page needs no network and sends nothing anywhere."
SHOWN = 3
"""Variants that the headline has room for."""
ACCURACY = ("eval_accuracy", "test_accuracy")


def runs_page(runs: Sequence[TrainedRun]) -> Page:
    """Several runs: what became of them, whether they ended as intended, and their curves."""
    groups = grouped(runs)
    finished = [group for group in groups if any(run.analysis for run in group.runs)]
    blocks: list[Block] = list(_paired(figures_over_steps(runs)))
    sections = [PageSection(id="steps", title="Over training", blocks=blocks)]
    if finished:
        sections.insert(0, PageSection(id="depth", blocks=[_depth_pair(finished)]))
    sections.append(
        PageSection(id="runs", title="Runs", blocks=[table_of("runs-table", "Every run", _rows(runs, groups))])
    )
    return Page(
        title="oversmooth: " + " / ".join(group.name for group in groups),
        eyebrow=" / ".join(dict.fromkeys(run.recipe for run in runs)),
        verdict=_ends_words(groups),
        findings=tuple(Highlight(text=text, section="runs", title="Runs") for text in intention_words(groups)),
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
        sections=(PageSection(id="steps", blocks=blocks),),
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


# --- A series of checkpoints on one page: curves and spectra over training ---

METRICS = ("cosine", "hfc_lfc")
SPECTRA = ("rho_dc", "min_real", "max_real")


def series_page(target: str, numbers: Sequence[int], analyses: Sequence[Analysis], warnings: Sequence[str]) -> Page:
    """The numbers of every step as a run that was watched, with warnings about its weights in front."""
    points = [_checkpoint_point(number, analysis) for number, analysis in zip(numbers, analyses, strict=True)]
    page = training_page(PurePath(target), points)
    notes: list[Block] = [Words(text=warning, kind="note") for warning in warnings]
    notes += [
        Words(text=f"Step {number}: {missing.field} is missing. {missing.reason}", kind="note")
        for number, analysis in zip(numbers, analyses, strict=True)
        for missing in analysis.missing
    ]
    if not notes:
        return page
    verdict = page.verdict
    if warnings:
        verdict += f" {len(warnings)} of {len(numbers)} steps are not what their names say; see below."
    return replace(page, verdict=verdict, sections=(PageSection(id="integrity", blocks=notes), *page.sections))


def _checkpoint_point(number: int, analysis: Analysis) -> Point:
    """One step under the names that the monitor uses."""
    point: Point = {"step": number}
    measurement = analysis.measurement
    if measurement is not None:
        for metric in METRICS:
            for stack in dict.fromkeys(value.stack for value in measurement.values):
                prefix = f"{stack}/" if stack else ""
                for value in measurement.curve(metric, stack):
                    if value.mean is not None:
                        point[f"smoothing/{prefix}{metric}/depth_{value.depth}"] = value.mean
    for layer in analysis.inspection.layers:
        prefix = f"{layer.stack}/" if layer.stack else ""
        for name in SPECTRA if layer.plain is not None else ():
            point[f"smoothing/{prefix}{name}/layer_{layer.layer}"] = getattr(layer.plain, name)
    return point
