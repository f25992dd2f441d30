"""`gate`: checks a model or a training log against limits.

A rule holds where a metric, as it leaves every block, is at most (`max_`) or at least (`min_`) the number. The embedding
is not judged: no layer has made it what it is. `max_loss_increase` is about runs: how far the last loss lies above the
lowest one before it.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from oversmooth.data.held import Data
from oversmooth.data.load import RunKeywords
from oversmooth.environment.files import json_object, read_text_file
from oversmooth.errors import BadValue, BrokenFile, MissingValue, NotSupported, OtherModel, PartialReading, UnknownName
from oversmooth.measurement.measure import measure
from oversmooth.measurement.observer import known_metrics
from oversmooth.models.open import Target
from oversmooth.results import Analysis, Breach, GateResult, Measurement, Progress, no_progress
from oversmooth.results.runs import read_run

# --- limits of what is measured: rules such as `max_cosine = 0.95` ---

LOSS = "max_loss_increase"
SIDES = ("max", "min")
POINT = re.compile(r"smoothing/(?:(?P<stack>[^/]+)/)?(?P<metric>[^/]+)/depth_(?P<depth>\d+)")
"""Names of the monitor's numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One rule."""

    side: str
    """max or min."""
    metric: str
    bound: float

    @property
    def name(self) -> str:
        return f"{self.side}_{self.metric}"

    def is_broken_by(self, value: float) -> bool:
        return not (value <= self.bound if self.side == "max" else value >= self.bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A metric as it leaves one block."""

    stack: str
    depth: int
    metric: str
    value: float | None


def known_rules() -> tuple[str, ...]:
    return (*(f"{side}_{name}" for name in known_metrics() for side in SIDES), LOSS)


def limits_of(rules: Mapping[str, object]) -> tuple[Limit, ...]:
    """Limits from names and numbers; dashes count as underscores. Raises on unknown names and on what is no number."""
    limits = []
    for rule, bound in rules.items():
        name = str(rule).replace("-", "_")
        if name not in known_rules():
            raise UnknownName("rule", rule, known_rules())
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
            raise BadValue(f"the rule {name}", bound, "a finite number, such as max_cosine = 0.95")
        side, _, metric = name.partition("_")
        limits.append(Limit(side=side, metric=metric, bound=float(bound)))
    return tuple(limits)


def points_of(measurement: Measurement) -> list[Point]:
    """Every metric as it leaves every block."""
    stacks = dict.fromkeys(value.stack for value in measurement.values)
    return [
        Point(stack=stack, depth=value.depth, metric=metric, value=value.mean)
        for stack in stacks
        for metric, _ in measurement.definitions
        for value in measurement.curve(metric, stack)
        if value.depth > 0
    ]


def points_of_numbers(numbers: Mapping[str, float | int]) -> list[Point]:
    """The same from what the monitor logs."""
    found = ((POINT.fullmatch(name), value) for name, value in numbers.items())
    return [
        Point(stack=match["stack"] or "", depth=int(match["depth"]), metric=match["metric"], value=float(value))
        for match, value in found
        if match and int(match["depth"]) > 0
    ]


def breaches(points: Iterable[Point], limits: Sequence[Limit]) -> tuple[Breach, ...]:
    """Every point that breaks a limit; a point without a value cannot be judged, and is one too."""
    return tuple(
        Breach(rule=limit.name, stack=point.stack, depth=point.depth, value=point.value, bound=limit.bound)
        for limit in limits
        for point in points
        if point.metric == limit.metric and (point.value is None or limit.is_broken_by(point.value))
    )


def loss_increase(losses: Sequence[float]) -> float:
    """How far the last loss lies above the lowest one before it; 0 for a single one, infinite where it is no number."""
    last = losses[-1] if losses else 0.0
    if not math.isfinite(last):
        return math.inf
    return last - min((loss for loss in losses if math.isfinite(loss)), default=last)


# --- `gate`: does a model, or a run that trained, keep within limits ---

COMPARED = ("cosine", "effective_rank_share")
"""What is compared with an earlier measurement: both lie in [0, 1], so that one tolerance fits them."""


def gate(
    target: Target,
    data: Data = None,
    *,
    rules: Mapping[str, object] | None = None,
    against: str | Path | Analysis | Measurement | None = None,
    tolerance: float = 0.02,
    progress: Progress = no_progress,
    **options: Unpack[RunKeywords],
) -> GateResult:
    """Measures a model and says which layer and sub-block breaks which rule; `result.passed` is the answer.

    `rules` are `max_METRIC` and `min_METRIC` for any metric of `measure`, such as `{"max_cosine": 0.95}`. `against` is an
    analysis or a measurement saved earlier: no layer may be smoother than it was there by more than `tolerance`. The
    metrics.jsonl of a run is a target too: its last measurement is judged, and `max_loss_increase`. Other keywords are
    those of `measure`.
    """
    limits = limits_of(rules or {})
    if not limits and against is None:
        raise MissingValue("rules or against")
    if tolerance < 0:
        raise BadValue("tolerance", tolerance, "at least 0")
    if isinstance(target, str | Path) and str(target).endswith(".jsonl"):
        if against is not None:
            raise NotSupported("against", "for the log of a run", "a log holds no sub-blocks and no data facts")
        return _result(target, limits, None, _of_run(Path(target), limits))
    if any(limit.name == LOSS for limit in limits):
        advice = "Give the metrics.jsonl of a run as the target."
        raise NotSupported(LOSS, "for a model", "a loss belongs to a run", advice)
    before = _before(against) if against is not None else None
    metrics = dict.fromkeys(["hfc_lfc", *(limit.metric for limit in limits), *(COMPARED if before else ())])
    found = measure(target, data, metrics=tuple(metrics), progress=progress, **options)
    if found.stream is not None and found.stream.partial:
        raise PartialReading(found.provenance.target, found.stream.partial)
    broken = [*breaches(points_of(found), limits), *(_worse(before, found, tolerance) if before else ())]
    named = str(against) if isinstance(against, str | Path) else None
    return _result(found.provenance.target, limits, named, [_explained(breach, found) for breach in broken])


def _result(target: Target, limits: Iterable[Limit], against: str | None, broken: Iterable[Breach]) -> GateResult:
    rules = tuple((limit.name, limit.bound) for limit in limits)
    return GateResult(target=str(target), rules=rules, against=against, breaches=tuple(broken))


def _of_run(path: Path, limits: tuple[Limit, ...]) -> list[Breach]:
    """The last measurement of a run, and its losses."""
    points = read_run(path)
    measured = [point for point in points if any(name.startswith("smoothing/") for name in point)]
    last = points_of_numbers(measured[-1]) if measured else []
    broken = list(breaches(last, limits))
    for limit in limits:
        losses = [float(point["loss"]) for point in points if "loss" in point]
        if limit.name == LOSS and limit.is_broken_by(loss_increase(losses)):
            broken.append(Breach(rule=LOSS, stack="", depth=0, value=loss_increase(losses), bound=limit.bound))
        elif limit.name != LOSS and not any(point.metric == limit.metric for point in last):
            broken.append(Breach(rule=limit.name, stack="", depth=0, value=None, bound=limit.bound))
    return broken


def _before(against: str | Path | Analysis | Measurement) -> Measurement:
    """The measurement that is compared with."""
    if isinstance(against, Measurement):
        return against
    if not isinstance(against, Analysis):
        where, expected = str(against), "an analysis saved with `oversmooth report -o FILE.json`"
        loaded = json_object(read_text_file(Path(against), expected), where, expected)
        if loaded.get("kind") == Measurement.kind:
            return Measurement.from_dict(loaded, where=where)
        against = Analysis.from_dict(loaded, where=where)
    if against.measurement is None:
        raise BrokenFile(against.inspection.provenance.target, "a measurement", "weights only", "Analyse it with data.")
    return against.measurement


def _worse(before: Measurement, after: Measurement, tolerance: float) -> list[Breach]:
    """Blocks that are smoother than they were by more than the tolerance."""
    _require_same(before, after)
    old = {(point.stack, point.depth, point.metric): point.value for point in points_of(before)}
    broken = []
    for point in points_of(after):
        was = old.get((point.stack, point.depth, point.metric))
        if point.metric not in COMPARED or point.value is None or was is None:
            continue
        bound = was + tolerance if point.metric == "cosine" else was - tolerance
        if point.value > bound if point.metric == "cosine" else point.value < bound:
            rule = f"against_{point.metric}"
            broken.append(Breach(rule=rule, stack=point.stack, depth=point.depth, value=point.value, bound=bound))
    return broken


def _require_same(before: Measurement, after: Measurement) -> None:
    """Another kind of model, other depths or other data cannot be compared."""

    def blocks(measurement: Measurement) -> int:
        return len({(value.stack, value.depth) for value in measurement.values})

    facts = [
        ("model type", before.provenance.model_type, after.provenance.model_type),
        ("number of blocks", blocks(before), blocks(after)),
        ("data", f"{before.data.description}", f"{after.data.description}"),
        ("hash of the inputs", before.data.sha256[:12], after.data.sha256[:12]),
    ]
    for what, was, now in facts:
        if was != now:
            raise OtherModel(what, was, now)


def _explained(breach: Breach, found: Measurement) -> Breach:
    """With the part of that block that draws tokens together most."""
    parts = [
        part
        for attribution in found.attributions
        for part in attribution.parts
        if attribution.stack == breach.stack and part.depth == breach.depth and part.part != "final norm"
    ]
    worst = max(parts, key=lambda part: part.change, default=None)
    if worst is None or worst.change <= 0:
        return breach
    return replace(breach, sub_block=worst.part, sub_block_change=worst.change)
