"""What one measurement gathers while the model runs: metrics, attribution, the largest tokens.

Three chains say who changes the stream: the mean cosine, which results speak of; `log(HFC/LFC)` of tokens at length one,
the same on a scale that tells 0.97 from 0.99; and that of the tokens as they are, which a single large token may decide.

Metrics are computed inside the hooks and only per-sequence numbers survive a batch, so the cost in memory is that of
the forward pass; of the stream, a place and the sub-block before it are held where metrics of steps are asked for.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import compress, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from oversmooth.data.batches import keep_mask
from oversmooth.errors import BadValue, UnknownName
from oversmooth.measurement.attention import ATTENTION, ATTENTION_METRICS, AttentionGatherer
from oversmooth.measurement.metrics import (
    LEAST_WITHOUT,
    METRICS,
    Choice,
    Metric,
    MetricValues,
    SharedSums,
    all_metrics,
    cosine,
    largest_norm,
    log_hfc_lfc,
    log_hfc_lfc_unit,
    lookup,
    without_largest,
)
from oversmooth.measurement.moments import Moments, TokenMask, measurable
from oversmooth.measurement.pairs import BETWEEN, BETWEEN_METRICS, BetweenGatherer, PairGatherer
from oversmooth.measurement.passes import Processed
from oversmooth.measurement.statistics import Running, direction
from oversmooth.measurement.steps import STEP_METRICS, SpanGatherer, StepGatherer, StepMetric
from oversmooth.models.hooks.attention_maps import unwatched
from oversmooth.models.hooks.places import PART_OF, Place, on_stream
from oversmooth.models.inputs import TEXT
from oversmooth.models.source import Stack
from oversmooth.results import (
    Attribution,
    DominatingToken,
    KindChange,
    Missing,
    Part,
    PlaceValue,
    SequenceSimilarity,
    SpanDistances,
)
from oversmooth.results.base import interval
from oversmooth.results.measurement import PartName

# --- who changes a number of the stream: differences between neighbouring places ---


KEPT_VALUES = 100
"""Sequences of which a result holds the value at the output, one by one."""


@dataclass
class AttributionOverDepth:
    """One number at every place of the stream: its changes, per place, per kind of sub-block and in all."""

    quantity: str
    metric: Metric
    smooths_upwards: bool = False
    """Whether the number rises where tokens become alike."""
    _stream: dict[str, tuple[list[Place], MetricValues]] = field(default_factory=dict)
    """Of each stack the places of the stream, and the number of every sequence at the first place, at the second..."""
    _stacks: dict[str, "_ChainSums"] = field(default_factory=dict)

    def begin(self) -> None:
        self._stream.clear()

    def add(self, label: str, places: list[Place], found: MetricValues) -> None:
        """The number of every sequence of a batch, at one place of a stack behind the other."""
        self._stream[label] = (places, found)

    def finish(self) -> None:
        """Takes over the changes of a batch that is complete; a sequence counts if it has a value at every place."""
        for label, (places, found) in self._stream.items():
            if len(places) < 2:
                continue
            values, defined = (part.unflatten(0, (len(places), -1)).T for part in (found.values, found.defined))
            complete = values[defined.all(1)].cpu().double().numpy()
            self._stacks.setdefault(label, _ChainSums()).add(places, complete)

    def attributions(self, stacks: Mapping[str, Stack]) -> tuple[Attribution, ...]:
        found = self._stacks.items()
        return tuple(self._attribution(stacks[label], sums) for label, sums in found if sums.total.count)

    def _attribution(self, stack: Stack, sums: "_ChainSums") -> Attribution:
        total, end = self._facts(sums.total), sums.end
        return Attribution(
            stack=stack.label,
            tokens=stack.arch.kind,
            quantity=self.quantity,
            total=total.pop("change"),
            **total,
            sequences=sums.total.count,
            start=sums.start.mean,
            end=end.mean,
            end_interval=interval(end.mean, end.standard_error, end.count),
            end_values=tuple(sums.end_values),
            parts=tuple(
                Part(
                    stack=stack.label,
                    depth=place.depth,
                    part=PART_OF[place.name],
                    place=place.name,
                    **self._facts(change),
                )
                for place, change in sums.parts.items()
            ),
            kinds=tuple(KindChange(part=kind, **self._facts(change)) for kind, change in sums.kinds.items()),
        )

    def _facts(self, change: Running) -> dict[str, Any]:
        """A change over sequences with what it says."""
        found = interval(change.mean, change.standard_error, change.count)
        return {
            "change": change.mean,
            "standard_error": change.standard_error,
            "interval": found,
            "direction": direction(change.mean, found, smooths_upwards=self.smooths_upwards),
        }


@dataclass
class _ChainSums:
    """Sums over sequences of one stack."""

    start: Running = field(default_factory=Running)
    end: Running = field(default_factory=Running)
    end_values: list[float] = field(default_factory=list)
    total: Running = field(default_factory=Running)
    parts: dict[Place, Running] = field(default_factory=dict)
    kinds: dict[PartName, Running] = field(default_factory=dict)

    def add(self, places: Sequence[Place], values: Float[np.ndarray, "sequence place"]) -> None:
        self.start.add(values[:, 0])
        self.end.add(values[:, -1])
        self.end_values += values[: KEPT_VALUES - len(self.end_values), -1].tolist()
        self.total.add(values[:, -1] - values[:, 0])
        changes = np.diff(values, axis=1)
        for place, change in zip(places[1:], changes.T, strict=True):
            self.parts.setdefault(place, Running()).add(change)
        kinds = [PART_OF[place.name] for place in places[1:]]
        for kind in dict.fromkeys(kinds):
            together = changes[:, [other == kind for other in kinds]].sum(1)
            self.kinds.setdefault(kind, Running()).add(together)


# --- the token that outweighs all others: which one it is, in which channel it is large ---


@dataclass
class _Seen:
    """One place of the stream."""

    ratio: Running = field(default_factory=Running)
    share: Running = field(default_factory=Running)
    positions: Counter[int] = field(default_factory=Counter)
    ids: Counter[int] = field(default_factory=Counter)
    channels: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, eq=False, slots=True)
class _Largest:
    """The largest tokens of one batch at one place."""

    place: Place
    shares: Float[Tensor, " batch"]
    columns: Int[Tensor, " batch"]
    channels: Int[Tensor, " batch"]
    first: int
    """Position of the first column."""
    ids: Int[Tensor, "batch token"] | None

    def add_to(self, seen: _Seen, ratios: Float[np.ndarray, " batch"], defined: Bool[np.ndarray, " batch"]) -> None:
        shares = self.shares.cpu().double().numpy()
        defined = defined & np.isfinite(shares)
        positions = self.columns.cpu().numpy()[defined] + self.first
        seen.ratio.add(ratios[defined])
        seen.share.add(shares[defined])
        seen.positions.update(positions.tolist())
        seen.channels.update(self.channels.cpu().numpy()[defined].tolist())
        if self.ids is not None:
            seen.ids.update(self.ids.cpu().numpy()[defined.nonzero()[0], positions].tolist())


@dataclass
class LargestTokens:
    """The largest token of every sequence at every place of the stream."""

    _pending: list[_Largest] = field(default_factory=list)
    _seen: dict[Place, _Seen] = field(default_factory=dict)

    def begin(self) -> None:
        self._pending.clear()

    def see(self, place: Place, moments: Moments, first: int, ids: Int[Tensor, "batch token"] | None) -> None:
        """`first` is the position of the span's first column; `ids` are the tokens that entered the model, if any did."""
        channel = moments.largest_token.abs().max(1)
        shares = channel.values.square() / moments.largest_token.square().sum(1)
        self._pending.append(_Largest(place, shares, moments.largest, channel.indices, first, ids))

    def finish(self, label: str, places: Sequence[Place], ratios: MetricValues) -> None:
        """The batch is complete; `ratios` are `largest_norm` at the places of a stack."""
        values, defined = (
            part.unflatten(0, (len(places), -1)).cpu().numpy() for part in (ratios.values, ratios.defined)
        )
        of_place = dict(zip(places, zip(values.astype(np.float64), defined, strict=True), strict=True))
        for found in self._pending:
            if found.place.stack == label:
                found.add_to(self._seen.setdefault(found.place, _Seen()), *of_place[found.place])

    def results(self) -> tuple[DominatingToken, ...]:
        """For every stack the place where its largest token is largest."""
        labels = dict.fromkeys(place.stack for place, seen in self._seen.items() if seen.ratio.count)
        return tuple(
            _of_stack(
                [(place, seen) for place, seen in self._seen.items() if place.stack == label and seen.ratio.count]
            )
            for label in labels
        )


