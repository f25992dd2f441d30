"""What the numbers of one stack say before any word is chosen: state, shape over depth, where, who, and how sure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import fmean

from oversmooth.results.answer import SEEN, CurvePoint, LayerChange, PartChange
from oversmooth.results.base import SHOWN_DIGITS, Interval, apportioned, interval
from oversmooth.results.measurement import PART_NAMES, Attribution, Measurement, PairSpread

# --- the one table of bands, and the other numbers that decide what is said ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A state of the tokens, and from which mean cosine on it is called so."""

    state: str
    start: float
    reason: str
    """Why the band begins there."""


Bands = tuple[Band, ...]
BANDS: Bands = (
    Band(state="distinct", start=-1.0, reason="less of a token is shared than is its own"),
    Band(state="crowded", start=0.5, reason="from here on as much of a token is shared as is its own"),
    Band(state="collapsed", start=0.9, reason="from here on less than a tenth of a token is its own"),
)
"""Trained runs on digits ended at 0.00 (sharpened), 0.51, 0.96 and 0.98 (smoothed)."""
MOST = 2 / 3
"""Layers do most of a rise if they do twice what all others do together."""
FEW_LAYER_SHAPES = ("at once", "last layers")
FEW_LAYERS = 0.1
"""Share of the layers that counts as few."""
ENOUGH = 4
"""Sequences that an interval needs: with three, Student's factor is 4.3 and the spread itself is unknown by half."""
TIGHT = 0.05
"""Half the width of an interval that more data need not narrow."""
NAMED = 0.2
"""Share of all changes, up and down, from which on a part is named first."""
STANDS_OUT = 1.5
"""How many times the mean change of its run a layer has to make to be named alone."""


INPUT_BANDS: Bands = (
    Band(state="told apart", start=-1.0, reason="less of an input's mean token is shared than is its own"),
    Band(state="alike", start=0.5, reason="from here on as much of it is shared as is its own"),
    Band(state="nearly the same", start=0.9, reason="from here on less than a tenth of it is its own"),
)
"""Of different inputs, by the mean cosine between their mean tokens: the same arithmetic, so the same borders."""


def band_of(level: float, bands: Bands) -> Band:
    return max((band for band in bands if level >= band.start), key=lambda band: band.start, default=bands[0])


