"""From a trace to attention layers and their blocks, or to the module that is in the way.

residual stream -> norm -> value projection -> attention -> output projection -> norm, gain -> + residual stream
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from oversmooth.models.declaration import Gain, Residual, norm_centres
from oversmooth.models.discovery.operations import (
    DIFFERENCES,
    FACTORS,
    PRODUCTS,
    SHIFT,
    SUMS,
    AttentionTimesValues,
    Node,
    NormCall,
    Projection,
    leads_to,
    uses,
)
from oversmooth.models.discovery.trace import Trace

# --- obstacles: why an attention is not `A X W_V W_O` with rows that sum to one ---


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why an attention is not `W_O A X W_V`, and where."""

    kind: str
    """cross, pooling, stage, channels, tokens, heads, sink, gate, norm, batch norm, group norm, convolution, latent,
    positions, differential, concatenation, addition, routed, approximate, skip, layout or other."""
    where: str
    """Path of the module in between."""
    reason: str


def obstacle_of(trace: Trace, mixing: AttentionTimesValues, output: Projection | None) -> Obstacle | None:
    """What keeps an attention from being `A X W_V W_O` with rows that sum to one; `None` if nothing does."""
    where = mixing.module
    if mixing.over_channels:
        return Obstacle("channels", where, f"attention over channels, not over tokens, in {where}")
    if mixing.varies:
        words = f"the values of {where} do not come from the same rows of one weight at every token"
        return Obstacle("tokens", where, words)
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
            return Obstacle("heads", module or where, words)
    if mixing.value_codes is None:
        return _before_attention(trace, mixing)
    sources = (mixing.value_codes // SHIFT).unique().tolist()
    if len(sources) > 1 or not isinstance(trace.sources[int(sources[0])], Projection):
        words = f"the values of {where} are themselves the result of an attention (approximate or linear attention)"
        return Obstacle("approximate", where, words)
    if not mixing.is_stochastic and not (mixing.has_sink and output is not None):
        low, high = mixing.row_sums
        words = f"the rows of the attention of {where} sum to between {low:.3g} and {high:.3g} (a sink): not to one"
        return Obstacle("sink", where, words)
    return _after_attention(trace, mixing) if output is None else None


def _before_attention(trace: Trace, mixing: AttentionTimesValues) -> Obstacle:
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
    values = mixing.values.root
    parts = [parent.root for parent in values.parents] if values.op == "cat" else [values]
    pairs = [part.parents for part in parts if part.op in SUMS and len(part.parents) == 2]
    if any(all(parent.root.op in FACTORS for parent in pair) for pair in pairs):
        kind = "positions"  # some channels are a sum of two products, as cosine and sine make them
    reason = words.get(kind, f"{where} ({kind}) stands between the value projection and attention")
    return Obstacle(kind if kind in words else "other", where, reason)


STEPS = 40
"""Operations after attention among which the obstacle is searched."""


def _after_attention(trace: Trace, mixing: AttentionTimesValues) -> Obstacle:
    """The first obstacle between attention and the next projection."""
    waiting, seen = [mixing.made.root], [mixing.made.root]
    read = {id(norm.read): norm for norm in reversed(trace.norms) if norm.read.order >= mixing.made.order}
    while waiting and len(seen) < STEPS:
        current = waiting.pop(0)
        if (norm := read.get(id(current))) is not None:
            words = f"the norm {norm.path} stands between attention and the output projection"
            return Obstacle("norm", norm.path, words)
        for use in uses(current):
            found = _in_the_way(use, current, use.module or mixing.module)
            if found is not None:
                return found
            if use.op not in PRODUCTS and not any(use.root is other for other in seen):
                seen.append(use.root)
                waiting.append(use.root)
    return _nothing_reads(mixing, seen[1:])


def _in_the_way(use: Node, attention: Node, where: str) -> Obstacle | None:
    """The obstacle that an operation on the result of attention is, unless it only moves numbers."""
    if use.op in FACTORS:
        gate = [parent for parent in use.parents if parent.root is not attention]
        if gate and not gate[0].parameter and math.prod(gate[0].shape) > 1:
            return Obstacle("gate", where, f"a gate in {where} multiplies the output of attention, token by token")
    if use.op in ("sub", "sub_"):
        return Obstacle("differential", where, f"{where} subtracts one attention from another (differential attention)")
    if use.op in SUMS and (added := [parent.root for parent in use.parents if parent.root is not attention]):
        is_convolved = added[0].op == "convolution"
        words = f"{where} adds {'a convolution' if is_convolved else 'something else'} to the result of attention"
        return None if added[0].parameter else Obstacle("addition", where, words)
    if use.op == "convolution":
        words = f"a convolution ({where}) stands between attention and the output projection"
        return Obstacle("convolution", where, words)
    return None


def _nothing_reads(mixing: AttentionTimesValues, seen: Sequence[Node]) -> Obstacle:
    where = mixing.module
    if mixing.queries != mixing.keys:
        return _pooling(mixing)
    beside = next((node for node in seen if node.op == "cat"), None)
    if beside is not None:
        where = beside.module or where
        words = f"{where} puts something else beside the attention of {mixing.module} before the output projection"
        return Obstacle("concatenation", where, words)
    names = ", ".join(dict.fromkeys(f"{node.op} in {node.module or 'the model'}" for node in seen[:3])) or "nothing"
    return Obstacle("other", where, f"no projection reads the attention of {where} directly: {names} comes first")


def _pooling(mixing: AttentionTimesValues) -> Obstacle:
    words = f"{mixing.module} pools: {mixing.queries} queries read {mixing.keys} tokens"
    return Obstacle("pooling", mixing.module, words)


def maker_of(trace: Trace, node: Node) -> tuple[str, str]:
    """Kind and path of what made a tensor."""
    if (norm := trace.norm_that_made(node)) is not None:
        return "norm", norm.path
    named = {"native_group_norm": "group norm", **dict.fromkeys(FACTORS, "gate")}
    makers = [node, *(parent.root for parent in node.parents if node.op in SUMS)]  # a convolution beside a skip
    is_convolved = any(maker.op == "convolution" for maker in makers)
    kind = "batch norm" if "batch_norm" in node.op else "convolution" if is_convolved else named.get(node.op, node.op)
    return kind, node.module or "the model"


# --- from the output projection of an attention back to the residual stream ---

ROUTING = ("index_add", "index_add_", "scatter_add", "scatter_add_", "index_put", "index_put_")
"""Operations that put together what different experts made of different tokens."""


@dataclass(eq=False, slots=True, kw_only=True)
class Branch:
    """How the output of attention gets back to the residual stream."""

    total: Node
    """The stream after attention was added."""
    stream: Node
    """The stream before."""
    norm_before: NormCall | None
    norm_on_branch: NormCall | None = None
    gain: str = ""
    """A parameter that multiplies the branch."""
    factor: float = 1.0
    """A number that multiplies the branch."""
    is_parallel: bool = False


def follow_branch(trace: Trace, value: Projection, output: Projection) -> Branch | Obstacle:
    """From the output projection to the sum with the residual stream, or the obstacle in between."""
    read, factor = read_by(value)
    norm = trace.norm_that_made(read)
    streams = [read] if norm is None else [read, norm.read.root]
    branch = Branch(total=output.made, stream=read, norm_before=None, factor=factor)
    current = output.made.root
    for _ in range(12):
        following = uses(current)
        for total in following:
            met = _other(total, current, streams) if _alpha(total, current) else None
            if met is not None:
                branch.total, branch.stream = total, met
                branch.is_parallel = branch.is_parallel or not any(parent.root is met for parent in total.parents)
                branch.norm_before = None if met is read else norm
                branch.factor *= _alpha(total, current)
                return branch
        step = _step(trace, branch, current, following)
        if isinstance(step, Obstacle):
            return step
        if step is None:
            break
        current = step
    return _no_sum(trace, branch, value, output, current)


def read_by(value: Projection) -> tuple[Node, float]:
    """What a value projection reads, and the plain number that multiplies it on the way."""
    read, factor = value.read.root, 1.0
    while read.op in ("mul", "div") and len(read.parents) == 1 and read.number is not None:
        factor *= read.number if read.op == "mul" else 1.0 / read.number
        read = read.parents[0].root
    return read, factor


def _alpha(total: Node, current: Node) -> float:
    """The factor with which an operation adds a branch to something, negative for a difference; 0 if it does neither."""
    is_second = len(total.parents) > 1 and total.parents[1].root is current
    alpha = total.number if is_second and total.number is not None else 1.0
    if total.op in SUMS:
        return alpha
    return -alpha if total.op in DIFFERENCES and is_second else 0.0


def _other(total: Node, current: Node, streams: Sequence[Node]) -> Node | None:
    """The stream that a sum adds to, if it adds to one; a skip connection times one is a skip connection."""
    for parent in total.parents:
        added = parent.root
        while added.number == 1.0 and added.op in ("mul", "div") and not any(added is stream for stream in streams):
            added = added.parents[0].root
        # A parallel branch may have been added before this one.
        summed = [one.root for one in added.parents] if added.op in SUMS else []
        met = next((one for one in (added, *summed) if any(one is stream for stream in streams)), None)
        if parent.root is not current and met is not None:
            return met
    return None


def _step(trace: Trace, branch: Branch, current: Node, following: Sequence[Node]) -> Node | Obstacle | None:
    """One step along the branch: a bias, a gain, a norm, or the sum with a parallel branch."""
    for use in following:
        others = [parent for parent in use.parents if parent.root is not current]
        if use.op in SUMS and others and others[0].parameter:
            return use.root  # a bias of its own
        if use.op in FACTORS and not others and use.number is not None:
            branch.factor *= use.number if use.op.startswith("mul") else 1.0 / use.number
            return use.root
        if use.op in FACTORS and others and others[0].parameter:
            branch.gain = others[0].parameter
            return use.root
    if (norm := trace.norm_behind(current)) is not None:
        branch.norm_on_branch = norm
        return norm.made
    for use in following:
        if use.op in SUMS:
            branch.is_parallel = True
            return use.root
        summed = [later for later in uses(use) if later.op == "sum"] if use.op == "stack" else []
        if summed:  # several branches side by side
            branch.is_parallel = True
            return summed[0].root
        if use.op in FACTORS and branch.is_parallel:
            return None  # already in the next block: what was met was the stream
        if use.op in FACTORS:
            where = use.module or "the model"
            words = f"{where} multiplies the output of attention by something that is not constant"
            return Obstacle("gate", where, words)
    return None


def _no_sum(trace: Trace, branch: Branch, value: Projection, output: Projection, current: Node) -> Branch | Obstacle:
    """The branch never meets the stream: cross-attention, something between stream and values, or no skip at all."""
    maker = next((product for product in trace.products if product.made.root is value.read.root), None)
    inner = next((call for call in trace.norms if call.made is value.read.root), None)
    if maker is None and inner is not None:
        maker = next((product for product in trace.products if product.made.root is inner.read), None)
    if maker is not None:
        through = f", the norm {inner.path}" if inner is not None else ""
        words = f"latent values: {maker.weight.rpartition('.')[0]}{through} and {value.weight} stand between"
        return Obstacle("latent", inner.path if inner else maker.weight, f"{words} stream and values")
    met = _any_sum(trace, output.made.root)
    if met is None:
        return branch  # no skip connection: the branch is the new stream
    total, other = met
    if other is value.read.root or (inner is not None and inner.read.root is other):
        between = next((use for use in uses(current) if use is not total), current)
        where = between.module or "the model"
        words = f"{where} ({between.op}) stands between {output.weight} and the residual stream"
        return Obstacle("routed" if between.op in ROUTING else "other", where, words)
    if leads_to(other, value.read.root):
        return between_stream_and_values(trace, value, value.read.root)
    branch.total, branch.stream = total, other
    return branch


def way_around(trace: Trace, output: Projection, branch: Branch) -> Obstacle | None:
    """A skip connection that is not a sum; `None` if there is no skip: the branch is the new stream then."""
    if branch.total is not output.made:
        return None
    norm = trace.norm_that_made(branch.stream)
    stream = branch.stream if norm is None else norm.read.root
    passed = {id(output.made), id(output.made.root)}
    later = (product for product in trace.products if product.made.order > output.made.order)
    around = next((product for product in later if leads_to(stream, product.read, avoiding=passed)), None)
    if around is None:
        return None
    where = output.weight.rpartition(".")[0]
    words = f"what goes around {where} to {around.weight} is not added to its output as it is: no plain skip connection"
    return Obstacle("skip", where, words)


def between_stream_and_values(trace: Trace, value: Projection, read: Node) -> Obstacle:
    """What made the features that a value projection reads, if that is not a norm of the stream."""
    kind, where = maker_of(trace, read)
    if kind == "cat":
        words = f"{where} puts other features or tokens beside the residual stream in front of {value.weight}"
        return Obstacle("concatenation", where, words)
    if kind == "flip":
        return Obstacle("cross", where, f"cross-attention: {where} reads its values from the sequence beside its own")
    words = f"{where} ({kind}) stands between the residual stream and the values of {value.weight}"
    known = ("norm", "convolution", "gate", "batch norm", "group norm")
    return Obstacle(kind if kind in known else "other", where, words)


def _any_sum(trace: Trace, node: Node) -> tuple[Node, Node] | None:
    """The first sum of a branch with something else, behind a norm on the branch too."""
    current = node
    for _ in range(6):
        if (norm := trace.norm_behind(current)) is not None:
            current = norm.made.root
        following = uses(current)
        for use in following:
            others = [parent for parent in use.parents if parent.root is not current and not parent.parameter]
            if use.op in SUMS and others:
                return use, others[0].root
        if len(following) != 1:
            return None
        current = following[0].root
    return None


def reads_the_stream(value: Projection, branch: Branch) -> bool:
    reads, _ = read_by(value)
    is_normed = branch.norm_before is not None and branch.norm_before.read.root is branch.stream
    return branch.stream is reads or is_normed or branch.total is branch.stream


# --- values that are made from a latent: the projection, and perhaps a norm ---


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class FoundLatent:
    """What the values read, instead of the stream."""

    product: Projection
    first: int
    """The first row of its weight that belongs to the latent."""
    norm: NormCall | None
    bias: str
    factor: float
    """A number that multiplies the latent behind its norm."""


def latent_of(trace: Trace, value: Projection) -> FoundLatent | None:
    """The latent that a value projection reads; `None` where it reads something else."""
    read, factor = read_by(value)
    norm = trace.norm_that_made(read)
    codes = value.token_codes if norm is None else norm.codes
    if codes is None or bool(codes.min() < 0):
        return None
    sources = (codes // SHIFT).unique().tolist()
    product = trace.sources[int(sources[0])]
    if len(sources) != 1 or not isinstance(product, Projection) or product is value:
        return None
    parameter = trace.parameters.by_name[product.weight]
    if len(parameter.shape) != 2 or parameter.strides[1] != product.in_step:
        return None  # stored the other way round: no such latent is known
    rows = (codes % SHIFT).long() // parameter.strides[0]
    if not torch.equal(rows, rows[0] + torch.arange(len(rows))):
        return None
    bias = product.bias_in(trace.sources)
    return FoundLatent(product=product, first=int(rows[0]), norm=norm, bias=bias, factor=factor)


# --- the block around an attention layer: its residual form, the norms of its sub-blocks ---


@dataclass(eq=False, slots=True, kw_only=True)
class FoundLayer:
    """One attention layer that ran."""

    value: Projection
    output: Projection
    mixings: tuple[AttentionTimesValues, ...]
    branch: Branch
    latent: FoundLatent | None = None
    gains: tuple[Gain, ...] = ()
    residual: Residual = "pre"
    norms: dict[str, NormCall] = field(default_factory=dict)
    end: Node | None = None
    """The stream after the feed-forward part, where it could be followed."""

    @property
    def width(self) -> int:
        return len(self.output.rows)


@dataclass(frozen=True, eq=False, slots=True)
class Refused:
    """One attention that the theory does not cover."""

    module: str
    weight: str
    """Its output projection, if there is one."""
    obstacle: Obstacle
    total: Node | None = None
    stream: Node | None = None


def follow_blocks(found: Sequence[FoundLayer], refused: Sequence[Refused], trace: Trace) -> None:
    """Residual form, norms of the sub-blocks and the end of every block."""
    crossings = {id(one.stream): one for one in refused if one.obstacle.kind == "cross" and one.stream is not None}
    for layer in found:
        _form(trace, layer)
        stream = _after(layer, "attn", layer.branch.total).root
        crossing = crossings.get(id(stream))
        if crossing is not None and crossing.total is not None:
            _sub_block(trace, layer, "cross", stream, crossing.total)
            stream = _after(layer, "cross", crossing.total).root
        total = layer.branch.total if layer.branch.is_parallel else _next_sum(stream)
        _sub_block(trace, layer, "ffn", stream, total)
        layer.end = None if total is None else _after(layer, "ffn", total)


def _form(trace: Trace, layer: FoundLayer) -> None:
    branch = layer.branch
    after = _reader(trace, branch.total, layer.width)
    if branch.norm_before is not None:
        layer.norms["attn_norm"] = branch.norm_before
    if branch.is_parallel or _joined_by_another(branch):
        layer.residual = "parallel"
    elif branch.norm_on_branch is not None:
        layer.residual = "sandwich"
        layer.norms["attn_branch_norm"] = branch.norm_on_branch
    elif branch.norm_before is None and after is not None:
        inside = f"{after.path}."
        if all(f"{use.module}.".startswith(inside) or use is after.made for use in uses(branch.total)):
            layer.residual = "post"  # the norm is all that reads the sum, so the stream continues behind it
            layer.norms["attn_norm"] = after


def _joined_by_another(branch: Branch) -> bool:
    """Whether a second branch is added that has not seen the first."""
    total = branch.total.root
    following = _next_sum(total)
    if following is None:
        return False
    others = [parent for parent in following.parents if parent.root is not total]
    return bool(others) and leads_to(branch.stream, others[0]) and not leads_to(total, others[0])


def _reader(trace: Trace, node: Node, width: int) -> NormCall | None:
    """The first norm that reads a tensor as features of a width; not several tokens side by side, as a merger does."""
    return next((call for call in trace.norms if call.read is node.root and width in call.shape), None)


def _after(layer: FoundLayer, sub: str, total: Node) -> Node:
    """The stream behind a sub-block: its sum, or in post-norm blocks the norm of that."""
    norm = layer.norms.get(f"{sub}_norm") if layer.residual == "post" else None
    return total if norm is None else norm.made


def _next_sum(stream: Node) -> Node | None:
    """The next sum on the stream."""
    return next((use for use in uses(stream) if use.op in SUMS and not any(p.parameter for p in use.parents)), None)


def _sub_block(trace: Trace, layer: FoundLayer, sub: str, stream: Node, total: Node | None) -> None:
    """The norms of a later sub-block, in the position that the residual form gives them."""
    if layer.residual == "post":
        norm = None if total is None else _reader(trace, total, layer.width)
    elif layer.residual == "parallel":
        others = (call for call in trace.norms if call.read is layer.branch.stream)
        norm = next((call for call in others if call is not layer.norms.get("attn_norm")), None)
    else:
        norm = _reader(trace, stream, layer.width)
    if norm is not None:
        layer.norms[f"{sub}_norm"] = norm
    if layer.residual == "sandwich" and total is not None:
        made = {id(call.made): call for call in trace.norms}
        on_branch = [made[id(parent.root)] for parent in total.parents if id(parent.root) in made]
        if on_branch:
            layer.norms[f"{sub}_branch_norm"] = on_branch[0]


def readers_of(trace: Trace, node: Node) -> Iterator[str]:
    """Paths of the modules that receive a tensor first, innermost last."""
    for call in trace.calls:
        if call.received is not None and call.received.root is node.root:
            yield call.path


# --- from a trace to attention layers: the value path of each, what stands around it ---


def layers_of(trace: Trace) -> tuple[list[FoundLayer], list[Refused]]:
    """Every attention of a trace, as a layer or as a refusal, in the order in which they ran."""
    found: list[FoundLayer] = []
    refused: list[Refused] = []
    readers = {
        id(mixing): product for product in trace.products if product.reading for mixing in product.reading.mixings
    }
    done: set[int] = set()
    for mixing in trace.mixings:
        if mixing.values.root.op == "given" or mixing.keys == 1:
            continue  # a fixed table, such as the bins of a regression, or one key: nothing is mixed
        output = readers.get(id(mixing))
        if output is not None and id(output) in done:
            continue
        if output is not None:
            done.add(id(output))
        one = _layer(trace, mixing, output)
        if isinstance(one, FoundLayer):
            found.append(one)
            if mixing.is_merged:
                words = f"cross-attention: {mixing.module} also reads another sequence, in the same softmax"
                obstacle = Obstacle("cross", mixing.module, words)
                refused.append(Refused(mixing.module, one.output.weight, obstacle))
        else:
            refused.append(one)
    follow_blocks(found, refused, trace)
    return found, refused


def _layer(trace: Trace, mixing: AttentionTimesValues, output: Projection | None) -> FoundLayer | Refused:
    obstacle = obstacle_of(trace, mixing, output)
    if obstacle is not None or output is None or output.reading is None:
        assert obstacle is not None, "a mixing that nothing reads has an obstacle"
        return Refused(mixing.module, output.weight if output else "", obstacle)
    value = trace.sources[int(output.reading.value_codes[0] // SHIFT)]
    assert isinstance(value, Projection)
    reads, latent = value, None
    branch = follow_branch(trace, value, output)
    if isinstance(branch, Obstacle) and (chain := latent_of(trace, value)) is not None:
        through = follow_branch(trace, chain.product, output)
        if not isinstance(through, Obstacle) and reads_the_stream(chain.product, through):
            reads, latent, branch = chain.product, chain, through
    if isinstance(branch, Obstacle):
        return Refused(mixing.module, output.weight, branch)
    other = _other_than_self_attention(trace, mixing, reads, output, branch) or way_around(trace, output, branch)
    if other is not None:
        return Refused(mixing.module, output.weight, other, branch.total, branch.stream)
    layer = FoundLayer(value=value, output=output, mixings=output.reading.mixings, branch=branch, latent=latent)
    if latent is not None and latent.norm is not None:
        layer.norms["latent_norm"] = latent.norm
    obstacle = _passages(trace, layer)
    return layer if obstacle is None else Refused(mixing.module, output.weight, obstacle)


def _passages(trace: Trace, layer: FoundLayer) -> Obstacle | None:
    """Notes the gains and norms on the mixed heads; one that the canonical form does not have is an obstacle."""
    own = {id(mixing) for mixing in layer.mixings}
    passed = [one for one in trace.passed if any(id(mixing) in own for mixing in one.mixings)]
    gains: list[Gain] = ["sink"] if layer.mixings[0].has_sink else []
    for one in passed:
        if one.kind == "norm":
            if "inner_norm" in layer.norms or one.norm is None:
                words = f"a second norm ({one.where}) stands between attention and the output projection"
                return Obstacle("norm", one.where, words)
            layer.norms["inner_norm"] = one.norm
            continue
        norm = layer.norms.get("inner_norm")
        if norm is not None and (norm_centres(norm.facts.kind) or one.kind == "differential"):
            words = f"{one.where} changes the mixed heads again behind the norm {norm.path}"
            return Obstacle(one.kind, one.where, words)
        gains.append(one.kind)  # type: ignore[arg-type]
    assert layer.output.reading is not None
    first, d_head = layer.mixings[0], int(layer.output.reading.channels.max()) + 1
    if len(own) > 1 and "differential" not in gains and d_head > first.channels:  # one head of several products
        words = f"the heads of {first.module} are put together from several attentions"
        return Obstacle("heads", first.module, words)
    if "differential" in gains:
        gains = ["differential"]  # numbers that multiply it are no gates
    layer.gains = tuple(dict.fromkeys(gains))
    return None


def _other_than_self_attention(
    trace: Trace, mixing: AttentionTimesValues, value: Projection, output: Projection, branch: Branch
) -> Obstacle | None:
    """Attention to another sequence, from a few tokens, or between two stages of a model."""
    where = mixing.module
    if not reads_the_stream(value, branch):
        read, _ = read_by(value)
        norm = trace.norm_that_made(read)
        attended = {id(other.made) for other in trace.mixings}
        if leads_to(read if norm is None else norm.read.root, branch.stream, avoiding=attended):
            skip = _skip_words(trace, branch.stream)
            words = f"{where} leads from one stage to the next: its skip connection is not the identity ({skip})"
            return Obstacle("stage", where, words)
        if leads_to(branch.stream, read, avoiding=attended):
            return between_stream_and_values(trace, value, read)
        return Obstacle("cross", where, f"cross-attention: {where} reads its values from another sequence")
    # Queries of a chunk may read its neighbours too; they pool where fewer tokens leave than were read.
    if mixing.queries < mixing.keys and not mixing.is_merged and _tokens(output) < _tokens(value):
        return _pooling(mixing)
    return None


def _skip_words(trace: Trace, skip: Node) -> str:
    """How the skip connection differs from the stream that attention reads, in words."""
    kind, where = maker_of(trace, skip)
    factor = next((parent.parameter for parent in skip.parents if parent.parameter), "")
    if skip.op in FACTORS and (factor or skip.number is not None):
        return f"{where} multiplies it by {factor or f'{skip.number:g}'}"
    return f"{where} ({kind}) makes it of the stream"


def _tokens(product: Projection) -> int:
    """How many tokens, of all sequences, go through a projection."""
    return math.prod(product.made.shape) // product.rows.shape[-1]