def _of_stack(chain: Sequence[tuple[Place, _Seen]]) -> DominatingToken:
    place, seen = max(chain, key=lambda item: item[1].ratio.mean)
    steps = [(after, b.ratio.mean - a.ratio.mean) for (_, a), (after, b) in pairwise(chain)]
    made_by = max(steps, key=lambda step: step[1], default=None)
    (position, count), (channel, _) = seen.positions.most_common(1)[0], seen.channels.most_common(1)[0]
    return DominatingToken(
        stack=place.stack,
        depth=place.depth,
        place=place.name,
        ratio=seen.ratio.mean,
        position=position,
        position_share=count / seen.ratio.count,
        token_id=seen.ids.most_common(1)[0][0] if seen.ids else None,
        channel=channel,
        channel_share=seen.share.mean,
        made_at_depth=made_by[0].depth if made_by else None,
        made_by=PART_OF[made_by[0].name] if made_by else None,
    )


# --- which numbers `measure` was asked for: metrics of states, of steps between them, and of attention ---

GROUPS = {"steps": tuple(STEP_METRICS), "attention": tuple(ATTENTION_METRICS)}
"""Names that stand for several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was chosen, in the order in which it was asked for within each kind."""

    states: tuple[Metric, ...]
    steps: tuple[StepMetric, ...]
    attention: tuple[str, ...]
    between: bool = False
    """Whether different sequences are compared."""

    @property
    def has_spans(self) -> bool:
        """Distances between any two depths come with either distance."""
        return any(metric.name in ("angular_distance", "influence") for metric in self.steps)

    def definitions(self) -> tuple[tuple[str, str], ...]:
        states = tuple((metric.name, metric.definition) for metric in self.states)
        steps = tuple((metric.name, metric.definition) for metric in self.steps)
        between = tuple(BETWEEN_METRICS.items()) if self.between else ()
        return states + between + steps + tuple((name, ATTENTION_METRICS[name]) for name in self.attention)


