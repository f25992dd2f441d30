"""Every sentence about a model: the answer, what it was run on, what stands out.

The answer is made from a `Reading`, which computes what the numbers say; here that only becomes words.
"""

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from oversmooth.results.answer import SEEN, Analysis, Answer, PartChange, Told
from oversmooth.results.base import (
    DEFAULT_CACHED,
    DEFAULT_NAME,
    DEFAULT_PACKAGE,
    SHIPPED,
    SHOWN_DIGITS,
    Provenance,
    signed,
)
from oversmooth.results.changes import Ablation, Removal
from oversmooth.results.inspection import CLEARLY, Inspection, StreamCheck
from oversmooth.results.measurement import Attribution, DataFacts, DominatingToken, Measurement, TextFacts
from oversmooth.results.reading import (
    BANDS,
    FEW_LAYER_SHAPES,
    INPUT_BANDS,
    NAMED,
    Bands,
    Piece,
    Reading,
    band_of,
    readings_of,
    shown_total,
)

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
    *(
        (0.05, "hardly anything"),
        (0.08, "less than a tenth"),
        (0.13, "about a tenth"),
        (0.18, "about a sixth"),
        (0.23, "about a fifth"),
    ),
    *((0.29, "about a quarter"), (0.37, "about a third"), (0.42, "about two fifths")),
    *((0.58, "about half"), (0.71, "about two thirds"), (0.85, "about three quarters"), (0.94, "about nine tenths")),
)
NOUNS = {
    "text": ("text", "token", "tokens"),
    "image": ("image", "patch", "patches"),
    "audio": ("recording", "frame", "frames"),
}
CROWDED_WORDS = {"crowded": "crowded", "collapsed": "nearly the same"}
LISTED_RUNS = 3
"""Runs of layers that a sentence names one by one."""


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


# --- what a stack is made of, and what it was run on ---


class Nouns:
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


def subject_words(reading: Reading, words: Nouns) -> str:
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


def headline_of(reading: Reading, words: Nouns) -> str:
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
    alike = (
        f", but different {words.noun}s look alike" if reading.state == "distinct" and reading.has_inputs_alike else ""
    )
    return f"{first_large(fact)}{claim}{alike}."


def fact_words(reading: Reading, words: Nouns) -> str:
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
    if state == "crowded" and reading.total <= -SEEN:
        return f"{tokens} are more alike on the way and end crowded"
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


def claim_words(reading: Reading, words: Nouns) -> str:
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


def deck_of(reading: Reading, words: Nouns) -> str:
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
    return " ".join([*said, *_inputs_words(reading, words)])


def _inputs_words(reading: Reading, words: Nouns) -> list[str]:
    """Whether different inputs look alike; nothing where it is clear that they do not."""
    found, border = reading.between_interval, INPUT_BANDS[1].start
    if reading.between is None or max(reading.between[1], found[1] if found else -1.0) < border:
        return []
    how = band_of(found[0] if found else reading.between[1], INPUT_BANDS).state
    sure = f"95% interval {level(found[0])} to {level(found[1])}" if found else "too few for an interval"
    may = "may look alike" if found is None or found[0] < border else f"look {how}"
    return [
        f"Different {words.noun}s {may}: their mean {words.tokens} have a cosine of {level(reading.between[1])} "
        f"({sure}; alike from {border:g} on, nearly the same from {INPUT_BANDS[2].start:g})."
    ]


def _pair_words(reading: Reading, words: Nouns) -> list[str]:
    last = reading.spreads[-1]
    if last is None:
        return []
    low, high = last.quantiles[0], last.quantiles[-1]
    alike = "No pair is" if last.share_above == 0 else f"{_percent(last.share_above)} of pairs are"
    wide = f", and 80% of all pairs lie between {level(low)} and {level(high)}" if high - low >= 0.6 else ""
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
    norm, total = _norm_words(reading), f"{change_words(shown_total(reading.points))} in all"
    named = [(name, change_words(change)) for name, change in _named_runs(reading)]
    if len(named) > 1 or norm:
        total = f"{first_large(', '.join(f'{name} {change}' for name, change in named))}{norm}: {total}"
    elif len(reading.blocks) > 2 and reading.shape.name != "flat":
        total += "; no layer does much more than the others"
    return Told(title=_where_title(reading), text=f"{total}.")


