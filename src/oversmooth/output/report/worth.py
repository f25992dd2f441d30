"""The section "Is each layer worth it?": a row of small bars per layer, and why a weak one is weak."""

from collections.abc import Sequence

from oversmooth.output.report.blocks import Bar, BarRow, Bars, Section, Segment, Words, table_of
from oversmooth.output.weak_parts import SMALL, UNDONE, PartReading, read_parts, worth_words
from oversmooth.results import Measurement

LEGEND = (
    ("differing", "turns what differs between tokens"),
    ("shared", "turns what all tokens share"),
    ("smoothing", "moves the balance of the two: smooths or sharpens"),
)
LEAD = (
    "Bars show by how many degrees a sub-block turns tokens on average, and what that turn is made of. A long stream dilutes "
    "what is added to it, so the same branch turns tokens less in a deeper layer."
)
HOW = (
    f"Too small to matter: a branch of this size cannot have an influence of {SMALL}, a turn of 6 degrees, whichever way it "
    "points. Moves only what all tokens share: four fifths of its turn are alike. Undone: the next sub-block takes "
    f"back at least {UNDONE:.0%} of it. What dropping a layer costs is another question, which oversmooth ablate answers."
)


def worth_section(measurement: Measurement) -> Section | None:
    """`None` for measurements without metrics of steps."""
    readings = read_parts(measurement)
    if not readings:
        return None
    return Section(
        id="worth",
        title="Is each layer worth it?",
        lead=worth_words(readings),
        blocks=[
            Words(text=LEAD),
            *(_bars(stack, readings) for stack in dict.fromkeys(reading.stack for reading in readings)),
            Words(text=HOW),
            table_of("worth-parts", "What every sub-block and block does", [_row(reading) for reading in readings]),
        ],
    )


def _bars(stack: str, readings: Sequence[PartReading]) -> Bars:
    own = [reading for reading in readings if reading.stack == stack and reading.part != "block"]
    by_place = {(reading.depth, reading.part): reading for reading in own}
    parts = tuple(dict.fromkeys(reading.part for reading in own))
    widest = max(reading.angle for reading in own) or 1.0
    rows = tuple(
        BarRow(
            title=f"{stack + ' ' if stack else 'layer '}{depth - 1}",
            bars=tuple(_bar(by_place.get((depth, part)), widest) for part in parts),
            words=_words([by_place[depth, part] for part in parts if (depth, part) in by_place]),
        )
        for depth in sorted({reading.depth for reading in own})
    )
    label = f"How far each sub-block{' of the ' + stack if stack else ''} turns tokens"
    return Bars(label=label, columns=parts, rows=rows, legend=LEGEND)


def _bar(reading: PartReading | None, widest: float) -> Bar:
    if reading is None:
        return Bar(shown="", segments=())
    length = 100 * reading.angle / widest
    shares = (("differing", reading.differing), ("shared", reading.shared), ("smoothing", reading.smoothing))
    whole = sum(max(value, 0.0) for _, value in shares) or 1.0
    return Bar(
        shown=f"{reading.angle:.0f}°" if reading.angle >= 9.5 else f"{reading.angle:.1f}°",
        segments=tuple(
            Segment(tone=tone, percent=round(length * max(value, 0.0) / whole, 2)) for tone, value in shares
        ),
    )


def _words(readings: Sequence[PartReading]) -> str:
    """Why sub-blocks of one layer are weak."""
    reasons = dict.fromkeys(reading.reason for reading in readings if reading.reason)
    told = []
    for reason in reasons:
        parts = [reading.part for reading in readings if reading.reason == reason]
        told.append(reason if len(parts) == len(readings) > 1 else f"{' and '.join(parts)} {reason}")
    return "; ".join(told)


def _row(reading: PartReading) -> dict[str, object]:
    return {
        "stack": reading.stack,
        "layer": reading.depth - 1,
        "part": reading.part,
        "influence": reading.influence,
        "smoothing": reading.smoothing,
        "shared": reading.shared,
        "differing": reading.differing,
        "contribution": reading.contribution,
        "ceiling": reading.ceiling,
        "undone": reading.undone,
        "weak because": reading.reason,
    }
