"""What a measurement gathers while the model runs: averages of metrics at places, and who changed them.

Metrics are computed inside the hooks and only per-sequence numbers survive a batch, so the cost in memory is that of
the forward pass; of the stream, a place and the sub-block before it are held where metrics of steps are asked for.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import compress
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from oversmooth.data.batches import keep_mask
from oversmooth.measurement.attention_health import ATTENTION, AttentionGatherer
from oversmooth.measurement.attribution import Chain
from oversmooth.measurement.dominating import LargestTokens
from oversmooth.measurement.evidence import Running
from oversmooth.measurement.gathering import SpanGatherer, StepGatherer
from oversmooth.measurement.joining import LEAST_WITHOUT, PlaceSums, without_largest
from oversmooth.measurement.metric import Metric, MetricValues
from oversmooth.measurement.metrics import largest_norm, log_hfc_lfc, log_hfc_lfc_unit
from oversmooth.measurement.moments import Kept, Moments, measurable
from oversmooth.measurement.passes import Seen
from oversmooth.measurement.selection import Selection
from oversmooth.models.hooks.attention_maps import unwatched
from oversmooth.models.hooks.places import Place, on_stream
from oversmooth.models.inputs import TEXT
from oversmooth.models.source import Stack
from oversmooth.results import Missing, PlaceValue, SpanDistances

EVERY = 8
"""Metrics that cost much are taken of every so many-th sequence."""


@dataclass(frozen=True, eq=False, slots=True)
class _Noted:
    """Numbers of one batch on their way to the sums that they belong to."""

    sums: dict[tuple[Place, str], Running]
    places: Sequence[Place]
    metric: str
    found: MetricValues
    """At the first place, at the second, and so on."""


@dataclass
class MeasurementObserver:
    """Everything one measurement accumulates."""

    model: nn.Module
    chosen: Selection
    stacks: Mapping[str, Stack]
    names: frozenset[str]
    adds_stream_norms: bool
    drop_prefix: bool
    seen: Seen = field(default_factory=Seen)
    problems: dict[Place, str] = field(default_factory=dict)
    chain: Chain = field(default_factory=lambda: Chain("log(HFC/LFC)"))
    unit_chain: Chain = field(default_factory=lambda: Chain("log(HFC/LFC) of tokens at unit length"))
    largest: LargestTokens = field(default_factory=LargestTokens)
    attention: AttentionGatherer = field(init=False)
    _inputs: Mapping[str, Any] = field(default_factory=dict)
    _sums: dict[tuple[Place, str], Running] = field(default_factory=dict)
    _without: dict[tuple[Place, str], Running] = field(default_factory=dict)
    _keep: dict[str, tuple[Bool[Tensor, "batch token"], Bool[Tensor, " batch"]]] = field(default_factory=dict)
    _kept: dict[str, Kept | None] = field(default_factory=dict)
    """What is measured of each stack; `None` where no sequence keeps two tokens."""
    _order: dict[Place, int] = field(default_factory=dict)
    """Places as they came."""
    _pending: list[_Noted] = field(default_factory=list)
    _place_sums: dict[str, PlaceSums] = field(default_factory=dict)
    _steps: dict[str, StepGatherer] = field(default_factory=dict)
    _spans: dict[str, SpanGatherer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.attention = AttentionGatherer(self.chosen.attention, self._note)

    def wants(self, name: str, stack: Stack) -> bool:
        """Asked-for places, and every place of the stream, which attribution needs."""
        is_stream = on_stream(name, stack.arch.residual)
        return is_stream or (name in self.names and not self.adds_stream_norms)

    def begin(self, inputs: Mapping[str, Any]) -> None:
        self._inputs = inputs
        self._keep.clear()
        self._pending.clear()
        self._place_sums.clear()
        self._steps.clear()
        for chain in (self.chain, self.unit_chain):
            chain.begin()
        for spans in self._spans.values():
            spans.begin()
        self.largest.begin()
        self.attention.begin()

    def observe(self, place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        # What is computed here is not the model's: nobody has to watch it for attention.
        with unwatched() if self.chosen.attention else nullcontext():
            self._observe(place, h)

    def _observe(self, place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        kept = self._kept_of(place.stack, h)
        if kept is None:
            return
        if len(h) > len(kept.n):
            h = h[self._keep[place.stack][1]]
        moments = Moments.of(h, kept)
        self._arrived(place)
        broken = int((~moments.is_finite).sum())
        if broken and place.stack not in {known.stack for known in self.problems}:
            where = f"{place.stack + ', ' if place.stack else ''}depth {place.depth}, {place.name}"
            self.problems[place] = f"NaN or infinity in {broken} of {len(h)} sequences, first seen at {where}"
        metrics = tuple(metric for metric in self.chosen.states if metric.of_sums)
        self._place_sums.setdefault(place.stack, PlaceSums(metrics)).see(place, moments)
        if place.name in self.names:
            self._measure(place, moments)
        if on_stream(place.name, self.stacks[place.stack].arch.residual):
            self._follow(place, moments, kept)
        if self.chosen.attention and place.name == "attn_sum":
            self.attention.see(self.stacks[place.stack], place.depth, self._keep[place.stack][0])

    def _kept_of(self, label: str, h: Tensor) -> Kept | None:
        if label not in self._keep:
            stack = self.stacks[label]
            drop = stack.prefix_tokens if self.drop_prefix else 0
            keep = keep_mask(self.model, self._inputs, stack, h, drop)
            has_two = measurable(keep)
            self._keep[label] = (keep, has_two)
            self._kept[label] = Kept.of(keep[has_two]) if bool(has_two.any()) else None
        return self._kept[label]

    def _measure(self, place: Place, moments: Moments) -> None:
        """Metrics that need the tokens, and those that one token can decide also without the largest one."""
        costly = [metric for metric in self.chosen.states if metric.is_costly]
        few = moments.every(EVERY, self.seen.sequences) if costly else moments
        others = cache(attrgetter("without_largest"))
        for metric in self.chosen.states:
            sums = few if metric.is_costly else moments
            if metric.of_sums:
                continue  # at the end of the batch, for all places together
            if not len(sums.n):
                self._note((place,), metric.name, MetricValues(sums.norms.sum(1), sums.is_finite))
                continue
            self._note((place,), metric.name, _valued(metric, sums))
            if metric.scales and bool((sums.n >= LEAST_WITHOUT).any()):
                found = without_largest(metric, others(sums))
                self._pending.append(_Noted(self._without, (place,), metric.name, found))

    def _follow(self, place: Place, moments: Moments, kept: Kept) -> None:
        """The stream has reached its next place."""
        ids = self._inputs.get(TEXT)
        keep, has_two = self._keep[place.stack]
        if ids is not None:
            ids = ids[has_two.to(ids.device)] if tuple(ids.shape) == tuple(keep.shape) else None
        self.largest.see(place, moments, kept.span.start or 0, ids)
        if self.chosen.steps:
            self._steps.setdefault(place.stack, StepGatherer(self.chosen.steps, self._arrived)).see(place, moments)
        if self.chosen.has_spans and place.name != "final_norm":
            stack = self.stacks[place.stack]
            # Of hybrids the last block may have no attention and no pass of its own; its end is seen all the same.
            depths = max(stack.names.blocks_in_model + 1, *(depth + 2 for passes in stack.passes for depth in passes))
            self._spans.setdefault(place.stack, SpanGatherer(place.stack, depths)).see(place.depth, moments)

    def _arrived(self, place: Place) -> None:
        self._order.setdefault(place, len(self._order))

    def _note(self, places: Sequence[Place], metric: str, found: MetricValues) -> None:
        for place in places:
            self._arrived(place)
        self._pending.append(_Noted(self._sums, places, metric, found))

    def finish(self) -> Bool[Tensor, "batch token"]:
        with unwatched() if self.chosen.attention else nullcontext():
            self._finish()
        keep, _ = next(iter(self._keep.values()))
        return keep

    def _finish(self) -> None:
        for label, sums in self._place_sums.items():
            self._join(label, sums)
        for steps in self._steps.values():
            steps.finish(self._note)
        _add(self._pending)
        for chain in (self.chain, self.unit_chain):
            chain.finish()
        for spans in self._spans.values():
            spans.finish()
        self.attention.finish()

    def _join(self, label: str, sums: PlaceSums) -> None:
        """Numbers that need sums only, at all places of a stack together."""
        whole, others = sums.join()
        is_asked = [place.name in self.names for place in sums.places]
        asked = list(compress(sums.places, is_asked))
        for metric in sums.metrics if asked else ():
            self._note(asked, metric.name, sums.rows(metric.on(whole), is_asked))
            if metric.scales and others is not None:
                found = sums.rows(without_largest(metric, others), is_asked)
                self._pending.append(_Noted(self._without, asked, metric.name, found))
        is_stream = [on_stream(place.name, self.stacks[label].arch.residual) for place in sums.places]
        stream = list(compress(sums.places, is_stream))
        for chain, metric in ((self.chain, log_hfc_lfc), (self.unit_chain, log_hfc_lfc_unit)):
            chain.add(label, stream, sums.rows(metric.on(whole), is_stream))
        self.largest.finish(label, stream, sums.rows(largest_norm.on(whole), is_stream))

    # --- results ---

    def values(self) -> tuple[PlaceValue, ...]:
        in_order = {name: number for number, (name, _) in enumerate(self.chosen.definitions())}
        keys = sorted(self._sums, key=lambda key: (self._order[key[0]], in_order[key[1]]))
        found = [self._value(place, metric, self._sums[place, metric]) for place, metric in keys]
        for stack, reason in self.attention.reasons.items():
            place = Place(stack, 0, ATTENTION)
            missing = (Missing(field="mean", reason=reason),)
            found += [self._value(place, metric, Running(), missing) for metric in self.chosen.attention]
        return tuple(found)

    def _value(self, place: Place, metric: str, sums: Running, missing: tuple[Missing, ...] = ()) -> PlaceValue:
        if not sums.count and not missing:
            missing += (Missing(field="mean", reason="no sequence has a value here"),)
        if sums.count < 2:
            missing += (Missing(field="standard_error", reason="fewer than two sequences have a value"),)
        without = self._without.get((place, metric), Running())
        return PlaceValue(
            stack=place.stack,
            depth=place.depth,
            layer=_layer_at(self.stacks[place.stack], place),
            place=place.name,
            metric=metric,
            mean=sums.mean if sums.count else None,
            standard_error=sums.standard_error,
            sequences=sums.count,
            on_stream=on_stream(place.name, self.stacks[place.stack].arch.residual),
            missing=missing,
            mean_without_largest=without.mean if without.count else None,
        )

    def spans(self) -> tuple[SpanDistances, ...]:
        return tuple(found for gatherer in self._spans.values() if (found := gatherer.result()) is not None)


def _layer_at(stack: Stack, place: Place) -> int | None:
    """The layer whose weights act at a place; where layers are shared, several depths have the same one."""
    if place.depth == 0 or place.name == "final_norm":
        return None
    blocks = zip(stack.names.blocks, stack.passes, strict=True)
    return next((block.index for block, passes in blocks if place.depth - 1 in passes), place.depth - 1)


def _add(pending: Sequence[_Noted]) -> None:
    """Adds what a batch gave; numbers of as many sequences on one device are moved and converted together."""
    alike: dict[tuple[int, torch.device], list[_Noted]] = {}
    for noted in pending:
        sequences = len(noted.found.values) // len(noted.places)
        alike.setdefault((sequences, noted.found.values.device), []).append(noted)
    for group in alike.values():
        sums = [noted.sums.setdefault((place, noted.metric), Running()) for noted in group for place in noted.places]
        values = torch.cat([noted.found.values.double() for noted in group]).unflatten(0, (len(sums), -1)).cpu().numpy()
        defined = torch.cat([noted.found.defined for noted in group]).unflatten(0, (len(sums), -1)).cpu().numpy()
        counts = defined.sum(1)
        means = np.where(defined, values, 0).sum(1) / np.maximum(counts, 1)
        squares = np.square(np.where(defined, values - means[:, None], 0)).sum(1)
        for running, *facts in zip(sums, counts.tolist(), means.tolist(), squares.tolist(), strict=True):
            if facts[0]:
                running.join(*facts)


def _valued(metric: Metric, moments: Moments) -> MetricValues:
    """The metric's values; an error in it, which may be a user's own code, says which metric it was."""
    try:
        return metric.on(moments)
    except Exception as error:
        error.add_note(f"Raised by the metric {metric.name!r}.")
        raise