def _norm_words(reading: Reading) -> str:
    """What the final norm changes, where anything of it is shown."""
    if reading.norm is None:
        return ""
    before, after = (round(point.mean, SHOWN_DIGITS) for point in reading.points[-2:])
    return f", the final norm {change_words(after - before)}" if after != before else ""


def _where_title(reading: Reading) -> str:
    if reading.shape.name == "flat":
        return "The final norm" if reading.norm is not None and abs(reading.norm) >= SEEN else "Nowhere"
    place = _place_words(reading)
    if reading.is_healthy:
        way = "rise" if reading.scope_change > 0 else "fall"
        which = "most of the" if few_words(reading) else "the largest" if reading.scope else "the"
        place = f"{which} {way} comes from {place}"
    elif few_words(reading):
        place = f"mostly {place}"
    if reading.largest is None:
        return first_large(place)
    at = reading.largest
    most = f"{place}; layer {at + reading.first_label} most"
    if reading.is_healthy:
        return first_large(most)
    of = change_words(reading.shown_run(reading.main.first, reading.main.last))
    return first_large(f"{most}, {change_words(reading.shown_run(at, at))} of {of}")


def _place_words(reading: Reading) -> str:
    """The layers that Where and Who speak of."""
    count, first = len(reading.blocks), reading.first_label
    if count == 1:
        return "the only layer"
    if few := few_words(reading):
        return few
    if reading.scope is not None:
        return layer_words(first + reading.scope.first, first + reading.scope.last)
    every = "both layers" if count == 2 else f"all {counted(count)} layers"
    has_one_sign = all(layer.change * reading.scope_change >= 0 for layer in reading.blocks)
    return every if has_one_sign else f"{every} together"


def _named_runs(reading: Reading) -> list[tuple[str, float]]:
    """Runs of neighbouring layers with what they change, few enough to be read; all layers are in one of them."""
    first, last, main = reading.first_label, len(reading.blocks) - 1, reading.main
    if reading.shape.name == "flat":
        name = "all layers" if last > 1 else "both layers" if last else "the layer"
        return [(name, reading.shown_run(0, last))]
    split, whole = _split(reading, main), (main.first, main.last)
    pieces = [(piece.first, piece.last) for piece in reading.pieces]
    around = [[(0, main.first - 1)], [(main.last + 1, last)]]
    choices = (
        [run for piece in pieces for run in (split if piece == whole else [piece])],
        pieces,
        [*around[0], *split, *around[1]],
        [*around[0], whole, *around[1]],
    )
    shown = [[(a, b) for a, b in runs if a <= b] for runs in choices]
    runs = next((runs for runs in shown if len(runs) <= LISTED_RUNS), shown[-1])
    return [(layer_words(first + a, first + b), reading.shown_run(a, b)) for a, b in runs]


def _split(reading: Reading, piece: Piece) -> list[tuple[int, int]]:
    """A run of layers around those of it that stand out; the whole run where none does."""
    if reading.shape.name in FEW_LAYER_SHAPES:
        a, b = max(reading.shape.first, piece.first), min(reading.shape.last, piece.last)
    elif piece.count == 2:
        a = b = piece.first
    elif reading.largest is not None:
        a = b = reading.largest
    else:
        return [(piece.first, piece.last)]
    return [(first, last) for first, last in ((piece.first, a - 1), (a, b), (b + 1, piece.last)) if first <= last]


# --- who: parts of the same layers, which add up; opposite effects stand side by side ---


