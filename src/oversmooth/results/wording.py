"""Every sentence about a model: headlines, what stands out, how data are described.

A finding is a rule about numbers that are on the page already; it computes nothing new. Where no rule applies, that is
said too.

The survey is the file `reference.json` beside this module, written by `benchmarks/survey_reference.py` from the models
that were at hand; it is a scale to read numbers by, not a norm that a model ought to meet.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby, pairwise
from statistics import median
from typing import Any, Literal

from oversmooth.results.answer import Analysis
from oversmooth.results.base import signed
from oversmooth.results.inspection import Inspection, StreamCheck
from oversmooth.results.measurement import Attribution, DataFacts, DominatingToken, KindChange, Measurement, TextFacts
from oversmooth.results.prediction import Prediction

# --- what was measured, in sentences of one quantity each; the same ones in the terminal ---

WITH_DEPTH = {"smoothing": "Smoother", "sharpening": "Sharper", "no clear change": "No clear change"}
DOES = {"smoothing": "smooths", "sharpening": "sharpens", "no clear change": "makes no clear change"}
NAMES = {
    "feed-forward": "the feed-forward",
    "norm after attention": "the norm after attention",
    "norm after feed-forward": "the norm after the feed-forward",
    "final norm": "the final norm",
    "between blocks": "what acts between blocks",
}
OUTWEIGHS = 10.0
"""Norm over the median norm from which on one token is said to decide numbers that depend on scale."""
ONE_CHANNEL = 0.5
"""Share of its squared norm from which on one channel is said to make the token large."""
PLURAL = {"smoothing": "smooth", "sharpening": "sharpen", "no clear change": "make no clear change"}


def depth_words(attribution: Attribution) -> str:
    """What happens from embedding to output, and how sure that is."""
    lead = WITH_DEPTH.get(attribution.direction, "Changed")
    has_norm = any(kind.part == "final norm" for kind in attribution.kinds)
    where = "from embedding to output" + (", the final norm included" if has_norm else "")
    change = f"{attribution.quantity} changes by {signed(attribution.total)} {where}"
    stack = f"{attribution.stack}: " if attribution.stack else ""
    if attribution.sequences < 2:
        return f"{stack}{lead} with depth on the one sequence measured, which gives no interval: {change}."
    if attribution.interval is None:  # a result of an older version
        return f"{stack}{lead} with depth: {change}."
    low, high = attribution.interval
    sure = f"(95% interval {signed(low)} to {signed(high)}, {attribution.sequences} sequences)"
    return f"{stack}{lead} with depth: {change} {sure}."


def short_depth_words(attribution: Attribution) -> str:
    """The same in two lines of a page; what it was counted on stands below, in `extent_words`."""
    lead = WITH_DEPTH.get(attribution.direction, "Changed")
    stack = f"{attribution.stack}: " if attribution.stack else ""
    change = f"{attribution.quantity} changes by {signed(attribution.total)} from embedding to output"
    if attribution.interval is None:
        once = " on the one sequence measured" if attribution.sequences == 1 else ""
        return f"{stack}{lead} with depth{once}: {change}."
    low, high = attribution.interval
    return f"{stack}{lead} with depth: {change} (95% interval {signed(low)} to {signed(high)})."


def extent_words(attribution: Attribution) -> str:
    """What the change from embedding to output was counted on."""
    has_norm = any(kind.part == "final norm" for kind in attribution.kinds)
    where = "The final norm is included; " if has_norm else ""
    if attribution.sequences < 2:
        text = f"{where}one sequence gives no interval"
    else:
        text = f"{where}{attribution.sequences} sequences were measured"
    return f"{text[:1].upper()}{text[1:]}."


def who_words(attribution: Attribution) -> str:
    """Who does it: every kind of sub-block with what it changes, those that smooth most first."""
    kinds = sorted(attribution.kinds, key=lambda kind: kind.change)
    words = "; ".join(_kind_words(kind) for kind in kinds)
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def _kind_words(kind: KindChange) -> str:
    name = NAMES.get(kind.part, kind.part)
    verbs = PLURAL if kind.part == "other blocks" else DOES
    change = signed(kind.change)
    direction = kind.direction if float(change) else "no clear change"  # sure, and too small to be written
    return f"{name} {verbs[direction]} ({change})"


def stream_words(stream: StreamCheck) -> str:
    """Whether the features that are measured are the model's own."""
    if stream.broken:
        first, second = stream.broken[0]
        return f"Residual stream: {second} does not follow from {first}. Measurements are refused."
    between = f", with something between the blocks at {len(stream.between)} of them" if stream.between else ""
    partial = f" {stream.partial[:1].upper()}{stream.partial[1:]}." if stream.partial else ""
    more = (
        f" At {len(stream.unmatched)} sums the block adds more than the output of one module."
        if stream.unmatched
        else ""
    )
    return f"Residual stream: followed through {stream.links} links{between} and {stream.sums} sums.{more}{partial}"


