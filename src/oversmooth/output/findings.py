"""What stands out in a measurement, a sentence each, with the place where the numbers are.

A finding is a rule about numbers that are on the page already; it computes nothing new. Where no rule applies, that is
said too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from oversmooth.output.numbers import signed
from oversmooth.output.words import NAMES, dominating_words
from oversmooth.results import Attribution, Measurement

JUMP = 0.5
"""Least change of log(HFC/LFC) across one layer that counts as a jump: a factor of 1.6."""
JUMP_OVER_MEDIAN = 4.0
"""And how many times the median layer it has to be."""
UNDONE = 0.3
"""Least change of log(HFC/LFC) that another can undo: a factor of 1.35."""
LEFT_OVER = 0.35
"""Share of the smaller of two opposite changes up to which what is left counts as nothing."""
NOTHING_STANDS_OUT = (
    "Nothing stands out: no layer jumps, no token outweighs the others, nothing is undone by its neighbour."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence, and the section of the page that has its numbers."""

    text: str
    section: str = ""
    """Its id; empty where there is nothing to look at."""
    title: str = ""


def findings(measurement: Measurement) -> tuple[Finding, ...]:
    """Everything that stands out, or one sentence that nothing does."""
    found = [
        Finding(text=text, section="attribution", title=measurement.attribution_title)
        for attribution in measurement.shown_attributions
        for text in _of_stack(attribution)
    ]
    found += [
        Finding(text=text, section="scale", title="Tokens as they are")
        for token in measurement.dominating
        if (text := dominating_words(token))
    ]
    return tuple(found) or (Finding(text=NOTHING_STANDS_OUT),)


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
    return first * second < 0 and smaller >= UNDONE and abs(first + second) <= LEFT_OVER * smaller


def _opposed(attribution: Attribution) -> Iterator[str]:
    """Two kinds of sub-blocks that pull against each other until little is left."""
    clear = [kind for kind in attribution.kinds if kind.direction in ("smoothing", "sharpening")]
    smooths = min(clear, key=lambda kind: kind.change, default=None)
    sharpens = max(clear, key=lambda kind: kind.change, default=None)
    if smooths is None or sharpens is None or smooths.change >= 0 or sharpens.change <= 0:
        return
    smaller = min(-smooths.change, sharpens.change)
    if smaller >= UNDONE and abs(smooths.change + sharpens.change) <= LEFT_OVER * smaller:
        first, second = (NAMES.get(kind.part, kind.part) for kind in (smooths, sharpens))
        yield (
            f"{first[:1].upper()}{first[1:]} and {second} work against each other: {signed(smooths.change)} and "
            f"{signed(sharpens.change)}."
        )