def who_of(reading: Reading) -> Told:
    shown = {part: change for part, change in reading.scope_parts.items() if change}
    up = sorted((part for part in shown if shown[part] > 0), key=lambda part: -shown[part])
    down = sorted((part for part in shown if shown[part] < 0), key=lambda part: shown[part])
    numbers = "; ".join(
        ", ".join(f"{part} {change_words(shown[part])}" for part in side) for side in (up, down) if side
    )
    place = "" if reading.scope is None else f"in {_scope_words(reading)}: "
    total = f"{change_words(reading.scope_change)}{'' if place else ' in all'}"
    gross = sum(abs(change) for change in shown.values())
    sums = f"{numbers}; together {total}" if place else f"{numbers}: {total}"
    text = first_large(f"{place}{sums if len(shown) > 1 else total}.")
    if gross < SEEN:
        return Told(title="No part does much", text=text)
    sides = _sides(reading, [[part for part in side if abs(shown[part]) >= NAMED * gross] for side in (up, down)])
    title = first_large("; ".join(sides)) if sides else "Many parts, each a little"
    return Told(title=title, text=text)


def _scope_words(reading: Reading) -> str:
    """The layers alone, without what few of them they are."""
    assert reading.scope is not None, "all layers need no name"
    first, last = (at + reading.first_label for at in (reading.scope.first, reading.scope.last))
    return layer_words(first, last)


VERBS = {"raise": "raises", "lower": "lowers", "draw": "draws", "push": "pushes"}
"""What one part does, by what several do."""


def _sides(reading: Reading, sides: Sequence[Sequence[str]]) -> list[str]:
    """What raises the mean cosine, and what lowers it; of a healthy model without a word of blame."""
    said: list[str] = []
    tokens = "the mean cosine" if reading.is_healthy else NOUNS[reading.attribution.tokens][2]
    ways = (("raise", ""), ("lower", "")) if reading.is_healthy else (("draw", " together"), ("push", " apart"))
    for (verb, how), names in zip(ways, sides, strict=True):
        if names:
            whom = tokens if not said else "it" if reading.is_healthy else "them"
            said.append(f"{_together(names)} {verb if len(names) > 1 else VERBS[verb]} {whom}{how}")
    return said


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


def sure_of(reading: Reading, words: Nouns) -> Told:
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
        text = f"{first_large(nouns)}; it reaches from {low} to {high}."
    else:
        text = f"{first_large(nouns)}; all of it is {reading.state}."
    if unsure := unsure_parts(reading.parts):
        over = "The" if reading.scope is None else "Over all layers, the"
        text += f" {over} direction of {joined(unsure)} is not clear."
    if reading.measurement.is_partial:
        text += " The run was interrupted."
    return Told(title=title, text=text + random)


def now_of(reading: Reading, words: Nouns) -> Told:
    """The one thing to do next, with its command."""
    commands = Commands(reading.measurement.provenance, reading.measurement.data)
    shape = reading.shape
    if reading.is_random:
        return Told(title="Measure real text first.", command=commands.run("measure", more="--data texts.txt"))
    if reading.is_few or (reading.borders and not reading.is_tight) or reading.measurement.is_partial:
        return Told(title=f"Measure more {words.noun}s first.", command=commands.more(words.noun, reading.sequences))
    if reading.partial:
        return Told(title="Look at what the reading leaves out.", command=commands.run("verify"))
    if reading.state == "distinct" and reading.has_inputs_alike:
        title = f"See where different {words.noun}s become alike."
        return Told(title=title, command=commands.run("measure", more="--metrics between", given=', metrics="between"'))
    if reading.state == "distinct" and band_of(reading.peak, reading.bands) == reading.band:
        return Told(
            title="Nothing to fix. To keep it so, check it in CI:",
            command=commands.run(
                "gate", more=f"--max-cosine {reading.limit:.2f}", given=f', rules={{"max_cosine": {reading.limit:.2f}}}'
            ),
        )
    if shape.name in FEW_LAYER_SHAPES:
        first, last = shape.first + reading.first_label, shape.last + reading.first_label
        named = layer_words(first, last)
        return Told(title=f"See what {named} {'is' if first == last else 'are'} worth.", command=commands.run("ablate"))
    return Told(title="See what each layer is worth before changing any.", command=commands.run("ablate"))