def ends_words(measurement: Measurement, metric: str, name: str) -> str:
    """One metric at both ends, without a judgement."""
    points = [point.mean for point in measurement.curve(metric) if point.mean is not None]
    final = measurement.final(metric)
    if not points:
        return ""
    if final is not None and final.mean is not None:
        return f"{name} goes from {points[0]:.2f} to {points[-1]:.2f}, and to {final.mean:.2f} behind the final norm."
    return f"{name} goes from {points[0]:.2f} to {points[-1]:.2f}."


def dominating_words(found: DominatingToken) -> str:
    """Which token outweighs all others, where and by whom; empty where none does."""
    if found.ratio < OUTWEIGHS:
        return ""
    stack = f"{found.stack}: " if found.stack else ""
    word = f" {found.word!r}" if found.word else ""
    where = f"position {found.position}" + (
        "" if found.position_share > 0.99 else f" (in {found.position_share:.0%} of sequences)"
    )
    made = "" if found.made_by is None else f" The {found.made_by} of depth {found.made_at_depth} makes it."
    return (
        f"{stack}{_size_words(found)} at depth {found.depth}: the token{word} at {where} is {found.ratio:.0f} times as long "
        f"as the median{_channel_words(found)}.{made} It decides HFC/LFC there, but nothing that is said at unit length."
    )


def _size_words(found: DominatingToken) -> str:
    """One channel that is huge is a massive activation; otherwise it is the token as a whole."""
    return "Massive activation" if found.channel_share >= ONE_CHANNEL else "One token outweighs the others"


def _channel_words(found: DominatingToken) -> str:
    if found.channel_share < ONE_CHANNEL:
        return ""
    share = "nearly all" if found.channel_share >= 0.95 else f"{found.channel_share:.0%}"
    return f", and {share} of its squared length lies in channel {found.channel}"


# --- what a model was run on, in words for the terminal and for the page ---


def how_much(data: DataFacts) -> str:
    """How many sequences of what."""
    skipped = f", {data.skipped} skipped (fewer than two tokens)" if data.skipped else ""
    tokens = f", {data.tokens} tokens" if data.tokens else ""
    return f"{data.sequences} sequence{'s' * (data.sequences != 1)}{tokens} of {data.description}{skipped}"


def how_made(data: DataFacts) -> list[str]:
    """How the data became inputs, how much of a text was used, and what else was done; a line each."""
    lines = [f"Preprocessing: {data.preprocessing}."] if data.preprocessing else []
    lines += [text_words(data.text)] if data.text is not None else []
    return [*lines, *data.notes]


def text_words(text: TextFacts) -> str:
    """How much of a text was used, and how much of it the tokenizer knows."""
    of_all = f"of {text.characters:,} " if text.characters is not None else ""
    share = f" ({text.characters_used / text.characters:.1%})" if text.characters else ""
    rest = "" if text.characters is not None else "; the data were not read to their end"
    return (
        f"Text: {text.characters_used:,} {of_all}characters used{share}{rest}; {text.unknown_tokens:,} of {text.tokens:,} "
        f"tokens unknown ({text.unknown_share:.1%})."
    )


# --- what stands out in a measurement, a sentence each, with the place where the numbers are ---

