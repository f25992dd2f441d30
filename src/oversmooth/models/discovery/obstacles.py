"""What keeps an attention from being `A X W_V W_O` with rows that sum to one, and the module that does."""

from dataclasses import dataclass

from oversmooth.models.discovery.graph import FACTORS, Node, uses
from oversmooth.models.discovery.products import Mixing, Product
from oversmooth.models.discovery.trace import SHIFT, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Why an attention is not `W_O A X W_V`, and where."""

    kind: str
    """cross, pooling, stage, channels, heads, sink, gate, norm, convolution, latent, differential, approximate, layout or
    other."""
    where: str
    """Path of the module that stands in between."""
    reason: str


def obstacle_of(trace: Trace, mixing: Mixing, output: Product | None) -> Obstacle | None:
    """What keeps an attention from being `A X W_V W_O` with rows that sum to one; `None` where nothing does."""
    where = mixing.module
    if mixing.over_channels:
        return Obstacle(kind="channels", where=where, reason=f"attention over channels, not over tokens, in {where}")
    if mixing.chances.altered:
        op, module = mixing.chances.altered[0]
        if not mixing.is_stochastic or op in ("mm", "bmm", "addmm", "convolution"):
            words = f"the attention of {where} is changed after its softmax by {module or op} ({op}): heads are mixed"
            return Obstacle(kind="heads", where=module or where, reason=words)
    if mixing.value_codes is None:
        return _before_attention(trace, mixing)
    sources = (mixing.value_codes // SHIFT).unique().tolist()
    if len(sources) > 1 or not isinstance(trace.sources[int(sources[0])], Product):
        words = f"the values of {where} are themselves the result of an attention (approximate or linear attention)"
        return Obstacle(kind="approximate", where=where, reason=words)
    if not mixing.is_stochastic:
        low, high = mixing.row_sums
        words = f"the rows of the attention of {where} sum to between {low:.3g} and {high:.3g} (a sink): not to one"
        return Obstacle(kind="sink", where=where, reason=words)
    return _after_attention(trace, mixing) if output is None else None


def _before_attention(trace: Trace, mixing: Mixing) -> Obstacle:
    """What stands between the last projection and the values of an attention."""
    kind, where = maker_of(trace, mixing.values.root)
    words = {
        "norm": f"the norm {where} stands between the values and attention",
        "convolution": f"a convolution ({where}) stands between the values and attention",
        "gate": f"{where} multiplies the values by something that depends on the token",
        "batch norm": f"the batch norm {where} stands between the value projection and attention (fold it into the weight)",
    }
    reason = words.get(kind, f"{where} ({kind}) stands between the value projection and attention")
    return Obstacle(kind=kind if kind in words else "other", where=where, reason=reason)


def _after_attention(trace: Trace, mixing: Mixing) -> Obstacle:
    """What stands between attention and the next projection."""
    seen: list[Node] = []
    current = mixing.made.root
    for norm in trace.norms:
        if norm.read is current:
            words = f"the norm {norm.path} stands between attention and the output projection"
            return Obstacle(kind="norm", where=norm.path, reason=words)
    for use in uses(current):
        seen.append(use)
        where = use.module or mixing.module
        if use.op in FACTORS:
            gate = [parent for parent in use.parents if parent.root is not current]
            if not gate or gate[0].parameter:
                continue
            words = f"a gate in {where} multiplies the output of attention, token by token"
            return Obstacle(kind="gate", where=where, reason=words)
        if use.op in ("sub", "sub_"):
            words = f"{where} subtracts one attention from another (differential attention)"
            return Obstacle(kind="differential", where=where, reason=words)
        if use.op == "convolution":
            words = f"a convolution ({where}) stands between attention and the output projection"
            return Obstacle(kind="convolution", where=where, reason=words)
    if mixing.queries != mixing.keys:
        words = f"{mixing.module} pools: {mixing.queries} queries read {mixing.keys} tokens"
        return Obstacle(kind="pooling", where=mixing.module, reason=words)
    names = ", ".join(dict.fromkeys(f"{use.op} in {use.module or 'the model'}" for use in seen[:3])) or "nothing"
    words = f"no projection reads the attention of {mixing.module} directly: {names} comes first"
    return Obstacle(kind="other", where=mixing.module, reason=words)


def maker_of(trace: Trace, node: Node) -> tuple[str, str]:
    """Kind and path of what made a tensor."""
    for norm in trace.norms:
        if norm.made is node:
            return "norm", norm.path
    named = {"convolution": "convolution", **dict.fromkeys(FACTORS, "gate")}
    kind = "batch norm" if "batch_norm" in node.op else named.get(node.op, node.op)
    return kind, node.module or "the model"
