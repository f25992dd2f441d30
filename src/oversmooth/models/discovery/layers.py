"""From a trace to attention layers: the value path of each, what stands around it, or what stands in the way.

residual stream -> norm -> value projection -> attention -> output projection -> norm, gain -> + residual stream
"""

import math

from oversmooth.models.declaration import Gain, norm_centres
from oversmooth.models.discovery.blocks import FoundLayer, Refused, follow_blocks
from oversmooth.models.discovery.branches import (
    Branch,
    between_stream_and_values,
    follow_branch,
    read_by,
    reads_the_stream,
)
from oversmooth.models.discovery.graph import leads_to
from oversmooth.models.discovery.latents import latent_of
from oversmooth.models.discovery.obstacles import Obstacle, obstacle_of
from oversmooth.models.discovery.products import Mixing, Product
from oversmooth.models.discovery.trace import Trace
from oversmooth.models.discovery.weights import SHIFT


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
                obstacle = Obstacle(kind="cross", where=mixing.module, reason=words)
                refused.append(Refused(module=mixing.module, weight=one.output.weight, obstacle=obstacle))
        else:
            refused.append(one)
    follow_blocks(found, refused, trace)
    return found, refused


def _layer(trace: Trace, mixing: Mixing, output: Product | None) -> FoundLayer | Refused:
    obstacle = obstacle_of(trace, mixing, output)
    if obstacle is not None or output is None or output.reading is None:
        assert obstacle is not None, "a mixing that nothing reads has an obstacle"
        return Refused(module=mixing.module, weight=output.weight if output else "", obstacle=obstacle)
    value = trace.sources[int(output.reading.value_codes[0] // SHIFT)]
    assert isinstance(value, Product)
    reads, latent = value, None
    branch = follow_branch(trace, value, output)
    if isinstance(branch, Obstacle) and (chain := latent_of(trace, value)) is not None:
        through = follow_branch(trace, chain.product, output)
        if not isinstance(through, Obstacle) and reads_the_stream(chain.product, through):
            reads, latent, branch = chain.product, chain, through
    if isinstance(branch, Obstacle):
        return Refused(module=mixing.module, weight=output.weight, obstacle=branch)
    other = _other_than_self_attention(trace, mixing, reads, output, branch)
    if other is not None:
        return Refused(
            module=mixing.module, weight=output.weight, obstacle=other, total=branch.total, stream=branch.stream
        )
    layer = FoundLayer(value=value, output=output, mixings=output.reading.mixings, branch=branch, latent=latent)
    if latent is not None and latent.norm is not None:
        layer.norms["latent_norm"] = latent.norm
    obstacle = _passages(trace, layer)
    return layer if obstacle is None else Refused(module=mixing.module, weight=output.weight, obstacle=obstacle)


def _passages(trace: Trace, layer: FoundLayer) -> Obstacle | None:
    """Notes what the mixed heads went through; one that the canonical form does not have stands in the way."""
    own = {id(mixing) for mixing in layer.mixings}
    passed = [one for one in trace.passed if any(id(mixing) in own for mixing in one.mixings)]
    gains: list[Gain] = ["sink"] if layer.mixings[0].has_sink else []
    for one in passed:
        if one.kind == "norm":
            if "inner_norm" in layer.norms or one.norm is None:
                words = f"a second norm ({one.where}) stands between attention and the output projection"
                return Obstacle(kind="norm", where=one.where, reason=words)
            layer.norms["inner_norm"] = one.norm
            continue
        norm = layer.norms.get("inner_norm")
        if norm is not None and (norm_centres(norm.facts.kind) or one.kind == "differential"):
            words = f"{one.where} changes the mixed heads again behind the norm {norm.path}"
            return Obstacle(kind=one.kind, where=one.where, reason=words)
        gains.append(one.kind)  # type: ignore[arg-type]
    if len({id(mixing) for mixing in layer.mixings}) > 1 and "differential" not in gains and _is_halved(layer):
        words = f"the heads of {layer.mixings[0].module} are put together from several attentions"
        return Obstacle(kind="heads", where=layer.mixings[0].module, reason=words)
    if "differential" in gains:
        gains = ["differential"]  # numbers that multiply it are no gates
    layer.gains = tuple(dict.fromkeys(gains))
    return None


def _is_halved(layer: FoundLayer) -> bool:
    """Whether one head is made of the results of two products."""
    assert layer.output.reading is not None
    return int(layer.output.reading.channels.max()) + 1 > layer.mixings[0].channels


def _other_than_self_attention(
    trace: Trace, mixing: Mixing, value: Product, output: Product, branch: Branch
) -> Obstacle | None:
    """Attention to another sequence, from a few tokens, or between two stages of a model."""
    where = mixing.module
    if not reads_the_stream(value, branch):
        read, _ = read_by(value)
        norm = next((call for call in reversed(trace.norms) if call.made is read), None)
        attended = {id(other.made) for other in trace.mixings}
        if leads_to(read if norm is None else norm.read.root, branch.stream, avoiding=attended):
            words = f"{where} leads from one stage to the next: its skip connection is not the identity"
            return Obstacle(kind="stage", where=where, reason=words)
        if leads_to(branch.stream, read, avoiding=attended):
            return between_stream_and_values(trace, value, read)
        words = f"cross-attention: {where} reads its values from another sequence"
        return Obstacle(kind="cross", where=where, reason=words)
    # Queries of a chunk may read its neighbours too; they pool where fewer tokens leave than were read.
    if mixing.queries < mixing.keys and not mixing.is_merged and _tokens(output) < _tokens(value):
        words = f"{where} pools: {mixing.queries} queries read {mixing.keys} tokens"
        return Obstacle(kind="pooling", where=where, reason=words)
    return None


def _tokens(product: Product) -> int:
    """How many tokens, of all sequences, go through a projection."""
    return math.prod(product.made.shape) // product.rows.shape[-1]
