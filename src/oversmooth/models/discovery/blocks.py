"""The block around an attention layer: its residual form, the norms of its sub-blocks, and where it ends."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from oversmooth.models.declaration import Gain, Residual
from oversmooth.models.discovery.branches import Branch
from oversmooth.models.discovery.graph import SUMS, Node, leads_to, uses
from oversmooth.models.discovery.latents import Latent
from oversmooth.models.discovery.norms import NormCall
from oversmooth.models.discovery.obstacles import Obstacle
from oversmooth.models.discovery.products import Mixing, Product
from oversmooth.models.discovery.trace import Trace


@dataclass(eq=False, slots=True, kw_only=True)
class FoundLayer:
    """One attention layer that was seen at work."""

    value: Product
    output: Product
    mixings: tuple[Mixing, ...]
    branch: Branch
    latent: Latent | None = None
    gains: tuple[Gain, ...] = ()
    residual: Residual = "pre"
    norms: dict[str, NormCall] = field(default_factory=dict)
    end: Node | None = None
    """The stream after the feed-forward part, where it could be followed."""

    @property
    def width(self) -> int:
        return len(self.output.rows)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Refused:
    """One attention that the theory does not cover."""

    module: str
    weight: str
    """Its output projection, where there is one."""
    obstacle: Obstacle
    total: Node | None = None
    stream: Node | None = None


def follow_blocks(found: Sequence[FoundLayer], refused: Sequence[Refused], trace: Trace) -> None:
    """Residual form, norms of the sub-blocks and the end of every block."""
    crossings = {id(one.stream): one for one in refused if one.obstacle.kind == "cross" and one.stream is not None}
    for layer in found:
        _form(trace, layer)
        stream = _stream_after(layer)
        crossing = crossings.get(id(stream))
        if crossing is not None and crossing.total is not None:
            _sub_block(trace, layer, "cross", stream, crossing.total)
            stream = _stream_after_cross(layer, crossing.total.root)
        total = layer.branch.total if layer.branch.is_parallel else _next_sum(stream)
        _sub_block(trace, layer, "ffn", stream, total)
        layer.end = total if layer.residual != "post" else _made(layer.norms.get("ffn_norm"), total)


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
    elif branch.norm_before is None and after is not None and _only_reader(branch.total, after):
        layer.residual = "post"
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


def _only_reader(node: Node, norm: NormCall) -> bool:
    """Whether a norm is all that reads a tensor: then the stream goes on behind it."""
    return all(
        use.module == norm.path or use.module.startswith(f"{norm.path}.") or use is norm.made for use in uses(node)
    )


def _stream_after(layer: FoundLayer) -> Node:
    if layer.residual == "post":
        return layer.norms["attn_norm"].made.root
    return layer.branch.total.root


def _stream_after_cross(layer: FoundLayer, total: Node) -> Node:
    norm = layer.norms.get("cross_norm")
    return norm.made.root if layer.residual == "post" and norm is not None else total


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


def _made(norm: NormCall | None, otherwise: Node | None) -> Node | None:
    return otherwise if norm is None else norm.made


def readers_of(trace: Trace, node: Node) -> Iterator[str]:
    """Paths of the modules that receive a tensor first, innermost last."""
    for call in trace.calls:
        if call.received is not None and call.received.root is node.root:
            yield call.path
