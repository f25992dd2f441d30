"""From layers that were seen at work to declarations: blocks that repeat become one `Arch` with a number in its path."""

import math
import re
from collections import Counter
from collections.abc import Sequence

from oversmooth.models.declaration import NORM_ROLES, Arch, Paths
from oversmooth.models.discovery.blocks import FoundLayer, Refused, readers_of
from oversmooth.models.discovery.graph import Node
from oversmooth.models.discovery.layout import layout_of
from oversmooth.models.discovery.obstacles import Obstacle
from oversmooth.models.discovery.spelling import distinct, labels_of, relative, spelled
from oversmooth.models.discovery.stacks import Seen, block_of, stacks_of, tails_of
from oversmooth.models.discovery.trace import Trace


def declared(
    trace: Trace, found: Sequence[FoundLayer], refused: list[Refused], name: str, kind: str
) -> tuple[Arch, ...]:
    """One declaration per stack of alike blocks, in the order in which they run; adds to what is refused."""
    seen: dict[tuple[str, str], Seen] = {}
    for order, layer in enumerate(found):
        layout = layout_of(trace, layer)
        if isinstance(layout, Obstacle):
            refused.append(Refused(module=layer.mixings[0].module, weight=layer.output.weight, obstacle=layout))
            continue
        one = seen.setdefault((layer.value.weight, layer.output.weight), Seen(layer, layout))
        one.order.append(order)
    stacks = stacks_of(list(seen.values()), [one.module for one in refused])
    labels = labels_of(
        distinct([template for template, _ in stacks], [tails_of(members[0])[1] for _, members in stacks])
    )
    return tuple(
        _arch(trace, template, members, label, f"{name}.{label}" if label else name, kind)
        for (template, members), label in zip(stacks, labels, strict=True)
    )


def _arch(trace: Trace, template: str, members: list[Seen], label: str, name: str, kind: str) -> Arch:
    members = sorted(members, key=lambda one: _index(template, one))
    first, layout = members[0].layer, members[0].layout
    indices = [_index(template, one) for one in members]
    heads = tuple(one.layout.n_heads for one in members)
    is_plain = layout.fused is None
    norms = {role: [one.layer.norms[role] for one in members if role in one.layer.norms] for role in NORM_ROLES}
    without = tuple(role for role, calls in norms.items() if calls and not calls[0].facts.weight)
    kinds = Counter(call.facts.kind for calls in norms.values() for call in calls)
    plain_axes = {"out in": "out_in", "in out": "in_out"}
    stored = plain_axes.get(layout.value_axes, plain_axes.get(layout.output_axes, "out_in"))
    stream = _stream_shape(trace, template, members[0])
    keys = first.mixings[0].keys
    return Arch(
        name=name,
        model_types=(),
        paths=_paths(trace, template, members, is_plain=is_plain, without=without),
        kind=kind,  # type: ignore[arg-type]
        stack=label,
        norm=kinds.most_common(1)[0][0] if kinds else "layer",
        residual=first.residual,
        is_causal=first.mixings[0].is_causal,
        fused=layout.fused or "stacked",
        stored=stored,  # type: ignore[arg-type]
        value_axes="" if plain_axes.get(layout.value_axes) == stored else layout.value_axes,
        output_axes="" if plain_axes.get(layout.output_axes) == stored else layout.output_axes,
        latent_first=0 if first.latent is None else first.latent.first,
        gains=tuple(dict.fromkeys(gain for one in members for gain in one.layer.gains)),
        inner_norm_per_head=any(call.shape[-1] == layout.d_head for call in norms["inner_norm"]) and layout.n_heads > 1,
        value_gain=first.mixings[0].value_factor * (1.0 if first.latent is None else first.latent.factor),
        n_heads=heads[0] if len(set(heads)) == 1 else heads,
        n_kv="shape" if is_plain else layout.n_kv,
        d_head="config" if is_plain else layout.d_head,
        token_axis=0 if len(stream) == 3 and stream[0] == keys != stream[1] else 1,
        is_windowed=math.prod(stream[1:-1]) > keys * max(1, len(first.mixings)) and stream[0] != keys,
        is_hybrid=_is_hybrid(trace, template, indices),
        branch_gain=first.branch.factor,
        norms_without_weight=without,
        passes=_passes(members),
        proof=math.inf,  # not proved yet
    )


def _stream_shape(trace: Trace, template: str, one: Seen) -> tuple[int, ...]:
    """Shape of the stream as modules pass it on."""
    block, stream = _block_path(template, one), one.layer.branch.stream
    received = [call for call in trace.calls if call.received is not None and call.received.root is stream]
    for call in sorted(received, key=lambda call: call.path != block):
        if call.received is not None and len(call.received.shape) > 2:
            return call.received.shape
    return stream.shape


def _index(template: str, one: Seen) -> int:
    if "{i}" not in template:
        return template.split(",").index(block_of(one))
    match = re.match(re.escape(template).replace(r"\{i\}", r"(\d+)"), one.name)
    assert match is not None, "a layer belongs to the template that was made from it"
    return int(match[1])