# --- the curve: pieces between its turning points, and the shape that they make ---


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring layers, the first and the last included, and what they change together."""

    first: int
    last: int
    change: float

    @property
    def count(self) -> int:
        return self.last - self.first + 1


def pieces_of(levels: Sequence[float]) -> list[Piece]:
    """The curve between its turning points; a way back of less than `SEEN` is no turn."""
    turns, low, high, is_rising = [0], 0, 0, None
    for at, level in enumerate(levels):
        high = at if level >= levels[high] else high
        low = at if level <= levels[low] else low
        if is_rising is not False and levels[high] - level >= SEEN:
            turns, low, is_rising = [*turns, high], at, False
        elif is_rising is not True and level - levels[low] >= SEEN:
            turns, high, is_rising = [*turns, low], at, True
    inner = [at for at in turns if at != 0 and (at != turns[1] or abs(levels[at] - levels[0]) >= SEEN)]
    ends = [0, *inner, len(levels) - 1]
    return [Piece(a, b - 1, levels[b] - levels[a]) for a, b in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class Shape:
    """What the curve over the layers looks like, and the layers that the sentence about it names."""

    name: str
    """flat, falls, falls and rises, rises and falls, at once, last layers, steady, or one layer."""
    first: int = 0
    last: int = 0


def shape_of(levels: Sequence[float], bands: Bands) -> Shape:
    """`levels` at the input and after each layer."""
    count, start, end = len(levels) - 1, levels[0], levels[-1]
    peak, low = max(levels), min(levels)
    top, bottom = levels.index(peak), levels.index(low)
    if count == 1:
        return Shape("one layer")
    if peak - low < SEEN:
        return Shape("flat", 0, count - 1)
    if end - start <= -SEEN and peak - start < SEEN:
        return Shape("falls", 0, count - 1)
    if _turns(peak - start, peak - end, band_of(peak, bands) != band_of(end, bands)):
        return Shape("rises and falls", 0, top - 1)
    if _turns(start - low, end - low, False):
        return Shape("falls and rises", 0, bottom - 1)
    few = max(1, math.ceil(FEW_LAYERS * count))
    base = min(levels[: top + 1])
    for size in range(1, few + 1) if count >= 3 and peak - base >= 2 * SEEN else ():
        stays = min(levels[size:]) - start >= (peak - base) / 2
        if stays and levels[size] - start >= MOST * (peak - base):
            return Shape("at once", 0, size - 1)
        if end - levels[count - size] >= MOST * (peak - base):
            return Shape("last layers", count - size, count - 1)
    return Shape("steady", 0, count - 1)


def _turns(there: float, back: float, is_other_band: bool) -> bool:
    """Whether a way there and back is worth a word: it is seen, and changes the state or a third of it is taken back."""
    return there >= 2 * SEEN and back >= SEEN and (is_other_band or back >= there / 3)


# --- numbers as they are shown: changes are differences of the levels that are shown, and parts add up to them ---


def shown_layers(
    points: Sequence[CurvePoint], layers: Sequence[LayerChange], digits: int = SHOWN_DIGITS
) -> tuple[LayerChange, ...]:
    """The changes with so many digits, so that everything that is shown adds up; `points` begin with the input."""
    levels, found = [round(point.mean, digits) for point in points], []
    for (before, after), layer in zip(pairwise(levels), layers, strict=True):
        change = round(after - before, digits)
        parts = apportioned([value for _, value in layer.parts], change, digits)
        named = tuple((name, part) for (name, _), part in zip(layer.parts, parts, strict=True))
        found.append(LayerChange(label=layer.label, change=change, parts=named))
    return tuple(found)


def shown_total(points: Sequence[CurvePoint]) -> float:
    """Output minus input, both as they are shown."""
    return round(round(points[-1].mean, SHOWN_DIGITS) - round(points[0].mean, SHOWN_DIGITS), SHOWN_DIGITS)


def shown_parts(points: Sequence[CurvePoint], parts: Sequence[PartChange]) -> dict[str, float]:
    """What each part changes in all layers together, adding up to `shown_total`."""
    rounded = apportioned([part.change for part in parts], shown_total(points))
    return {part.part: change for part, change in zip(parts, rounded, strict=True)}


# --- everything that sentences about one stack need ---


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The numbers of one stack."""

    measurement: Measurement
    attribution: Attribution
    bands: Bands = BANDS
    untrained: tuple[float, ...] = field(default=())
    """Its mean cosine at the places of `levels` and after the final norm, untrained; empty where that is not known."""

    @cached_property
    def layers(self) -> tuple[LayerChange, ...]:
        """What each layer changes, and last the final norm; they add up to the total."""
        return changes_of(self.attribution)

    @cached_property
    def levels(self) -> tuple[float, ...]:
        """At the input and after each layer, without the final norm."""
        return tuple(accumulate((layer.change for layer in self.blocks), initial=self.attribution.start))

    @property
    def blocks(self) -> tuple[LayerChange, ...]:
        return self.layers[:-1] if self.norm is not None else self.layers

    @property
    def norm(self) -> float | None:
        """What the final norm changes."""
        return self.layers[-1].change if self.layers[-1].label == "final norm" else None

    @property
    def first_label(self) -> int:
        """The number of the first layer; 0 but for stacks of which only some layers are seen."""
        return int(self.blocks[0].label)

    @property
    def input(self) -> float:
        return self.attribution.start

    @property
    def output(self) -> float:
        return self.attribution.end

    @property
    def before_norm(self) -> float | None:
        return self.levels[-1] if self.norm is not None else None

    @property
    def total(self) -> float:
        return self.attribution.total

    @property
    def band(self) -> Band:
        return band_of(self.output, self.bands)

    @property
    def state(self) -> str:
        return self.band.state

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.levels, self.bands)

    @cached_property
    def pieces(self) -> list[Piece]:
        return pieces_of(self.levels)

    @property
    def main(self) -> Piece:
        """The piece of the curve that a sentence about it names: the largest, or the one with the few layers."""
        if self.shape.name in FEW_LAYER_SHAPES:
            return next(piece for piece in self.pieces if piece.last >= self.shape.first)
        return max(self.pieces, key=lambda piece: abs(piece.change))

    @property
    def is_healthy(self) -> bool:
        """Whether tokens are distinct at the output and after every layer: then nobody is to blame."""
        return self.state == self.bands[0].state and band_of(self.peak, self.bands) == self.band

    # --- the layers that Where and Who speak of ---

    @cached_property
    def scope(self) -> Piece | None:
        """Neighbouring layers; `None` for all of them and the final norm."""
        if self.shape.name in FEW_LAYER_SHAPES:
            first, last = self.shape.first, self.shape.last
            return Piece(first, last, self.levels[last + 1] - self.levels[first])
        has_turns = self.shape.name != "flat" and self.main.count < len(self.blocks)
        return self.main if has_turns else None

    @property
    def scope_change(self) -> float:
        """What is shown as the change of these layers."""
        return self.shown_run(self.scope.first, self.scope.last) if self.scope else shown_total(self.points)

    def shown_run(self, first: int, last: int) -> float:
        """What is shown as the change of these layers, the last one included."""
        before, after = (round(self.levels[at], SHOWN_DIGITS) for at in (first, last + 1))
        return round(after - before, SHOWN_DIGITS)

    @cached_property
    def largest(self) -> int | None:
        """The layer that makes most of the main piece, where it stands out of three or more."""
        main, sign = self.main, 1 if self.main.change > 0 else -1
        at = max(range(main.first, main.last + 1), key=lambda k: sign * self.blocks[k].change)
        stands_out = sign * self.blocks[at].change >= STANDS_OUT * abs(main.change) / main.count
        return at if main.count > 2 and self.shape.name not in (*FEW_LAYER_SHAPES, "flat") and stands_out else None

    @cached_property
    def scope_parts(self) -> dict[str, float]:
        """What each part changes in these layers, as it is shown."""
        if self.scope is None:
            return shown_parts(self.points, self.parts)
        sums: dict[str, float] = {}
        for layer in self.blocks[self.scope.first : self.scope.last + 1]:
            for name, change in layer.parts:
                sums[name] = sums.get(name, 0.0) + change
        names = sorted(sums, key=PART_NAMES.index)
        return dict(zip(names, apportioned([sums[name] for name in names], self.scope_change), strict=True))

    @property
    def peak(self) -> float:
        """The highest level after a layer, or at the output."""
        return max(*self.levels[1:], self.output)

    @cached_property
    def parts(self) -> tuple[PartChange, ...]:
        kinds = sorted(self.attribution.kinds, key=lambda kind: PART_NAMES.index(kind.part))
        enough = self.sequences >= ENOUGH
        return tuple(
            PartChange(part=kind.part, change=kind.change, interval=kind.interval if enough else None) for kind in kinds
        )

    # --- how sure ---

    @property
    def sequences(self) -> int:
        return self.attribution.sequences

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of the output; `None` below four sequences."""
        found = self.attribution.end_interval
        return (max(-1.0, found[0]), min(1.0, found[1])) if found and self.sequences >= ENOUGH else None

    @property
    def is_few(self) -> bool:
        return self.sequences < ENOUGH

    @property
    def is_random(self) -> bool:
        return self.measurement.data.origin == "random ids"

    @property
    def partial(self) -> str:
        """What the reading leaves out of the model; empty where it is whole."""
        return self.measurement.stream.partial if self.measurement.stream is not None else ""

    @property
    def borders(self) -> list[Band]:
        """Bands that begin inside the interval."""
        low, high = self.interval or (self.output, self.output)
        return [band for band in self.bands if low < band.start <= high]

    @property
    def is_tight(self) -> bool:
        """Whether more data would not narrow the interval enough to matter."""
        return self.interval is not None and self.interval[1] - self.interval[0] <= 2 * TIGHT

    @property
    def is_sure(self) -> bool:
        measured = self.measurement
        return not (self.is_few or self.borders or self.is_random or measured.is_partial or self.partial)

    @property
    def limit(self) -> float:
        """A limit of the mean cosine that leaves any block which this model keeps with room."""
        highest = max(self.peak, self.interval[1] if self.interval else -1.0)
        roomy = math.ceil(20 * (highest + SEEN) - 1e-9) / 20
        return round(max(0.05, min(roomy, 0.95 if highest <= 0.95 else 1.0)), 2)

    # --- beside the mean ---

    @cached_property
    def spreads(self) -> tuple[PairSpread | None, ...]:
        """The pairs of tokens at every point, or `None` for each."""
        of_stack = {
            (pair.depth, pair.is_final_norm): pair
            for pair in self.measurement.pairs
            if pair.stack == self.attribution.stack
        }
        last = max((depth for depth, _ in of_stack), default=0)
        keys = [(0, False), *((int(layer.label) + 1, False) for layer in self.blocks)]
        keys += [(last, True)] if self.norm is not None else []
        return tuple(of_stack.get(key) for key in keys)

    @cached_property
    def points(self) -> tuple[CurvePoint, ...]:
        means = [*self.levels, *([self.output] if self.norm is not None else [])]
        labels = ["input", *(layer.label for layer in self.layers)]
        untrained = self.untrained if len(self.untrained) == len(means) else [None] * len(means)
        return tuple(
            CurvePoint(
                label=label,
                mean=mean,
                quantiles=spread.quantiles if spread else None,
                histogram=spread.histogram if spread else (),
                share_above=spread.share_above if spread else None,
                untrained=fresh,
            )
            for label, mean, spread, fresh in zip(labels, means, self.spreads, untrained, strict=True)
        )

    @property
    def rank(self) -> tuple[float, float, int] | None:
        """Effective rank of the centred tokens at input and output, and the largest possible."""
        first, last = self.spreads[0], self.spreads[-1]
        if first is None or last is None or first.rank is None or last.rank is None or last.largest_rank is None:
            return None
        return first.rank, last.rank, round(last.largest_rank)

    @property
    def keeps_rank(self) -> bool:
        """Whether what differs between tokens still points in half as many directions as at the input."""
        return self.rank is not None and self.rank[1] >= 0.5 * self.rank[0]

    @property
    def between(self) -> tuple[float, float] | None:
        """Similarity between sequences at input and output."""
        curve = self.measurement.curve("between", self.attribution.stack)
        final = self.measurement.final("between", self.attribution.stack) or (curve[-1] if curve else None)
        if not curve or final is None or curve[0].mean is None or final.mean is None:
            return None
        return curve[0].mean, final.mean

    @property
    def between_values(self) -> tuple[float, ...]:
        known = {found.stack: found.values for found in self.measurement.similarities}
        return known.get(self.attribution.stack, ())

    @cached_property
    def between_interval(self) -> Interval | None:
        found = similarity_interval(self.between_values)
        return (max(-1.0, found[0]), min(1.0, found[1])) if found is not None else None

    @property
    def has_inputs_alike(self) -> bool:
        """Whether it is clear that different inputs look alike."""
        return self.between_interval is not None and self.between_interval[0] >= INPUT_BANDS[1].start


def similarity_interval(values: Sequence[float]) -> Interval | None:
    """95% interval of their mean, where each is of one sequence with all others, by the jackknife; `None` below four."""
    count = len(values)
    if count < ENOUGH:
        return None
    mean = fmean(values)
    error = 2 / (count - 2) * math.sqrt((count - 1) / count * sum((value - mean) ** 2 for value in values))
    low, high = interval(mean, error, count) or (mean, mean)
    return low, high


def levels_of(attribution: Attribution) -> tuple[float, ...]:
    """The number at the input, after each layer, and after the final norm where there is one."""
    changes = changes_of(attribution)
    return tuple(accumulate((layer.change for layer in changes), initial=attribution.start))


def changes_of(attribution: Attribution) -> tuple[LayerChange, ...]:
    """What each layer changes, and last the final norm; they add up to the total."""
    found = []
    for depth in dict.fromkeys(part.depth for part in attribution.parts):
        parts = [(p.part, p.change) for p in attribution.parts if p.depth == depth and p.part != "final norm"]
        if parts:
            found.append(LayerChange(label=str(depth - 1), change=sum(c for _, c in parts), parts=tuple(parts)))
    last = [(part.part, part.change) for part in attribution.parts if part.part == "final norm"]
    return (*found, *(LayerChange(label=name, change=change, parts=((name, change),)) for name, change in last))


def readings_of(measurement: Measurement, bands: Bands = BANDS) -> tuple[Reading, ...]:
    """One per stack in which some sequence has a value at every place."""
    untrained = {curve.stack: curve.levels for curve in measurement.untrained}
    return tuple(
        Reading(
            measurement=measurement,
            attribution=attribution,
            bands=bands,
            untrained=untrained.get(attribution.stack, ()),
        )
        for attribution in measurement.attributions
    )
