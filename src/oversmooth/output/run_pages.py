"""The pages of training runs and of series of checkpoints."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from statistics import mean
from typing import Any

from oversmooth.output.blocks import Block, Page, PageSection, Words, paired, table_of
from oversmooth.output.charts import Axis, Chart, Fan, HeatMap, Line, Mark, Panel, extent, numbers
from oversmooth.output.compare_page import RELATIVE, line_style
from oversmooth.results import Analysis, Measurement
from oversmooth.results.base import short_name, signed
from oversmooth.results.runs import Point, RunGroup, TrainedRun, grouped, run_names
from oversmooth.results.wording import Highlight

# --- curves over training, from the JSONL file that the monitor writes ---

NAME = re.compile(r"smoothing/(?P<stack>[^/]+/)?(?P<metric>[^/]+)/(?:depth|layer)_(?P<place>\d+)")
TITLES = {
    "cosine": "mean cosine between tokens",
    "hfc_lfc": "HFC / LFC",
    "rho_dc": "ρ_dc of H",
    "min_real": "smallest Re λ",
    "max_real": "largest Re λ",
}


MOST_STEPS = 150
"""Columns of a heat map and points of a line; the steps between are in the table."""


def smoothing_figures(points: Sequence[Point]) -> list[HeatMap]:
    """One picture per metric: layers by steps."""
    return [_over_training(title, list(names), points) for title, names in _metrics(points).items()]


def sparse(steps: Sequence[Any], most: int = MOST_STEPS) -> list[Any]:
    """Evenly chosen, the last one always."""
    every = -(-len(steps) // most) or 1
    return [step for k, step in enumerate(steps) if (len(steps) - 1 - k) % every == 0]


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
    blocks = paired(smoothing_figures(points))
    return Page(
        title=f"oversmooth: {path.name}",
        eyebrow=path.name,
        verdict=verdict,
        facts=(("measurements of smoothing", str(len(smoothing))), ("last step", str(last["step"]))),
        sections=(PageSection(id="curves", blocks=blocks), PageSection(id="numbers", title="Numbers", blocks=[table])),
    )


def _over_training(title: str, names: list[tuple[str, int]], points: Sequence[Point]) -> HeatMap:
    known = sparse([point for point in points if any(name in point for name, _ in names)])
    ordered = sorted(names, key=lambda item: item[1])
    values = tuple(tuple(point.get(name) for point in known) for name, _ in ordered)
    metric = title.rpartition("/")[2]
    words = TITLES.get(metric, metric)
    found = [value for row in values for value in row if value is not None] or [0.0]
    low, high = (0.0, 1.0) if metric == "cosine" else (min(found), max(found))
    has_both = metric != "cosine" and low < 0 < high
    ends = [value for value in values[-1] if value is not None]
    deepest = f"; the deepest goes from {ends[0]:.3g} to {ends[-1]:.3g}" if ends else ""
    return HeatMap(
        id=f"training-{re.sub(r'[^a-z0-9]+', '-', title.lower())}",
        alt=f"Heat map of {title}, layers by training steps{deepest}.",
        title=words if words[0] == "ρ" else f"{words[:1].upper()}{words[1:]}",
        rows=tuple(str(place) for _, place in ordered),
        columns=tuple(f"{point['step']:g}" for point in known),
        values=values,
        low=low,
        high=high,
        middle=0.0 if has_both else None,
        row_title="layer" if "/layer_" in names[0][0] else "depth (0 = embedding)",
        column_title="step",
        unit=words,
    )


# --- training runs as values, and their curves over steps: a line per variant, seeds as a band ---

BANDS = "Bands reach from the smallest to the largest of the seeds."


# --- over steps -----------------------------------------------------------------------------------------------------


def figures_over_steps(runs: Sequence[TrainedRun]) -> list[Chart]:
    """Loss, accuracy and smoothing at the output, each where any run has logged it."""
    groups = grouped(runs)
    found = []
    for title, words, key_of in (
        ("loss", "Training loss", lambda run: "loss"),
        ("loss on held-out data", "Loss on held-out data", lambda run: "eval_loss"),
        ("accuracy", "Accuracy on held-out data", lambda run: "eval_accuracy"),
        ("mean cosine, last depth", "How alike tokens leave the last layer (mean cosine)", _deepest("cosine")),
        ("HFC / LFC, last depth", "What differs between tokens over what they share", _deepest("hfc_lfc")),
    ):
        marks = [mark for k, group in enumerate(groups) for mark in _group_marks(group, k, key_of)]
        if marks:
            found.append(_over_steps(title, words, marks, groups))
    return found


def _over_steps(title: str, words: str, marks: list[Mark], groups: Sequence[RunGroup]) -> Chart:
    lines = [mark for mark in marks if isinstance(mark, Line)]
    last = max(x for line in lines for x in line.x)
    is_cosine = title.startswith("mean cosine")
    band = BANDS if any(len(group.runs) > 1 for group in groups) else ""
    ends = "; ".join(f"{line.name} from {line.y[0]:.3g} to {line.y[-1]:.3g}" for line in lines)
    return Chart(
        id="steps-" + re.sub(r"[^a-z]+", "-", title.lower()),
        alt=f"{words} over training steps: {ends}.",
        caption=band,
        x=numbers(0.0, float(last or 1), title="step"),
        panels=(Panel(title=words, y=axis_of(marks, is_cosine=is_cosine), marks=tuple(marks), height=180),),
    )


def axis_of(marks: Sequence[Mark], *, is_cosine: bool, zero: bool = False) -> Axis:
    """A cosine from 0 to 1 always; another number between its ends."""
    values: list[float | None] = []
    for mark in marks:
        values += mark.y if isinstance(mark, Line) else (*mark.low, *mark.high) if isinstance(mark, Fan) else ()
    low, high = extent(values, zero=zero)
    return numbers(float(min([0.0, *(v for v in values if v is not None)])), 1.0) if is_cosine else numbers(low, high)


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


def _group_marks(group: RunGroup, index: int, key_of: Callable[[TrainedRun], str]) -> list[Mark]:
    """The mean over seeds at the steps that all of them have, and the band between the smallest and the largest."""
    each = [found for run in group.runs if (found := series(run, key_of(run)))]
    if not each:
        return []
    steps = sparse(sorted(set.intersection(*(set(found) for found in each))))
    return mean_and_band(group.words, index, steps, [[found[step] for found in each] for step in steps])


def mean_and_band(
    name: str, index: int, x: Sequence[float | int], values: Sequence[Sequence[float]], *, dots: bool = False
) -> list[Mark]:
    """A line for the mean of every place; around it what lies between the smallest and the largest."""
    if not x:
        return []
    tone, dash = line_style(index)
    at = tuple(float(place) for place in x)
    means = tuple(sum(found) / len(found) for found in values)
    line = Line(name=name, x=at, y=means, tone=tone, dash=dash, dots=dots, value=f"{means[-1]:.3g}")
    if len(values[0]) < 2:
        return [line]
    low, high = tuple(min(found) for found in values), tuple(max(found) for found in values)
    return [Fan(name="", x=at, low=low, high=high, tone=tone, strength=0.16), line]


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
    sign = 1.0 if group.runs[0].intends == "smoothing" else -1.0
    against = {kind: sign * (mine[kind] - others.get(kind, 0.0)) for kind in mine}
    if not against:
        return ""
    kind = min(against, key=against.__getitem__)
    if against[kind] >= 0:
        return ""
    own = mine.get("attention")
    attention = f", while its attention changes {signed(own)}" if own is not None and kind != "attention" else ""
    return (
        f"Against it works {kind}: the mean cosine changes by {signed(mine[kind])} there, and by "
        f"{signed(others.get(kind, 0.0))} in {plain.said}{attention}."
    )


def kind_changes(group: RunGroup) -> Mapping[str, float]:
    """What every kind of sub-block changes, mean over the seeds."""
    each = [_kinds(run.analysis) for run in group.runs if run.analysis]
    names = dict.fromkeys(name for kinds in each for name in kinds)
    return {name: mean(kinds[name] for kinds in each if name in kinds) for name in names}


def _kinds(analysis: Analysis) -> dict[str, float]:
    if analysis.measurement is None or not analysis.measurement.attributions:
        return {}
    return {kind.part: kind.change for kind in analysis.measurement.attributions[0].kinds}


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

MOST_MAPS = 6
"""Variants with a heat map of their own."""
SHOWN = 3
"""Variants that the headline has room for."""
ACCURACY = ("eval_accuracy", "test_accuracy")


def runs_page(runs: Sequence[TrainedRun]) -> Page:
    """Several runs: what became of them, whether they ended as intended, and their curves."""
    groups = grouped(runs)
    finished = [group for group in groups if any(run.analysis for run in group.runs)]
    blocks = paired([*figures_over_steps(runs), *_cosine_maps(groups)])
    sections = [PageSection(id="steps", title="Over training", blocks=blocks)]
    if finished:
        sections.insert(0, PageSection(id="depth", blocks=_depth_charts(finished)))
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
    )


def _cosine_maps(groups: Sequence[RunGroup]) -> list[HeatMap]:
    """The mean cosine of the first run of each variant, layers by steps."""
    found = []
    for k, group in enumerate(groups[:MOST_MAPS]):
        maps = [heat for heat in smoothing_figures(group.runs[0].points) if heat.id.endswith("cosine")]
        found += [replace(heat, id=f"{heat.id}-{k}", title=f"{heat.title}, {group.said}") for heat in maps[:1]]
    return found


def watched_page(runs: Sequence[TrainedRun]) -> Page:
    """A page of runs that may not have finished: loss, accuracy and smoothing so far."""
    if len(runs) > 1:
        return runs_page(runs)
    (run,) = runs
    blocks = paired([*figures_over_steps(runs), *smoothing_figures(run.points)])
    return Page(
        title=f"oversmooth: {run.name}",
        eyebrow=short_name(run.where),
        verdict=_progress_words(run),
        facts=_counts(run),
        sections=(PageSection(id="steps", blocks=blocks),),
    )


def _counts(run: TrainedRun) -> tuple[tuple[str, str], ...]:
    """What was logged so far, and what each number counts."""
    measured = sum(any(NAME.fullmatch(name) for name in point) for point in run.points)
    evaluated = sum("eval_loss" in point or "eval_accuracy" in point for point in run.points)
    losses = sum("loss" in point for point in run.points)
    return (
        *((("recipe", run.recipe), ("variant", run.variant), ("seed", str(run.seed))) if run.seed is not None else ()),
        ("steps with a loss", str(losses)),
        ("evaluations", str(evaluated)),
        ("measurements of smoothing", str(measured)),
    )


def _progress_words(run: TrainedRun) -> str:
    """How far it is, and the last numbers."""
    of = f" of {run.steps:,}" if run.steps else ""
    lead = f"{run.name}: " + (
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


# --- over depth -----------------------------------------------------------------------------------------------------


def _depth_charts(groups: Sequence[RunGroup]) -> list[Block]:
    titles = {
        "cosine": "How alike tokens are in the trained models (mean cosine)",
        "hfc_lfc": "HFC/LFC in the trained models",
    }
    return paired(
        [chart for metric, title in titles.items() if (chart := _over_depth(groups, metric, title)) is not None]
    )


def _over_depth(groups: Sequence[RunGroup], metric: str, title: str) -> Chart | None:
    """One metric over relative depth in the trained models: a line per variant, seeds as a band."""
    marks: list[Mark] = []
    for index, group in enumerate(groups):
        curves = [found for run in group.runs if run.analysis and len(found := _curve(run.analysis, metric)) > 1]
        if curves:
            count = max(len(curve) for curve in curves)
            x = [k / (count - 1) for k in range(count)]
            values = [[_at(curve, depth) for curve in curves] for depth in x]
            marks += mean_and_band(group.words, index, x, values, dots=count < 20)
    if not marks:
        return None
    return Chart(
        id=f"runs-{metric.replace('_', '-')}",
        alt=f"{title} over relative depth: {', '.join(group.words for group in groups)}.",
        caption=BANDS if any(len(group.runs) > 1 for group in groups) else "",
        x=RELATIVE,
        panels=(Panel(title=title, y=axis_of(marks, is_cosine=metric == "cosine", zero=True), marks=tuple(marks)),),
    )


def _curve(analysis: Analysis, metric: str) -> list[float]:
    """One metric over depth, where it has a value, up to the final norm: where the headline's number is from."""
    measurement = analysis.measurement
    if measurement is None or not measurement.values:
        return []
    final = measurement.final(metric)
    points = (*measurement.curve(metric), *([final] if final is not None else []))
    return [point.mean for point in points if point.mean is not None]


def _at(curve: Sequence[float], depth: float) -> float:
    """A curve at a relative depth, linear between layers."""
    place = depth * (len(curve) - 1)
    below = min(int(place), len(curve) - 2)
    return curve[below] + (place - below) * (curve[below + 1] - curve[below])


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
