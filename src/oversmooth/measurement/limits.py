"""Limits of what is measured: rules such as `max_cosine = 0.95`, one meaning for the gate and for runs that train.

A rule holds where a metric, as it leaves every block, is at most (`max_`) or at least (`min_`) the number. The embedding
is not judged: no layer has made it what it is. `max_loss_increase` is about runs: how far the last loss lies above the
lowest one before it.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from oversmooth.errors import BadValue, UnknownName
from oversmooth.measurement.selection import known_metrics
from oversmooth.results import Breach, Measurement

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