def known_metrics() -> tuple[str, ...]:
    return (*all_metrics(), *BETWEEN_METRICS, *STEP_METRICS, *ATTENTION_METRICS)


def select(choices: Choice | Iterable[Choice]) -> Selection:
    """The metrics asked for by name, by the name of a group, or given as functions; `all` is every one without a grid."""
    if isinstance(choices, str) or callable(choices):
        choices = (choices,)
    named: list[Choice] = []
    for choice in choices:
        if choice == "all":
            named += [name for name in known_metrics() if name not in METRICS or not METRICS[name].images_only]
        elif isinstance(choice, str) and choice in GROUPS:
            named += GROUPS[choice]
        else:
            named.append(choice)
    if twice := [name for name in named if isinstance(name, str) and named.count(name) > 1]:
        raise BadValue("metrics", twice, "names that are all different")
    for name in named:
        if isinstance(name, str) and name not in known_metrics():
            raise UnknownName("metric", name, (*known_metrics(), *GROUPS, "all"))
    of_others = {*STEP_METRICS, *ATTENTION_METRICS, *BETWEEN_METRICS}
    return Selection(
        states=lookup(name for name in named if not isinstance(name, str) or name not in of_others),
        between=BETWEEN in named,
        steps=tuple(STEP_METRICS[name] for name in named if isinstance(name, str) and name in STEP_METRICS),
        attention=tuple(name for name in named if isinstance(name, str) and name in ATTENTION_METRICS),
    )


# --- what a measurement gathers while the model runs: averages of metrics at places, and who changed them ---

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


@dataclass(frozen=True, eq=False, slots=True)
class _Kept:
    """What is measured of one stack in one batch."""

    keep: Bool[Tensor, "batch token"]
    has_two: Bool[Tensor, " batch"]
    mask: TokenMask | None
    """Of the sequences that keep two tokens; `None` where there is none."""

    @classmethod
    def of(cls, keep: Bool[Tensor, "batch token"]) -> "_Kept":
        has_two = measurable(keep)
        return cls(keep, has_two, TokenMask.of(keep[has_two]) if bool(has_two.any()) else None)


