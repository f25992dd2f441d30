"""From the output projection of an attention back to the residual stream, and what is passed on the way."""

from collections.abc import Sequence
from dataclasses import dataclass

from oversmooth.models.discovery.graph import FACTORS, SUMS, Node, leads_to, uses
from oversmooth.models.discovery.norms import NormCall
from oversmooth.models.discovery.obstacles import Obstacle, maker_of
from oversmooth.models.discovery.products import Product
from oversmooth.models.discovery.trace import Trace

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


def follow_branch(trace: Trace, value: Product, output: Product) -> Branch | Obstacle:
    """From the output projection to the sum with the residual stream, and what stands in between."""
    read, factor = read_by(value)
    norm = next((call for call in reversed(trace.norms) if call.made is read), None)
    streams = [read] if norm is None else [read, norm.read.root]
    branch = Branch(total=output.made, stream=read, norm_before=None, factor=factor)
    current = output.made.root
    for _ in range(12):
        following = uses(current)
        total = next((use for use in following if use.op in SUMS and _other(use, current, streams)), None)
        if total is not None:
            met = _other(total, current, streams)
            assert met is not None
            branch.total, branch.stream = total, met
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


def read_by(value: Product) -> tuple[Node, float]:
    """What a value projection reads, and the plain number that multiplies it on the way."""
    read, factor = value.read.root, 1.0
    while read.op in ("mul", "div") and len(read.parents) == 1 and read.number is not None:
        factor *= read.number if read.op == "mul" else 1.0 / read.number
        read = read.parents[0].root
    return read, factor


def _alpha(total: Node, current: Node) -> float:
    is_second = len(total.parents) > 1 and total.parents[1].root is current
    return total.number if is_second and total.number is not None else 1.0


def _other(total: Node, current: Node, streams: Sequence[Node]) -> Node | None:
    """The stream that a sum adds to, if it adds to one; a skip connection times one is a skip connection."""
    for parent in total.parents:
        added = parent.root
        while added.number == 1.0 and added.op in ("mul", "div") and not any(added is stream for stream in streams):
            added = added.parents[0].root
        if parent.root is not current and any(added is stream for stream in streams):
            return added
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
    norm = next((call for call in trace.norms if call.read is current and call.made.order > current.order), None)
    if norm is not None:
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
            return Obstacle(kind="gate", where=where, reason=words)
    return None


def _no_sum(trace: Trace, branch: Branch, value: Product, output: Product, current: Node) -> Branch | Obstacle:
    """The branch never meets the stream: cross-attention, something between stream and values, or no skip at all."""
    maker = next((product for product in trace.products if product.made.root is value.read.root), None)
    inner = next((call for call in trace.norms if call.made is value.read.root), None)
    if maker is None and inner is not None:
        maker = next((product for product in trace.products if product.made.root is inner.read), None)
    if maker is not None:
        through = f", the norm {inner.path}" if inner is not None else ""
        words = f"latent values: {maker.weight.rpartition('.')[0]}{through} and {value.weight} stand between"
        return Obstacle(kind="latent", where=inner.path if inner else maker.weight, reason=f"{words} stream and values")
    met = _any_sum(output.made.root)
    if met is None:
        return branch  # no skip connection: the branch is the new stream
    total, other = met
    if other is value.read.root or (inner is not None and inner.read.root is other):
        where = current.module or "the model"
        words = f"{where} ({current.op}) stands between {output.weight} and the residual stream"
        return Obstacle(kind="routed" if current.op in ROUTING else "other", where=where, reason=words)
    if leads_to(other, value.read.root):
        return between_stream_and_values(trace, value, value.read.root)
    branch.total, branch.stream = total, other
    return branch


def between_stream_and_values(trace: Trace, value: Product, read: Node) -> Obstacle:
    """What made the features that a value projection reads, where it is no norm of the stream."""
    kind, where = maker_of(trace, read)
    if kind == "cat":
        words = f"{where} puts other features or tokens beside the residual stream in front of {value.weight}"
        return Obstacle(kind="concatenation", where=where, reason=words)
    if kind == "flip":
        words = f"cross-attention: {where} reads its values from the sequence beside its own"
        return Obstacle(kind="cross", where=where, reason=words)
    words = f"{where} ({kind}) stands between the residual stream and the values of {value.weight}"
    known = ("norm", "convolution", "gate", "batch norm", "group norm")
    return Obstacle(kind=kind if kind in known else "other", where=where, reason=words)


def _any_sum(node: Node) -> tuple[Node, Node] | None:
    current = node
    for _ in range(6):
        following = uses(current)
        for use in following:
            others = [parent for parent in use.parents if parent.root is not current and not parent.parameter]
            if use.op in SUMS and others:
                return use, others[0].root
        if len(following) != 1:
            return None
        current = following[0].root
    return None


def reads_the_stream(value: Product, branch: Branch) -> bool:
    reads, _ = read_by(value)
    is_normed = branch.norm_before is not None and branch.norm_before.read.root is branch.stream
    return branch.stream is reads or is_normed or branch.total is branch.stream
