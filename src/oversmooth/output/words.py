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


def who_words(attribution: Attribution) -> str:
    """Who does it: every kind of sub-block with what it changes, those that smooth most first."""
    kinds = sorted(attribution.kinds, key=lambda kind: kind.change)
    words = "; ".join(_kind_words(kind) for kind in kinds)
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def _kind_words(kind: KindChange) -> str:
    name = NAMES.get(kind.part, kind.part)
    verbs = PLURAL if kind.part in ("norm", "other") else DOES
    return f"{name} {verbs[kind.direction]} ({signed(kind.change)})"


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
    where = f"position {found.position}" + ("" if found.position_share > 0.99 else f" in {found.position_share:.0%}")
    made = "" if found.made_by is None else f"; the {found.made_by} of depth {found.made_at_depth} makes it"
    return (
        f"{stack}One token outweighs the others: at depth {found.depth} the token{word} at {where} is {found.ratio:.0f} "
        f"times as long as the median, {found.channel_share:.0%} of it in channel {found.channel}{made}. It decides "
        "HFC/LFC there; numbers without it are given beside, and tokens at unit length do not depend on it."
    )