JUMP = 0.5
"""Least change of log(HFC/LFC) across one layer that counts as a jump: a factor of 1.6."""
JUMP_OVER_MEDIAN = 4.0
"""And how many times the median layer it has to be."""
LEAST_UNDONE_CHANGE = 0.3
"""Least change of log(HFC/LFC) that another can undo: a factor of 1.35."""
LEFT_OVER = 0.35
"""Share of the smaller of two opposite changes up to which what is left counts as nothing."""
NOTHING_STANDS_OUT = (
    "Nothing stands out: no layer jumps, no token outweighs the others, nothing is undone by its neighbour."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Highlight:
    """One sentence, and the section of the page that has its numbers."""

    text: str
    section: str = ""
    """Its id; empty where there is nothing to look at."""
    title: str = ""


def findings(measurement: Measurement) -> tuple[Highlight, ...]:
    """Everything that stands out, or one sentence that nothing does."""
    found = [
        Highlight(text=text, section="attribution", title=measurement.attribution_title)
        for attribution in measurement.shown_attributions
        for text in _of_stack(attribution)
    ]
    found += [
        Highlight(text=text, section="scale", title="Tokens as they are")
        for token in measurement.dominating
        if (text := dominating_words(token))
    ]
    return tuple(found) or (Highlight(text=NOTHING_STANDS_OUT),)


def _of_stack(attribution: Attribution) -> Iterator[str]:
    name = f"{attribution.stack}: " if attribution.stack else ""
    layers = changes_by_depth(attribution)
    yield from (name + text for text in _jumps(layers))
    yield from (name + text for text in _undone(layers))
    yield from (name + text for text in _undone_inside(attribution))
    yield from (name + text for text in _opposed(attribution))


def changes_by_depth(attribution: Attribution) -> dict[int, float]:
    """What every layer changed, all of its sub-blocks together, the final norm left out."""
    changes: dict[int, float] = {}
    for part in attribution.parts:
        if part.part != "final norm":
            changes[part.depth] = changes.get(part.depth, 0.0) + part.change
    return changes


def _jumps(layers: dict[int, float]) -> Iterator[str]:
    """The layer that changes most, where it is far from the others."""
    if len(layers) < 3:
        return
    depth = max(layers, key=lambda at: abs(layers[at]))
    typical = median(abs(change) for change in layers.values())
    if abs(layers[depth]) < max(JUMP, JUMP_OVER_MEDIAN * typical):
        return
    verb = "smooths" if layers[depth] < 0 else "sharpens"
    yield (
        f"Jump at depth {depth}: this layer alone {verb} by {signed(layers[depth])}, "
        f"where the median layer changes {typical:.2f}."
    )


def _undone(layers: dict[int, float]) -> Iterator[str]:
    """The largest pair of neighbours of which the second takes back what the first did."""
    pairs = [(a, b) for a, b in pairwise(sorted(layers)) if _takes_back(layers[a], layers[b])]
    if not pairs:
        return
    a, b = max(pairs, key=lambda pair: min(abs(layers[pair[0]]), abs(layers[pair[1]])))
    more = {1: "", 2: " So does one other pair."}.get(len(pairs), f" So do {len(pairs) - 1} other pairs.")
    yield f"Depth {b} undoes depth {a}: {signed(layers[a])}, then {signed(layers[b])}.{more}"


def _undone_inside(attribution: Attribution) -> Iterator[str]:
    """The same for the sub-blocks of one layer."""
    pairs = [(a, b) for a, b in pairwise(attribution.parts) if a.depth == b.depth and _takes_back(a.change, b.change)]
    if not pairs:
        return
    a, b = max(pairs, key=lambda pair: min(abs(pair[0].change), abs(pair[1].change)))
    others = sorted({part.depth for part, _ in pairs} - {a.depth})
    more = f" So at depth {', '.join(map(str, others))}." if others else ""
    first, second = NAMES.get(b.part, b.part), NAMES.get(a.part, a.part)
    yield (f"At depth {a.depth} {first} undoes {second}: {signed(a.change)}, then {signed(b.change)}.{more}")


def _takes_back(first: float, second: float) -> bool:
    smaller = min(abs(first), abs(second))
    return first * second < 0 and smaller >= LEAST_UNDONE_CHANGE and abs(first + second) <= LEFT_OVER * smaller


def _opposed(attribution: Attribution) -> Iterator[str]:
    """Two kinds of sub-blocks that pull against each other until little is left."""
    clear = [kind for kind in attribution.kinds if kind.direction in ("smoothing", "sharpening")]
    smooths = min(clear, key=lambda kind: kind.change, default=None)
    sharpens = max(clear, key=lambda kind: kind.change, default=None)
    if smooths is None or sharpens is None or smooths.change >= 0 or sharpens.change <= 0:
        return
    smaller = min(-smooths.change, sharpens.change)
    if smaller >= LEAST_UNDONE_CHANGE and abs(smooths.change + sharpens.change) <= LEFT_OVER * smaller:
        first, second = (NAMES.get(kind.part, kind.part) for kind in (smooths, sharpens))
        yield (
            f"{first[:1].upper()}{first[1:]} and {second} work against each other: {signed(smooths.change)} and "
            f"{signed(sharpens.change)}."
        )


# --- what each sub-block does to the stream, read off a measurement of steps ---

PART_AT = {
    "attn_sum": "attention",
    "cross_sum": "cross-attention",
    "ffn_sum": "feed-forward",
    "other_sum": "other",
    "block": "block",
}
"""Where a step ends, and which part of a block it is."""
NEEDED = ("influence", "influence_smoothing", "influence_shared", "influence_differing", "contribution", "ceiling")
SMALL = 0.005
"""An influence below this turns tokens by less than 6 degrees on average, and counts as little."""
MOSTLY = 0.8
"""From this share of the influence on, it is made of one thing only."""
TAKEN_BACK_SHARE = 0.5
"""From this share on, the next sub-block takes back more than it leaves."""
LISTED = 5
"""Runs of layers that a sentence names one by one."""
TOO_SMALL = "too small to matter"
LENGTHENS = "only lengthens or shortens tokens"
SHARED = "moves only what all tokens share"
TAKEN_BACK = "undone by the next one"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReading:
    """One sub-block, or a whole block, on the data of the measurement."""

    stack: str
    depth: int
    part: str
    influence: float
    smoothing: float
    shared: float
    differing: float
    """The three parts of the influence; they add up to it."""
    contribution: float
    ceiling: float
    undone: float | None
    """`None` where nothing follows."""

    @property
    def angle(self) -> float:
        """The turn of a token that has this influence, in degrees."""
        return math.degrees(math.acos(max(-1.0, 1 - self.influence)))

    @property
    def reason(self) -> str:
        """Why the part is weak; empty where it is not."""
        if self.ceiling < SMALL:
            return TOO_SMALL
        if self.influence < SMALL:
            return LENGTHENS
        if self.undone is not None and self.undone >= TAKEN_BACK_SHARE:
            return TAKEN_BACK
        return SHARED if self.shared >= MOSTLY * self.influence else ""


def read_parts(measurement: Measurement) -> tuple[PartReading, ...]:
    """Every sub-block and block in order; none where the measurement has no steps."""
    found: dict[tuple[str, int, str], dict[str, float]] = {}
    for value in measurement.values:
        if value.place in PART_AT and value.mean is not None:
            found.setdefault((value.stack, value.depth, PART_AT[value.place]), {})[value.metric] = value.mean
    stacks, parts = list(dict.fromkeys(key[0] for key in found)), list(PART_AT.values())
    keys = sorted(found, key=lambda key: (stacks.index(key[0]), key[1], parts.index(key[2])))
    return tuple(
        PartReading(
            stack=stack,
            depth=depth,
            part=part,
            influence=numbers["influence"],
            smoothing=numbers["influence_smoothing"],
            shared=numbers["influence_shared"],
            differing=numbers["influence_differing"],
            contribution=numbers["contribution"],
            ceiling=numbers["ceiling"],
            undone=numbers.get("undone"),
        )
        for stack, depth, part in keys
        for numbers in [found[stack, depth, part]]
        if all(name in numbers for name in NEEDED)
    )


def worth_words(readings: Sequence[PartReading]) -> str:
    """One sentence: which sub-blocks do little on these data, and why."""
    parts = [reading for reading in readings if reading.part != "block"]
    weak = [reading for reading in parts if reading.reason]
    if not weak:
        return f"Each of the {len(parts)} sub-blocks turns what differs between tokens, and none is undone by the next."
    reasons = []
    for reason in dict.fromkeys(reading.reason for reading in weak):
        named = [reading for reading in weak if reading.reason == reason]
        kinds = dict.fromkeys((reading.stack, reading.part) for reading in named)
        where = [
            f"{stack + ' ' if stack else ''}{part} of {_depths([r.depth for r in named if (r.stack, r.part) == key])}"
            for key in kinds
            for stack, part in [key]
        ]
        reasons.append(f"{reason}: {', '.join(where)}")
    return f"{len(weak)} of {len(parts)} sub-blocks do little on these data. {_first_large('; '.join(reasons))}."


def _first_large(text: str) -> str:
    return text[:1].upper() + text[1:]


def _depths(depths: Sequence[int]) -> str:
    """`layer 3`, `layers 3-5, 9`, or only how many where that would be a long list; layers count from 0."""
    layers = sorted(depth - 1 for depth in depths)
    runs = []
    for _, group in groupby(enumerate(layers), key=lambda item: item[1] - item[0]):
        run = [layer for _, layer in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    if len(runs) > LISTED:
        return f"{len(layers)} layers"
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(runs)}"


# --- where known models lie: the range of a quantity over all layers of the surveyed models with the ---

Quantity = Literal["tendency", "exponent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRange:
    """Smallest and largest value over all layers of the surveyed models of one kind."""

    low: float
    high: float
    residual: str
    """pre or post: where the norm stands."""
    models: tuple[str, ...]

    @property
    def words(self) -> str:
        return f"{signed(self.low)} to {signed(self.high)}"

    @property
    def cell(self) -> str:
        """The same in a table, where it must not take two lines."""
        return f"{signed(self.low)}..{signed(self.high)}"

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def known_range(quantity: Quantity, residual: str) -> KnownRange | None:
    """`None` where no surveyed model has this residual form."""
    kind = [model for model in _survey()["models"] if model["residual"] == residual and model[quantity]]
    values = [value for model in kind for value in model[quantity]]
    if not values:
        return None
    names = tuple(model["model"] for model in kind)
    return KnownRange(low=min(values), high=max(values), residual=residual, models=names)


def range_words(quantity: Quantity, residuals: Sequence[str]) -> str:
    """A sentence that says which models the ranges on a page are of; empty where there are none."""
    found = [known for residual in dict.fromkeys(residuals) if (known := known_range(quantity, residual))]
    if not found:
        return ""
    kinds = "; ".join(f"{known.residual}-norm: {', '.join(known.models)}" for known in found)
    return (
        f"Known range of the {quantity}: all layers of the models in a kept survey of what was at hand ({kinds}). It says "
        "where known models lie, not where a model ought to."
    )


@cache
def _survey() -> dict[str, Any]:
    text = (files(__package__) / "reference.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


# --- the answer in a few sentences: what was measured first, then what the theory says ---


def headline(analysis: Analysis) -> str:
    """One sentence: what was measured from embedding to output; of a model that was not run, what its weights tend to."""
    if analysis.measurement is None:
        return _weights(analysis.inspection)
    if not analysis.measurement.shown_attributions:
        return "No sequence could be measured."
    stream = analysis.measurement.stream
    if stream is not None and stream.partial:
        return f"{stream.partial[:1].upper()}{stream.partial[1:]}."
    is_random = analysis.measurement.data.origin == "random ids"
    where = "On random token ids: " if is_random else ""
    return where + short_depth_words(analysis.measurement.shown_attributions[0])


def summary(analysis: Analysis) -> str:
    """The sentences below it: who does it, the mean cosine, and what the theory says in its own words."""
    parts = []
    if analysis.measurement is not None and analysis.measurement.shown_attributions:
        parts += [
            extent_words(analysis.measurement.shown_attributions[0]),
            who_words(analysis.measurement.shown_attributions[0]),
            ends_words(analysis.measurement, "cosine", "Mean cosine"),
        ]
    if analysis.prediction is not None:
        parts.append(_predicted(analysis.prediction))
    elif analysis.measurement is not None:
        parts.append(_weights(analysis.inspection))
    return " ".join(part for part in parts if part)


def _predicted(prediction: Prediction) -> str:
    """What repetition would do, in its own words, and how often one real pass has that sign."""
    layers = prediction.layers
    counts = {word: sum(layer.regime == word for layer in layers) for word in ("smoothing", "sharpening")}
    clear = [layer for layer in layers if layer.direction in counts and layer.regime in counts]
    seen = f" One real pass has that sign in {sum(layer.direction == layer.regime for layer in clear)} of {len(clear)}."
    sharpen = f" and {counts['sharpening']} would sharpen" if counts["sharpening"] else ""
    lead = (
        f"Iterated at fixed attention, {counts['smoothing']} of {len(layers)} attention layers would smooth{sharpen}."
    )
    return lead + (seen if clear else "")


def _weights(inspection: Inspection) -> str:
    known = [layer.tendency for layer in inspection.layers if layer.tendency is not None]
    smoothing, neither = sum(1 for tendency in known if tendency > 0), known.count(0)
    rest = f", of {neither} to neither" if neither else ""
    return f"The weights of {smoothing} of {len(known)} layers tend to smooth{rest}."


def colour_of(direction: str | None, change: float) -> str:
    """The colour of what happens; by the sign in results of older versions, which have no direction."""
    direction = direction or ("smoothing" if change < 0 else "sharpening")
    return {"smoothing": "var(--smooth)", "sharpening": "var(--sharpen)"}.get(direction, "var(--neutral)")
