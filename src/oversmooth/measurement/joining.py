"""Numbers that need no tokens, only sums over them, are computed for all places of a batch together.

A number of one place is a tensor of a few elements, one for each sequence, and every operation on it costs as much as one
on the numbers of all places. So a place leaves its sums behind, its tokens go, and metrics see the sums of all places as if
they were sequences of one large batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from oversmooth.measurement.metric import Metric, MetricValues
from oversmooth.measurement.moments import Moments, made_of
from oversmooth.models.hooks.places import Place

SUMS = ("mask", "n", "norms", "mean_squared", "hfc_squared")
"""What metrics of states are made of."""
UNIT_SUMS = ("unit_sum_squared", "unit_hfc_squared")
"""The same of tokens at length one."""
LEAST_WITHOUT = 3
"""Tokens that a sequence needs for numbers without its largest one."""


def settled(moments: Moments, names: Iterable[str] = SUMS + UNIT_SUMS) -> Moments:
    """The sums alone, without the tokens."""
    return made_of(Moments, {name: getattr(moments, name) for name in names})


def joined(parts: Sequence[Moments]) -> Moments:
    """Sums of several places, one place behind the other."""
    return made_of(Moments, {name: torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])})


@dataclass
class PlaceSums:
    """The sums of one stack at every place of one batch, with and without the largest token of each sequence."""

    metrics: tuple[Metric, ...]
    """Those that were asked for and need sums only."""
    _seen: dict[Place, tuple[Moments, Moments | None]] = field(default_factory=dict)

    def see(self, place: Place, moments: Moments) -> None:
        """The batch has reached a place; what is seen twice counts as it was seen last."""
        needs_both = any(metric.scales for metric in self.metrics)
        others = settled(moments.without_largest, SUMS) if needs_both else None
        self._seen[place] = (settled(moments), others)

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(self._seen)

    def join(self) -> tuple[Moments, Moments | None]:
        """All places together; the second without the largest tokens, if a metric needs it."""
        others = [other for _, other in self._seen.values() if other is not None]
        return joined([whole for whole, _ in self._seen.values()]), joined(others) if others else None

    def rows(self, found: MetricValues, wanted: Sequence[bool]) -> MetricValues:
        """Only what belongs to some places."""
        if all(wanted):
            return found
        rows = torch.tensor(wanted, device=found.values.device)
        values, defined = (part.unflatten(0, (len(wanted), -1))[rows] for part in (found.values, found.defined))
        return MetricValues(values.flatten(), defined.flatten())


def without_largest(metric: Metric, others: Moments) -> MetricValues:
    """The metric without the largest token, where a sequence has tokens enough."""
    found = metric.on(others)
    return MetricValues(found.values, found.defined & (others.n + 1 >= LEAST_WITHOUT))