def target_word(target: str) -> str:
    """A model as it is given to a command."""
    parts = target.replace("\\", "/").split("/")
    if tuple(parts[-3:]) == SHIPPED:
        return SHIPPED[-1]
    return DEFAULT_NAME if {DEFAULT_PACKAGE, DEFAULT_CACHED} & set(parts) else shlex.quote(target)


HELD = re.compile(r"[\d,]+ (text|picture)s?|a (table of|data set with) .*")
"""How data that were held in Python are described: they have no name that a command could take."""


class Commands:
    """Commands to paste, for the same model and data."""

    def __init__(self, provenance: Provenance, data: DataFacts):
        is_held = data.origin == "given" and HELD.fullmatch(data.description) is not None
        self.module = (
            "model" if provenance.source == "module" else repr(target_word(provenance.target)) if is_held else ""
        )
        """What functions of Python are called with, where no command of the shell has the model or its data."""
        self.target = f" {target_word(provenance.target)}"
        self.has_lines = any("--per-line" in note for note in data.notes)
        """Whether the lines of a text file would make more texts than its paragraphs."""
        of_ids = "token ids of "
        self.data = ""
        if data.origin == "given":
            is_ids = data.description.startswith(of_ids)
            self.data = f" --{'ids' if is_ids else 'data'} {shlex.quote(data.description.removeprefix(of_ids))}"

    def run(self, verb: str, more: str = "", given: str = "") -> str:
        """With options of the shell, or for a module what they are in Python."""
        if self.module:
            return f"osm.{verb}({self.module}, data{given})"
        data = "" if "--data" in more else self.data
        return f"oversmooth {verb}{self.target}{data}{' ' + more if more else ''}"

    def more(self, noun: str, count: int) -> str:
        """The same measurement on more inputs."""
        wanted = max(32, 4 * count)
        if self.module:
            return f"osm.analyze({self.module}, data)   # {wanted} {noun}s or more"
        if self.has_lines:
            return f"oversmooth report{self.target}{self.data} --per-line"
        data = self.data or f" --data {'images/' if noun == 'image' else 'texts.txt'}"
        return f"oversmooth report{self.target}{data} --max-samples {wanted}"


# --- all of it ---


def answers_of(measurement: Measurement, bands: Bands = BANDS) -> tuple[Answer, ...]:
    """One answer per stack, in the order in which they run; none where no sequence has a value at every place."""
    readings = readings_of(measurement, bands)
    return tuple(_answer(reading, is_only=len(readings) == 1) for reading in readings)


def _answer(reading: Reading, *, is_only: bool) -> Answer:
    words, note = Nouns(reading, is_only), reading.measurement.provenance.note
    return Answer(
        model=reading.measurement.provenance.name,
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
        between_interval=reading.between_interval,
        between_values=reading.between_values,
        untrained_missing=reading.measurement.untrained_missing,
        limit=reading.limit,
        headline=headline_of(reading, words),
        deck=f"{note} {deck_of(reading, words)}".strip(),
        note=note,
        where=where_of(reading),
        who=who_of(reading),
        sure=sure_of(reading, words),
        now=now_of(reading, words),
    )


def first_of(answers: Sequence[Answer]) -> Answer | None:
    """The one that speaks for the model: the decoder's, or the one whose tokens are most alike."""
    decoders = [answer for answer in answers if stack_words(answer.stack) == "the decoder" and len(answers) > 1]
    return max(decoders or answers, key=lambda answer: answer.output, default=None)


# --- what stands beside the answer: whether the stream was followed, which token outweighs all others ---

OUTWEIGHS = 10.0
"""Norm over the median norm from which on one token is named."""
ONE_CHANNEL = 0.5
"""Share of its squared norm from which on one channel is said to make the token large."""


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


