"""What was measured, in sentences of one quantity each; the same ones in the terminal, on the page and in messages."""

from oversmooth.output.numbers import signed
from oversmooth.results import Attribution, DominatingToken, KindChange, Measurement

WITH_DEPTH = {"smoothing": "Smoother", "sharpening": "Sharper", "no clear change": "No clear change"}
DOES = {"smoothing": "smooths", "sharpening": "sharpens", "no clear change": "makes no clear change"}
NAMES = {
    "feed-forward": "the feed-forward",
    "norm": "the norms",
    "final norm": "the final norm",
    "other": "other blocks",
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
    verbs = PLURAL if kind.part in ("norm", "other") else DOES
    change = signed(kind.change)
    direction = kind.direction if float(change) else "no clear change"  # sure, and too small to be written
    return f"{name} {verbs[direction]} ({change})"


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