@dataclass
class MeasurementObserver:
    """Everything one measurement accumulates."""

    model: nn.Module
    chosen: Selection
    stacks: Mapping[str, Stack]
    names: frozenset[str]
    adds_stream_norms: bool
    drop_prefix: bool
    seen: Processed = field(default_factory=Processed)
    problems: dict[Place, str] = field(default_factory=dict)
    cosine_chain: AttributionOverDepth = field(
        default_factory=lambda: AttributionOverDepth("mean cosine", cosine, smooths_upwards=True)
    )
    unit_chain: AttributionOverDepth = field(
        default_factory=lambda: AttributionOverDepth("log(HFC/LFC) of tokens at unit length", log_hfc_lfc_unit)
    )
    raw_chain: AttributionOverDepth = field(default_factory=lambda: AttributionOverDepth("log(HFC/LFC)", log_hfc_lfc))
    pairs: PairGatherer | None = None
    """Looks at pairs of tokens, where that is asked for."""
    between: BetweenGatherer = field(default_factory=BetweenGatherer)
    largest: LargestTokens = field(default_factory=LargestTokens)
    attention: AttentionGatherer = field(init=False)
    _inputs: Mapping[str, Any] = field(default_factory=dict)
    _sums: dict[tuple[Place, str], Running] = field(default_factory=dict)
    _without: dict[tuple[Place, str], Running] = field(default_factory=dict)
    _kept: dict[str, dict[torch.device, _Kept]] = field(default_factory=dict)
    """What is measured of each stack, on every device that its blocks are on."""
    _order: dict[Place, int] = field(default_factory=dict)
    """Places as they came."""
    _pending: list[_Noted] = field(default_factory=list)
    _place_sums: dict[str, SharedSums] = field(default_factory=dict)
    _steps: dict[str, StepGatherer] = field(default_factory=dict)
    _spans: dict[str, SpanGatherer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.attention = AttentionGatherer(self.chosen.attention, self._note)

    @property
    def chains(self) -> tuple[AttributionOverDepth, ...]:
        return self.cosine_chain, self.unit_chain, self.raw_chain

    def wants(self, name: str, stack: Stack) -> bool:
        """Asked-for places, and every place of the stream, which attribution needs."""
        is_stream = on_stream(name, stack.arch.residual)
        return is_stream or (name in self.names and not self.adds_stream_norms)

    def begin(self, inputs: Mapping[str, Any]) -> None:
        self._inputs = inputs
        self._kept.clear()
        self._pending.clear()
        self._place_sums.clear()
        self._steps.clear()
        for chain in self.chains:
            chain.begin()
        for spans in self._spans.values():
            spans.begin()
        if self.pairs is not None:
            self.pairs.begin()
        self.between.begin()
        self.largest.begin()
        self.attention.begin()

    def observe(self, place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        # What is computed here is not the model's: nobody has to watch it for attention.
        with unwatched() if self.chosen.attention else nullcontext():
            self._observe(place, h)

    def _observe(self, place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        kept = self._kept_of(place.stack, h)
        if kept.mask is None:
            return
        if len(h) > len(kept.mask.n):
            h = h[kept.has_two]
        moments = Moments.of(h, kept.mask)
        self._arrived(place)
        broken = int((~moments.is_finite).sum())
        if broken and place.stack not in {known.stack for known in self.problems}:
            where = f"{place.stack + ', ' if place.stack else ''}depth {place.depth}, {place.name}"
            self.problems[place] = f"NaN or infinity in {broken} of {len(h)} sequences, first seen at {where}"
        metrics = tuple(metric for metric in self.chosen.states if metric.of_sums)
        self._place_sums.setdefault(place.stack, SharedSums(metrics)).see(place, moments)
        if place.name in self.names:
            self._measure(place, moments)
        if on_stream(place.name, self.stacks[place.stack].arch.residual):
            self._follow(place, moments, kept)
        if self.chosen.attention and place.name == "attn_sum":
            self.attention.see(self.stacks[place.stack], place.depth, kept.keep)

    def _kept_of(self, label: str, h: Tensor) -> _Kept:
        found = self._kept.setdefault(label, {})
        if not found:
            stack = self.stacks[label]
            drop = stack.prefix_tokens if self.drop_prefix else 0
            found[h.device] = _Kept.of(keep_mask(self.model, self._inputs, stack, h, drop))
        elif h.device not in found:
            found[h.device] = _Kept.of(next(iter(found.values())).keep.to(h.device))
        return found[h.device]

    def _measure(self, place: Place, moments: Moments) -> None:
        """Metrics that need the tokens, and those that one token can decide also without the largest one."""
        costly = [metric for metric in self.chosen.states if metric.is_costly]
        few = moments.every(EVERY, self.seen.sequences) if costly else moments
        if self.chosen.between:
            self.between.see(place, moments)
        others = cache(attrgetter("without_largest"))
        for metric in self.chosen.states:
            sums = few if metric.is_costly else moments
            if metric.of_sums:
                continue  # at the end of the batch, for all places together
            if not len(sums.n):
                self._note((place,), metric.name, MetricValues(sums.norms.sum(1), sums.is_finite))
                continue
            self._note((place,), metric.name, metric.on(sums))
            if metric.scales and bool((sums.n >= LEAST_WITHOUT).any()):
                found = without_largest(metric, others(sums))
                self._pending.append(_Noted(self._without, (place,), metric.name, found))

    def _follow(self, place: Place, moments: Moments, kept: _Kept) -> None:
        """The stream has reached its next place."""
        ids = self._inputs.get(TEXT)
        if ids is not None:
            ids = ids[kept.has_two.to(ids.device)] if tuple(ids.shape) == tuple(kept.keep.shape) else None
        assert kept.mask is not None, "the stream is followed where there is something to compare"
        self.largest.see(place, moments, kept.mask.span.start or 0, ids)
        if self.pairs is not None:
            self.pairs.see(place, moments, self.seen.sequences)
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
        of_first_stack = next(iter(self._kept.values()))
        return next(iter(of_first_stack.values())).keep

    def _finish(self) -> None:
        for label, sums in self._place_sums.items():
            self._join(label, sums)
        for steps in self._steps.values():
            steps.finish(self._note)
        _add(self._pending)
        for chain in self.chains:
            chain.finish()
        for spans in self._spans.values():
            spans.finish()
        if self.pairs is not None:
            self.pairs.finish()
        self.between.finish()
        self.attention.finish()

    def _join(self, label: str, sums: SharedSums) -> None:
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
        for chain in self.chains:
            chain.add(label, stream, sums.rows(chain.metric.on(whole), is_stream))
        self.largest.finish(label, stream, sums.rows(largest_norm.on(whole), is_stream))

    # --- results ---

    def values(self) -> tuple[PlaceValue, ...]:
        in_order = {name: number for number, (name, _) in enumerate(self.chosen.definitions())}
        sums = self._sums | {(place, BETWEEN): found for place, found in self.between.results().items()}
        keys = sorted(sums, key=lambda key: (self._order[key[0]], in_order[key[1]]))
        found = [self._value(place, metric, sums[place, metric]) for place, metric in keys]
        for stack, reason in self.attention.reasons.items():
            place = Place(stack, 0, ATTENTION)
            missing = (Missing(field="mean", reason=reason),)
            found += [self._value(place, metric, Running(), missing) for metric in self.chosen.attention]
        return tuple(found)

    def _value(self, place: Place, metric: str, sums: Running, missing: tuple[Missing, ...] = ()) -> PlaceValue:
        if not sums.count and not missing:
            missing += (Missing(field="mean", reason="no sequence has a value here"),)
        if sums.count < (least := 3 if metric == BETWEEN else 2):
            reason = f"fewer than {'three' if least == 3 else 'two'} sequences have a value"
            missing += (Missing(field="standard_error", reason=reason),)
        without = self._without.get((place, metric), Running())
        return PlaceValue(
            stack=place.stack,
            depth=place.depth,
            layer=_layer_at(self.stacks[place.stack], place),
            place=place.name,
            metric=metric,
            mean=sums.mean if sums.count else None,
            standard_error=None if missing else sums.standard_error,
            sequences=sums.count,
            on_stream=on_stream(place.name, self.stacks[place.stack].arch.residual),
            missing=missing,
            mean_without_largest=without.mean if without.count else None,
        )

    def similarities(self) -> tuple[SequenceSimilarity, ...]:
        """Of every stack, sequence by sequence at the last place of its stream."""
        last: dict[str, Place] = {}
        for place in sorted(self.between.places, key=self._order.__getitem__):
            if on_stream(place.name, self.stacks[place.stack].arch.residual):
                last[place.stack] = place
        return tuple(SequenceSimilarity(stack=name, values=self.between.values(at)) for name, at in last.items())

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
