"""What each sub-block does to the stream, read off a measurement of steps; and why a weak one is weak, in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from oversmooth.results import Measurement

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
UNDONE = 0.5
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
        if self.undone is not None and self.undone >= UNDONE:
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
