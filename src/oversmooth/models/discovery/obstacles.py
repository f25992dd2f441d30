"""What keeps an attention from being `A X W_V W_O` with rows that sum to one, and the module that does."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from oversmooth.models.discovery.graph import FACTORS, SUMS, Node, uses
from oversmooth.models.discovery.operations import PRODUCTS
from oversmooth.models.discovery.products import Mixing, Product
from oversmooth.models.discovery.trace import Trace
from oversmooth.models.discovery.weights import SHIFT


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Why an attention is not `W_O A X W_V`, and where."""

    kind: str
    """cross, pooling, stage, channels, tokens, heads, sink, gate, norm, batch norm, group norm, convolution, latent,
    positions, differential, concatenation, addition, routed, approximate, layout or other."""
    where: str
    """Path of the module that stands in between."""
    reason: str


def obstacle_of(trace: Trace, mixing: Mixing, output: Product | None) -> Obstacle | None:
    """What keeps an attention from being `A X W_V W_O` with rows that sum to one; `None` where nothing does."""
    where = mixing.module
    if mixing.over_channels:
        return Obstacle(kind="channels", where=where, reason=f"attention over channels, not over tokens, in {where}")
    if mixing.varies:
        words = f"the values of {where} do not come from the same rows of one weight at every token"
        return Obstacle(kind="tokens", where=where, reason=words)
    if output is None and mixing.queries == 1 < mixing.keys:
        return _pooling(mixing)
    if mixing.chances.altered:
        op, module = mixing.chances.altered[0]
        if not mixing.is_stochastic or op in ("mm", "bmm", "addmm", "convolution"):
            low, high = mixing.row_sums
            words = (
                f"the attention of {where} is changed after its softmax by {module or op} ({op}): heads are mixed, and rows "
                f"that sum to between {low:.3g} and {high:.3g} are no averages of tokens"
            )
            return Obstacle(kind="heads", where=module or where, reason=words)
    if mixing.value_codes is None:
        return _before_attention(trace, mixing)
    sources = (mixing.value_codes // SHIFT).unique().tolist()
    if len(sources) > 1 or not isinstance(trace.sources[int(sources[0])], Product):
        words = f"the values of {where} are themselves the result of an attention (approximate or linear attention)"
        return Obstacle(kind="approximate", where=where, reason=words)
    if not mixing.is_stochastic and not (mixing.has_sink and output is not None):
        low, high = mixing.row_sums
        words = f"the rows of the attention of {where} sum to between {low:.3g} and {high:.3g} (a sink): not to one"
        return Obstacle(kind="sink", where=where, reason=words)
    return _after_attention(trace, mixing) if output is None else None


def _before_attention(trace: Trace, mixing: Mixing) -> Obstacle:
    """What stands between the last projection and the values of an attention."""
    kind, where = maker_of(trace, mixing.values.root)
    is_number = len(mixing.values.root.parents) == 1
    words = {
        "norm": f"the norm {where} stands between the values and attention",
        "convolution": f"a convolution ({where}) stands between the values and attention",
        "gate": f"{where} multiplies the values by {'a number' if is_number else 'something that depends on the token'}",
        "batch norm": f"the batch norm {where} stands between the value projection and attention (fold it into the weight)",
        "positions": f"{where} turns the values by their position (a rotary embedding)",
    }
    kind = "positions" if _is_turned(mixing.values.root) else kind
    reason = words.get(kind, f"{where} ({kind}) stands between the value projection and attention")
    return Obstacle(kind=kind if kind in words else "other", where=where, reason=reason)


def _is_turned(values: Node) -> bool:
    """Whether values, or some of their channels, are a sum of two products, as cosine and sine make them."""
    parts = [parent.root for parent in values.parents] if values.op == "cat" else [values]
    return any(
        part.op in SUMS and len(part.parents) == 2 and all(parent.root.op in FACTORS for parent in part.parents)
        for part in parts
    )


STEPS = 40
"""Operations after attention that are looked at for what stands in the way."""


def _after_attention(trace: Trace, mixing: Mixing) -> Obstacle:
    """What stands between attention and the next projection: the first such thing on the way."""
    waiting, seen = [mixing.made.root], [mixing.made.root]
    read = {id(norm.read): norm for norm in reversed(trace.norms) if norm.read.order >= mixing.made.order}
    while waiting and len(seen) < STEPS:
        current = waiting.pop(0)
        if id(current) in read:
            words = f"the norm {read[id(current)].path} stands between attention and the output projection"
            return Obstacle(kind="norm", where=read[id(current)].path, reason=words)
        for use in uses(current):
            found = _in_the_way(use, current, use.module or mixing.module)
            if found is not None:
                return found
            if use.op not in PRODUCTS and not any(use.root is other for other in seen):
                seen.append(use.root)
                waiting.append(use.root)
    return _nothing_reads(mixing, seen[1:])


def _in_the_way(use: Node, attention: Node, where: str) -> Obstacle | None:
    """What an operation on the result of attention is, where it is no move."""
    if use.op in FACTORS:
        gate = [parent for parent in use.parents if parent.root is not attention]
        if gate and not gate[0].parameter and math.prod(gate[0].shape) > 1:
            words = f"a gate in {where} multiplies the output of attention, token by token"
            return Obstacle(kind="gate", where=where, reason=words)
    if use.op in ("sub", "sub_"):
        words = f"{where} subtracts one attention from another (differential attention)"
        return Obstacle(kind="differential", where=where, reason=words)
    if use.op in SUMS and (added := [parent.root for parent in use.parents if parent.root is not attention]):
        is_convolved = added[0].op == "convolution"
        words = f"{where} adds {'a convolution' if is_convolved else 'something else'} to the result of attention"
        return None if added[0].parameter else Obstacle(kind="addition", where=where, reason=words)
    if use.op == "convolution":
        words = f"a convolution ({where}) stands between attention and the output projection"
        return Obstacle(kind="convolution", where=where, reason=words)
    return None


def _nothing_reads(mixing: Mixing, seen: Sequence[Node]) -> Obstacle:
    where = mixing.module
    if mixing.queries != mixing.keys:
        return _pooling(mixing)
    beside = next((node for node in seen if node.op == "cat"), None)
    if beside is not None:
        where = beside.module or where
        words = f"{where} puts something else beside the attention of {mixing.module} before the output projection"
        return Obstacle(kind="concatenation", where=where, reason=words)
    names = ", ".join(dict.fromkeys(f"{node.op} in {node.module or 'the model'}" for node in seen[:3])) or "nothing"
    words = f"no projection reads the attention of {where} directly: {names} comes first"
    return Obstacle(kind="other", where=where, reason=words)


def _pooling(mixing: Mixing) -> Obstacle:
    words = f"{mixing.module} pools: {mixing.queries} queries read {mixing.keys} tokens"
    return Obstacle(kind="pooling", where=mixing.module, reason=words)


def maker_of(trace: Trace, node: Node) -> tuple[str, str]:
    """Kind and path of what made a tensor."""
    for norm in trace.norms:
        if norm.made is node:
            return "norm", norm.path
    named = {"native_group_norm": "group norm", **dict.fromkeys(FACTORS, "gate")}
    makers = [node, *(parent.root for parent in node.parents if node.op in SUMS)]  # a convolution beside a skip
    is_convolved = any(maker.op == "convolution" for maker in makers)
    kind = "batch norm" if "batch_norm" in node.op else "convolution" if is_convolved else named.get(node.op, node.op)
    return kind, node.module or "the model"