def _is_hybrid(trace: Trace, template: str, indices: Sequence[int]) -> bool:
    if "{i}" not in template:
        return False
    pattern = re.compile(re.escape(template).replace(r"\{i\}", r"(\d+)") + r"\.")
    numbers = {int(match[1]) for name in trace.parameters.by_name if (match := pattern.match(name))}
    return set(indices) != set(range(max(numbers, default=0) + 1))


def _passes(members: Sequence[Seen]) -> tuple[tuple[int, ...], ...]:
    """When each block runs, where that is not simply one after the other."""
    every = sorted(order for one in members for order in one.order)
    passes = tuple(tuple(every.index(order) for order in one.order) for one in members)
    return () if all(found == (place,) for place, found in enumerate(passes)) else passes


def _paths(trace: Trace, template: str, members: Sequence[Seen], *, is_plain: bool, without: tuple[str, ...]) -> Paths:
    def common(found: Sequence[tuple[Seen, str, str]]) -> str:
        """The path of a role below the block; alternates where blocks differ."""
        spelled = (_spelled(template, one, weight, bias) for one, weight, bias in found)
        return "|".join(path for path, _ in Counter(spelled).most_common())

    value = common(
        [(one, one.layer.value.weight, "" if one.layout.has_own_bias else one.layout.value_bias) for one in members]
    )
    roles = {}
    for role in NORM_ROLES:
        calls = [(one, one.layer.norms[role]) for one in members if role in one.layer.norms]
        if role in without:
            roles[role] = _relative(template, calls[0][0], calls[0][1].path)
        elif calls:
            named = [
                (one, f"{call.path}.{call.facts.weight}", f"{call.path}.{call.facts.bias}" if call.facts.bias else "")
                for one, call in calls
            ]
            roles[role] = common(named)
    own_bias = [one for one in members if one.layout.has_own_bias]
    gains = [one for one in members if one.layer.branch.gain]
    last = max(members, key=lambda one: one.order[-1]).layer
    return Paths(
        block=template,
        v=value if is_plain else "",
        qkv="" if is_plain else value,
        v_bias=_relative(template, own_bias[0], own_bias[0].layout.value_bias) if own_bias else "",
        o=common([(one, one.name, one.layout.output_bias) for one in members]),
        latent=common(
            [(one, one.layer.latent.product.weight, one.layer.latent.bias) for one in members if one.layer.latent]
        ),
        attn_gain=_relative(template, gains[0], gains[0].layer.branch.gain) if gains else "",
        final_norm=_final_norm(trace, template, last),
        **_taps(trace, template, members),
        **roles,
    )


def _block_path(template: str, one: Seen) -> str:
    index = _index(template, one)
    return template.split(",")[index] if "{i}" not in template else template.replace("{i}", str(index))


def _relative(template: str, one: Seen, path: str) -> str:
    return relative(_block_path(template, one), _index(template, one), path)


def _spelled(template: str, one: Seen, weight: str, bias: str) -> str:
    return spelled(_block_path(template, one), _index(template, one), weight, bias)


def _final_norm(trace: Trace, template: str, last: FoundLayer) -> str:
    """The norm that reads the stream behind the last block."""
    if last.end is None or last.residual == "post":
        return ""
    pattern = re.compile(re.escape(template).replace(r"\{i\}", r"\d+").replace(",", "|") + r"(\.|$)")
    for call in trace.norms:
        is_whole = math.prod(call.shape) == math.prod(last.end.shape) and last.width in call.shape
        if call.read is last.end.root and is_whole and call.facts.weight and not pattern.match(call.path):
            weight, bias = call.facts.weight, call.facts.bias
            is_usual = weight == "weight" and bias in ("", "bias")
            return call.path if is_usual else f"{call.path}.[{weight},{bias}]"
    return ""


def _taps(trace: Trace, template: str, members: Sequence[Seen]) -> dict[str, str]:
    """Modules that receive the stream, where the block itself or its norms do not show it."""
    one = members[0]
    layer, block = one.layer, _block_path(template, one)
    call = next((call for call in trace.calls if call.path == block), None)
    shows_sum = {
        "pre": "ffn_norm" in layer.norms or "cross_norm" in layer.norms,
        "post": "ffn_norm" in layer.norms,
        "sandwich": "ffn_branch_norm" in layer.norms,
        "parallel": True,
    }[layer.residual]
    inside_block = all(norm.path.startswith(f"{block}.") for norm in layer.norms.values())
    if block and call is not None and call.received is not None and shows_sum and inside_block:
        is_stream = call.received.root is layer.branch.stream
        if is_stream or "attn_norm" in layer.norms:
            return {}
    found = {}
    before = _reader(trace, template, one, layer.branch.stream)
    after = _reader(trace, template, one, layer.branch.total)
    if before is not None:
        found["before"] = before
    if after is not None:
        found["after"] = after
    last = members[-1]
    if last.layer.end is not None:
        path = next(iter(readers_of(trace, last.layer.end)), None)
        if path is not None:
            found["end"] = path
    return found


def _reader(trace: Trace, template: str, one: Seen, node: Node) -> str | None:
    path = next((path for path in readers_of(trace, node) if path), None)
    return None if path is None else _relative(template, one, path)
