"""What a measurement gathers while the model runs: averages of metrics at places, and who changed the ratio.

Metrics are computed inside the hooks and only per-sequence numbers survive a batch, so the cost in memory is that of
the forward pass. Attribution uses, per sequence, `log(HFC/LFC)` at the places of the residual stream: differences
between neighbours are exactly what each sub-block did, and they add up to the change from embedding to output.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from oversmooth.data.batches import keep_mask
from oversmooth.measurement.evidence import Running, direction, interval
from oversmooth.measurement.metrics import Metric, MetricValues, log_hfc_lfc
from oversmooth.measurement.moments import Kept, Moments, measurable
from oversmooth.measurement.passes import Seen
from oversmooth.models.hooks.places import NORMS, Place, on_stream
from oversmooth.models.source import Stack
from oversmooth.results import Attribution, KindChange, Missing, Part, PlaceValue

PART_OF = {
    "attn_sum": "attention",
    "cross_sum": "cross-attention",
    "ffn_sum": "feed-forward",
    "other_sum": "other",
    **dict.fromkeys(NORMS, "norm"),
    "final_norm": "final norm",
}


@dataclass
class MeasurementObserver:
    """Everything one measurement accumulates."""

    model: nn.Module
    chosen: tuple[Metric, ...]
    stacks: Mapping[str, Stack]
    names: frozenset[str]
    adds_stream_norms: bool
    drop_prefix: bool
    seen: Seen = field(default_factory=Seen)
    problems: dict[Place, str] = field(default_factory=dict)
    _inputs: Mapping[str, Any] = field(default_factory=dict)
    _sums: dict[tuple[Place, str], Running] = field(default_factory=dict)
    _keep: dict[str, tuple[Bool[Tensor, "batch token"], Bool[Tensor, " batch"]]] = field(default_factory=dict)
    _kept: dict[str, Kept | None] = field(default_factory=dict)
    """What is measured of each stack; `None` where no sequence keeps two tokens."""
    _pending: list[tuple[Place, str, Float[Tensor, " defined"]]] = field(default_factory=list)
    _stream: dict[Place, Float[Tensor, " batch"]] = field(default_factory=dict)
    _parts: dict[str, dict[Place, Running]] = field(default_factory=dict)
    _kinds: dict[str, dict[str, Running]] = field(default_factory=dict)
    _totals: dict[str, Running] = field(default_factory=dict)

    def wants(self, name: str, stack: Stack) -> bool:
        """RunRequest-for places, and every place of the stream, which attribution needs."""
        is_stream = on_stream(name, stack.arch.residual)
        return is_stream or (name in self.names and not self.adds_stream_norms)

    def begin(self, inputs: Mapping[str, Any]) -> None:
        self._inputs = inputs
        self._keep.clear()
        self._stream.clear()
        self._pending.clear()

    def observe(self, place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        if place.stack not in self._keep:
            stack = self.stacks[place.stack]
            drop = stack.prefix_tokens if self.drop_prefix else 0
            keep = keep_mask(self.model, self._inputs, stack, h, drop)
            has_two = measurable(keep)
            self._keep[place.stack] = (keep, has_two)
            self._kept[place.stack] = Kept.of(keep[has_two]) if bool(has_two.any()) else None
        kept = self._kept[place.stack]
        if kept is None:
            return
        if len(h) > len(kept.n):
            h = h[self._keep[place.stack][1]]
        moments = Moments.of(h, kept)
        broken = int((~moments.is_finite).sum())
        if broken and place.stack not in {known.stack for known in self.problems}:
            where = f"{place.stack + ', ' if place.stack else ''}depth {place.depth}, {place.name}"
            self.problems[place] = f"NaN or infinity in {broken} of {len(h)} sequences, first seen at {where}"
        for metric in self.chosen if place.name in self.names else ():
            found = _valued(metric, moments)
            self._pending.append((place, metric.name, found.values[found.defined]))
        if on_stream(place.name, self.stacks[place.stack].arch.residual):
            found = log_hfc_lfc.on(moments)
            self._stream[place] = found.values.cpu().double().masked_fill(~found.defined.cpu(), torch.nan)

    def finish(self) -> Bool[Tensor, "batch token"]:
        for place, metric, values in self._pending:
            self._sums.setdefault((place, metric), Running()).add(values)
        for label in self._keep:
            chain = [(place, values) for place, values in self._stream.items() if place.stack == label]
            if len(chain) < 2:
                continue
            table = torch.stack([values for _, values in chain], 1)
            complete = table[~table.isnan().any(1)]
            changes = complete.diff(dim=1)
            parts = self._parts.setdefault(label, {})
            for column, (place, _) in enumerate(chain[1:]):
                parts.setdefault(place, Running()).add(changes[:, column])
            kinds = [PART_OF[place.name] for place, _ in chain[1:]]
            for kind in dict.fromkeys(kinds):
                together = changes[:, [other == kind for other in kinds]].sum(1)
                self._kinds.setdefault(label, {}).setdefault(kind, Running()).add(together)
            self._totals.setdefault(label, Running()).add(complete[:, -1] - complete[:, 0])
        keep, _ = next(iter(self._keep.values()))
        return keep

    # --- results ---

    def values(self) -> tuple[PlaceValue, ...]:
        return tuple(self._value(place, metric, sums) for (place, metric), sums in self._sums.items())

    def _value(self, place: Place, metric: str, sums: Running) -> PlaceValue:
        missing = []
        if not sums.count:
            missing.append(Missing(field="mean", reason="no sequence has a value here"))
        if sums.count < 2:
            missing.append(Missing(field="standard_error", reason="fewer than two sequences have a value"))
        return PlaceValue(
            stack=place.stack,
            depth=place.depth,
            place=place.name,
            metric=metric,
            mean=sums.mean if sums.count else None,
            standard_error=sums.standard_error,
            sequences=sums.count,
            on_stream=on_stream(place.name, self.stacks[place.stack].arch.residual),
            missing=tuple(missing),
        )

    def attributions(self) -> tuple[Attribution, ...]:
        return tuple(
            self._attribution(label, parts) for label, parts in self._parts.items() if self._totals[label].count
        )

    def _attribution(self, label: str, sums: Mapping[Place, Running]) -> Attribution:
        parts = tuple(
            Part(stack=label, depth=place.depth, part=PART_OF[place.name], place=place.name, **_facts(change))
            for place, change in sums.items()
        )
        total = _facts(self._totals[label])

        def share(*wanted: str) -> float:
            return sum((item.change for item in parts if item.part in wanted), 0.0)

        return Attribution(
            stack=label,
            total=total.pop("change"),
            **total,
            sequences=self._totals[label].count,
            attention=share("attention"),
            cross_attention=share("cross-attention"),
            feed_forward=share("feed-forward"),
            norms=share("norm", "final norm"),
            other=share("other"),
            parts=parts,
            kinds=tuple(KindChange(part=kind, **_facts(change)) for kind, change in self._kinds[label].items()),
        )


def _facts(change: Running) -> dict[str, Any]:
    """A change over sequences with what it says."""
    found = interval(change.mean, change.standard_error, change.count)
    return {
        "change": change.mean,
        "standard_error": change.standard_error,
        "interval": found,
        "direction": direction(change.mean, found),
    }


def _valued(metric: Metric, moments: Moments) -> MetricValues:
    """The metric's values; an error in it, which may be a user's own code, says which metric it was."""
    try:
        return metric.on(moments)
    except Exception as error:
        error.add_note(f"Raised by the metric {metric.name!r}.")
        raise