def dominating_words(found: DominatingToken) -> str:
    """Which token outweighs all others, where and by whom; empty where none does."""
    if found.ratio < OUTWEIGHS:
        return ""
    stack = f"{found.stack}: " if found.stack else ""
    word = f" {found.word!r}" if found.word else ""
    where = f"position {found.position}" + (
        "" if found.position_share > 0.99 else f" (in {found.position_share:.0%} of sequences)"
    )
    made = "" if found.made_by is None or not found.made_at_depth else _made_words(found.made_by, found.made_at_depth)
    place = "at the input" if found.depth == 0 else f"after layer {found.depth - 1}"
    return (
        f"{stack}{_size_words(found)} {place}: the token{word} at {where} is {found.ratio:.0f} times as long "
        f"as the median{_channel_words(found)}.{made} The mean cosine counts it as one token among the others."
    )


def _made_words(part: str, depth: int) -> str:
    return f" The {part} of layer {depth - 1} makes it."


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


# --- what else stands out in a measurement ---

LEAST_UNDONE = 0.1
"""Least change of the mean cosine that another can undo."""
LEFT_OVER = 0.35
"""Share of the smaller of two opposite changes up to which what is left counts as nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Highlight:
    """One sentence, and the section of the page that has its numbers."""

    text: str
    section: str = ""
    """Its id; empty where there is nothing to look at."""
    title: str = ""


def findings(measurement: Measurement) -> tuple[Highlight, ...]:
    """Changes that the next sub-block takes back, and tokens that outweigh the others; often nothing."""
    found = [text for attribution in measurement.attributions for text in _undone(attribution)]
    found += [text for token in measurement.dominating if (text := dominating_words(token))]
    return tuple(Highlight(text=text) for text in found)


def _undone(attribution: Attribution) -> Iterator[str]:
    """The largest change that the next sub-block of the same layer takes back."""
    pairs = [(a, b) for a, b in pairwise(attribution.parts) if a.depth == b.depth and _takes_back(a.change, b.change)]
    if not pairs:
        return
    a, b = max(pairs, key=lambda pair: min(abs(pair[0].change), abs(pair[1].change)))
    others = sorted({part.depth - 1 for part, _ in pairs} - {a.depth - 1})
    more = f"; so in {_layer_list(others)}" if others else ""
    stack = f"{attribution.stack}: " if attribution.stack else ""
    changes = f"{change_words(a.change)}, then {change_words(b.change)} of the mean cosine"
    yield f"{stack}In layer {a.depth - 1} the {b.part} undoes the {a.part}: {changes}{more}."


def _takes_back(first: float, second: float) -> bool:
    smaller = min(abs(first), abs(second))
    return first * second < 0 and smaller >= LEAST_UNDONE and abs(first + second) <= LEFT_OVER * smaller


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
TOO_SMALL = "adds next to nothing"
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
    """How far sub-blocks turn tokens on these data; what one is worth, only removing it shows."""
    parts = [reading for reading in readings if reading.part != "block"]
    if not parts:
        return ""
    least, most = (pick(parts, key=lambda reading: reading.angle) for pick in (min, max))
    text = f"Sub-blocks turn tokens by {_turn_words(least)} to {_turn_words(most)}."
    reasons = []
    for reason in dict.fromkeys(reading.reason for reading in parts if reading.reason):
        named = [reading for reading in parts if reading.reason == reason]
        kinds = dict.fromkeys((reading.stack, reading.part) for reading in named)
        where = [
            f"{stack + ' ' if stack else ''}{part} of {_layer_list(_layers(named, stack, part))}"
            for stack, part in kinds
        ]
        reasons.append(f"{first_large(reason)}: {', '.join(where)}.")
    return " ".join([text, *reasons])


def _turn_words(reading: PartReading) -> str:
    stack = f"{reading.stack}, " if reading.stack else ""
    return f"{reading.angle:.0f} degrees ({stack}{reading.part} of layer {reading.depth - 1})"


def _layers(readings: Sequence[PartReading], stack: str, part: str) -> list[int]:
    return [reading.depth - 1 for reading in readings if (reading.stack, reading.part) == (stack, part)]


def _layer_list(layers: Sequence[int]) -> str:
    """`layer 3`, `layers 3-5, 9`, or only how many where that would be a long list."""
    runs = []
    for _, group in groupby(enumerate(sorted(layers)), key=lambda item: item[1] - item[0]):
        run = [layer for _, layer in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    if len(runs) > LISTED:
        return f"{len(layers)} layers"
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(runs)}"


# --- what removing parts costs ---

CHEAPEST = 3
"""Parts that are named as the cheapest to remove."""


def ablation_words(found: Ablation) -> list[str]:
    """The conclusion: the parts that cost least and most, one kind beside the other, and a number that tells them apart."""
    known = [item for item in found.removals if item.increase is not None]
    if not known:
        return ["No part could be removed."]
    lines = []
    for part in dict.fromkeys(item.part for item in known):
        of_part = sorted((item for item in known if item.part == part), key=lambda item: item.increase or 0.0)
        cheapest = joined([_cost_words(item) for item in of_part[: min(CHEAPEST, (len(of_part) + 1) // 2)]])
        dearest = f"; dearest: {_cost_words(of_part[-1])}" if len(of_part) > 1 else ""
        lines.append(f"{first_large(part)}, cheapest to remove: {cheapest}{dearest}.")
    error = found.whole.standard_error
    if error is not None and (least := min(item.increase or 0.0 for item in known)) < 2 * error:
        lines.append(f"Increases near {max(least, 0.0):.2g} are within the spread of the loss itself (±{error:.2g}).")
    return lines


def _cost_words(item: Removal) -> str:
    stack = f"{item.stack} " if item.stack else ""
    return f"{stack}layer {item.layer} ({signed(item.increase or 0.0, 3)})"


# --- one sentence about an analysis, for cards and lists ---


def headline(analysis: Analysis) -> str:
    """The answer's headline; of a model that was not run, why nothing is known about its tokens."""
    if (answer := analysis.answer) is not None:
        return answer.headline
    if analysis.measurement is not None:
        return no_answer_words(analysis.measurement)
    reason = next((missing.reason for missing in analysis.missing if missing.field == "measurement"), "")
    return f"Not measured: {reason}." if reason else "Not measured."


