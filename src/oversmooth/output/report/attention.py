"""The section on whether attention is healthy: heads that see one position only, or all alike."""

from collections import Counter
from collections.abc import Sequence

from oversmooth.output.report.blocks import Block, Pair, Plot, Section, Words, table_of
from oversmooth.output.report.heat_map import heat_map
from oversmooth.results import HeadAttention, Measurement

SINK = 0.3
"""Of all attention of a head; above it the head has a sink."""
COLLAPSED, UNIFORM = 0.1, 0.95
"""Entropies below which a head looks at one token, and above which at all alike."""


def attention_section(measurement: Measurement) -> Section | None:
    """`None` where attention was not asked for."""
    heads = measurement.heads
    reasons = [m.reason for value in measurement.values if value.place == "attention" for m in value.missing[:1]]
    unseen = [reason for reason in dict.fromkeys(reasons) if not heads]
    if not heads and not unseen:
        return None
    blocks: list[Block] = [Words(text=f"Attention could not be seen: {reason}.", kind="note") for reason in unseen]
    for stack in dict.fromkeys(head.stack for head in heads):
        blocks.append(_maps(stack, [head for head in heads if head.stack == stack]))
    if heads:
        blocks.append(table_of("attention-heads", "How every head attends", [_row(head) for head in heads]))
    lead = attention_words(heads) if heads else ""
    return Section(id="attention-health", title="Is attention healthy?", lead=lead, blocks=blocks)


def attention_words(heads: Sequence[HeadAttention]) -> str:
    """One or two sentences: sinks and where they are, heads that look at one token or at all alike."""
    sinks = [head for head in heads if head.sink > SINK]
    collapsed = sum(head.entropy < COLLAPSED for head in heads)
    uniform = sum(head.entropy > UNIFORM for head in heads)
    where = ""
    if sinks:
        ((position, count),) = Counter(head.sink_position for head in sinks).most_common(1)
        where = f", {'all' if count == len(sinks) else f'{count} of them'} at position {position}"
    first = f"{len(sinks)} of {len(heads)} heads give more than {SINK} of their attention to one position{where}."
    look = "looks" if collapsed == 1 else "look"
    learned = [head.learned_sink for head in heads if head.learned_sink is not None]
    last = (
        f" To a learned sink beside the tokens goes {sum(learned) / len(learned):.0%} of attention." if learned else ""
    )
    return f"{first} {collapsed} {look} at hardly more than one token, {uniform} at all tokens nearly alike.{last}"


def _maps(stack: str, heads: Sequence[HeadAttention]) -> Pair:
    depths = sorted({head.depth for head in heads})
    by_place = {(head.depth, head.head): head for head in heads}
    widest = max(head.head for head in heads) + 1
    table = [[by_place.get((depth, number)) for number in range(widest)] for depth in depths]
    rows = [f"{stack + ' ' if stack else 'layer '}{depth - 1}" for depth in depths]
    text = [[_hover(head) for head in row] for row in table]
    suffix, name = (f"-{stack}", f" ({stack})") if stack else ("", "")
    hover = "%{y}, head %{x}<br>%{text}<extra></extra>"
    return Pair(
        plots=(
            Plot(
                id=f"head-entropy{suffix}",
                figure=heat_map(
                    rows,
                    [[None if head is None else head.entropy for head in row] for row in table],
                    bounds=(0.0, 1.0),
                    colours=((0.0, "var(--sharpen)"), (0.5, "var(--panel)"), (1.0, "var(--smooth)")),
                    title="entropy",
                    hover=hover,
                    text=text,
                ),
                caption=f"Entropy of each head's attention{name}: 0 looks at one token, 1 at all alike, which smooths most.",
                alt=f"Heat map of layers by heads{name}: entropy of attention. {attention_words(heads)}",
            ),
            Plot(
                id=f"head-sinks{suffix}",
                figure=heat_map(
                    rows,
                    [[None if head is None else head.sink for head in row] for row in table],
                    bounds=(0.0, 1.0),
                    colours=((0.0, "var(--panel)"), (1.0, "var(--attention)")),
                    title="share",
                    hover=hover,
                    text=text,
                ),
                caption=f"Largest share of a head's attention that goes to one position{name}; above {SINK} it is a sink.",
                alt=f"Heat map of layers by heads{name}: largest share of attention that one position gets.",
            ),
        )
    )


def _hover(head: HeadAttention | None) -> str:
    if head is None:
        return ""
    learned = "" if head.learned_sink is None else f", {head.learned_sink:.0%} to the learned sink"
    return (
        f"entropy {head.entropy:.2f}, sees {head.effective_tokens:.1f} tokens<br>"
        f"{head.sink:.0%} to position {head.sink_position}{learned}, rank {head.rank:.1f}"
    )


def _row(head: HeadAttention) -> dict[str, object]:
    learned = {} if head.learned_sink is None else {"to the learned sink": head.learned_sink}
    return {
        "stack": head.stack,
        "layer": head.depth - 1,
        "head": head.head,
        "entropy": head.entropy,
        "tokens seen": head.effective_tokens,
        "largest share": head.sink,
        "at position": head.sink_position,
        "rank": head.rank,
        **learned,
    }