def no_answer_words(measurement: Measurement) -> str:
    """Why there is no answer."""
    return f"No sequence could be measured: {'; '.join(measurement.problems) or 'tokens are zero at some place'}."


ONLY = 0.9
"""From this positivity on, a map is said to do one thing only."""


def weights_words(inspection: Inspection) -> str:
    """What the value maps prefer beyond chance; a number of the weights never makes a headline."""
    nulls = [layer.null for layer in inspection.layers if layer.null is not None and layer.null.positivity is not None]
    if not nulls:
        return "Positivity needs all eigenvalues, and only the extremes are known."
    values = [null.positivity or 0.0 for null in nulls]
    clear = [
        value
        for value, null in zip(values, nulls, strict=True)
        if abs(value) > CLEARLY * (null.positivity_spread or 0.0)
    ]
    smooth, sharpen, count = sum(value > 0 for value in clear), sum(value < 0 for value in clear), len(values)
    if max(values) <= -ONLY:
        found = f"All {count} value maps prefer sharpening (positivity {signed(max(values))} or below)."
    elif min(values) >= ONLY:
        found = f"All {count} value maps prefer smoothing (positivity {signed(min(values))} or above)."
    else:
        rest = f", {count - len(clear)} neither" if count > len(clear) else ""
        found = f"Of {count} value maps, {smooth} prefer smoothing, {sharpen} sharpening{rest}."
    if any(stack.is_causal for stack in inspection.stacks):
        return f"{found} In a causal model this promises nothing about features."
    return f"{found} This does not predict what one pass does to features (oversmooth measure does)."
