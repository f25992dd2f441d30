"""From the attention layers that were found to an `Arch`: storage layout, stacks, names."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Int
from torch import Tensor

from oversmooth.models.canonical import value_rows
from oversmooth.models.declaration import NORM_ROLES, Arch, Fused, FusedRows, Paths
from oversmooth.models.discovery.layers import FoundLayer, Obstacle, Refused, readers_of
from oversmooth.models.discovery.operations import SHIFT, Node, Parameter
from oversmooth.models.discovery.trace import Trace

# --- how a layer's value and output weights are stored, read off the codes: rows, heads, axes and biases ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Everything that `assemble` needs to know about the storage of one layer."""

    d_model: int
    n_heads: int
    n_kv: int
    d_head: int
    fused: Fused | FusedRows | None
    """`None` if the values have a weight of their own."""
    value_axes: str
    """`out in` and `in out` are plain matrices."""
    output_axes: str
    value_bias: str
    has_own_bias: bool
    """Whether the bias has one entry per value channel, whatever the rows of the weight."""
    output_bias: str


class Irregular(Exception):
    """A storage layout that no declaration can express."""


def layout_of(trace: Trace, layer: FoundLayer) -> Layout | Obstacle:
    """The storage of a layer, or why no declaration can express it."""
    read, made, name = layer.value.columns.shape[-1], len(layer.output.rows), layer.output.weight
    if layer.latent is None and read != made:
        if (beside := _beside_the_stream(trace, layer)) is not None:
            return beside
        words = f"{name} leads from one stage of width {read} to the next of width {made}"
        return Obstacle("stage", name.rpartition(".")[0], words)
    try:
        return _layout(trace, layer)
    except Irregular as error:
        return Obstacle("layout", name.rpartition(".")[0], f"{name}: {error}")


def _beside_the_stream(trace: Trace, layer: FoundLayer) -> Obstacle | None:
    """Something else that the values read together with the stream."""
    first = layer.value.read.root
    for read in (first, *(norm.read.root for norm in trace.norms if norm.made is first)):
        if read.op == "cat":
            where = read.module or "the model"
            words = f"{where} puts other features beside the residual stream in front of {layer.value.weight}"
            return Obstacle("concatenation", where, words)
    return None


def _layout(trace: Trace, layer: FoundLayer) -> Layout:
    reading, value, output = layer.output.reading, layer.value, layer.output
    assert reading is not None
    inner = len(reading.channels)
    d_head = int(reading.channels.max()) + 1
    n_heads = inner // d_head
    value_parameter = trace.parameters.by_name[value.weight]
    value_axes, rows = _value_rows(value_parameter, value.in_step, (reading.value_codes % SHIFT).long())
    output_axes, columns = _columns(trace.parameters.by_name[output.weight], output.out_step, output.columns)
    if output.columns.ndim > 1:
        raise Irregular("heads have output weights of their own, which are summed afterwards")
    order = columns.argsort()
    rows, channels = rows[order], reading.channels[order]
    one_by_one = torch.arange(inner) % d_head
    if not torch.equal(channels, one_by_one) and torch.equal(channels, torch.arange(inner) // n_heads):
        rows, channels = (part.reshape(d_head, n_heads).T.flatten() for part in (rows, channels))  # heads alternate
        output_axes = f"{output_axes.split()[0]} channel head"
    if not torch.equal(channels, one_by_one):
        raise Irregular("the channels of the heads reach the output projection in no regular order")
    norm = layer.norms.get("inner_norm")
    if norm is not None and norm.shape[-1] not in (inner, d_head):
        raise Irregular(f"the norm {norm.path} takes neither single heads nor all of them")
    heads = rows.reshape(n_heads, d_head)
    n_kv, of_heads = _value_heads(heads)
    sizes = zip(value_parameter.shape, value_axes.split(), strict=False)
    fused = fused_form(of_heads, n_heads, math.prod(size for size, name in sizes if name != "in"))
    bias, has_own = _bias(trace, layer, of_heads, value_parameter)
    return Layout(
        d_model=len(output.rows),
        n_heads=n_heads,
        n_kv=n_kv,
        d_head=d_head,
        fused=fused,
        value_axes=value_axes,
        output_axes=output_axes,
        value_bias=bias,
        has_own_bias=has_own,
        output_bias=layer.output.bias_in(trace.sources),
    )


def _value_rows(parameter: Parameter, in_step: int, positions: Int[Tensor, " in"]) -> tuple[str, Int[Tensor, " in"]]:
    """Names of the parameter's axes, and for each value channel its row among all rows."""
    shape = parameter.shape
    if len(shape) > 2 and set(shape[2:]) == {1}:
        shape = shape[:2]
    used = [axis for axis in range(len(shape)) if parameter.strides[axis] == in_step and shape[axis] > 1]
    if not used:
        raise Irregular(f"{parameter.name} is used along none of its axes")
    axis = used[0]
    if len(shape) == 2:
        other = 1 - axis
        return ("out in" if axis == 1 else "in out"), positions // parameter.strides[other] % shape[other]
    if len(shape) != 3:
        raise Irregular(f"a value weight of shape {shape}")
    row = torch.zeros_like(positions)
    for other in (a for a in range(3) if a != axis):
        row = row * shape[other] + positions // parameter.strides[other] % shape[other]
    names = ["head", "channel"]
    names.insert(axis, "in")
    return " ".join(names), row


def _columns(parameter: Parameter, out_step: int, positions: Int[Tensor, " in"]) -> tuple[str, Int[Tensor, " in"]]:
    """The same for the output weight: names of its axes, and the column of each of its inputs."""
    axes, columns = _value_rows(parameter, out_step, positions)
    swapped = {"out": "in", "in": "out"}
    return " ".join(swapped.get(name, name) for name in axes.split()), columns


def _value_heads(heads: Int[Tensor, "head channel"]) -> tuple[int, Int[Tensor, "kv channel"]]:
    """The different value heads, in the order in which groups of query heads read them."""
    changes = (heads[1:] != heads[:-1]).any(1).nonzero()[:, 0] + 1
    starts = [0, *changes.tolist()]
    n_kv = len(starts)
    distinct = heads[starts]
    if len(distinct.unique(dim=0)) != n_kv or len(heads) % n_kv:
        raise Irregular("query heads share value heads in no regular order")
    if not torch.equal(distinct.repeat_interleave(len(heads) // n_kv, 0), heads):
        raise Irregular("query heads share value heads in groups of different sizes")
    return n_kv, distinct


def fused_form(rows: Int[Tensor, "kv channel"], n_heads: int, all_rows: int) -> Fused | FusedRows | None:
    n_kv, d_head = rows.shape
    if rows.numel() == all_rows and torch.equal(rows.flatten(), torch.arange(all_rows)):
        return None
    if all_rows == (n_heads + 2 * n_kv) * d_head:
        for name in ("stacked", "grouped"):
            if torch.equal(value_rows(name, n_heads, n_kv, d_head), rows.flatten()):
                return name
    per_channel = int(rows[0, 1] - rows[0, 0]) if d_head > 1 else 1
    found = FusedRows(
        first=int(rows[0, 0]), per_head=int(rows[1, 0] - rows[0, 0]) if n_kv > 1 else 0, per_channel=per_channel
    )
    if d_head % 2 == 0 and not torch.equal(value_rows(found, n_heads, n_kv, d_head), rows.flatten()):
        found = replace(found, second_half=int(rows[0, d_head // 2] - rows[0, 0]))
    if not torch.equal(value_rows(found, n_heads, n_kv, d_head), rows.flatten()):
        raise Irregular("the rows of the values follow no regular order in their weight")
    return found


def _bias(trace: Trace, layer: FoundLayer, rows: Tensor, parameter: Parameter) -> tuple[str, bool]:
    """Name of the value bias, and whether it has one entry per value channel instead of one per row."""
    by_row: dict[int, float] = {}
    for positions, bias in layer.value.biases:
        _, of_bias = _value_rows(parameter, layer.value.in_step, positions.reshape(-1).long())
        by_row.update(zip(of_bias.tolist(), bias.reshape(-1).tolist(), strict=True))
    if not by_row:
        return "", False
    codes = [by_row.get(row, -1.0) for row in rows.flatten().tolist()]
    sources = {int(code // SHIFT) for code in codes}
    if len(sources) != 1 or -1 in sources:
        raise Irregular("the value bias is put together from several tensors")
    source = trace.sources[sources.pop()]
    assert isinstance(source, Parameter)
    entries = [int(code % SHIFT) for code in codes]
    if entries == rows.flatten().tolist():
        return source.name, False
    if entries == list(range(len(entries))):
        return source.name, True
    raise Irregular("the value bias is stored in another order than the values")


# --- how names are written in a declaration: blocks with a number in their path, and paths below a block ---

NUMBER = re.compile(r"\d+")
NUMBERED = re.compile(r"(\d+|\{i\})(\.|$)")
"""A path that begins with a number."""


def unnumbered(name: str) -> str:
    """A name without its numbers: the same for alike blocks."""
    return NUMBER.sub("#", name)


def template_of(name: str, place: int) -> str:
    """The path of the block that a tensor is in, `{i}` standing for the number at a place among its numbers.

    >>> template_of("encoder.layer.3.attention.dense.weight", 0)
    'encoder.layer.{i}'
    """
    match = list(NUMBER.finditer(name))[place]
    end = name.find(".", match.end())
    return name[: match.start()] + "{i}" + name[match.end() : end if end > 0 else len(name)]


def relative(block: str, index: int, path: str) -> str:
    """A path below the block, or `^` and the whole path with the block's number in it.

    >>> relative("layers.1", 1, "layers.1.attn.v"), relative("layers.1", 1, "norms.1")
    ('attn.v', '^norms.{i}')
    """
    if not block or path.startswith(f"{block}."):
        return path[len(block) + 1 :] if block else path
    if path == block:
        return ""
    return "^" + NUMBER.sub(lambda match: "{i}" if match[0] == str(index) else match[0], path)


def numbered(indices: Sequence[int], names: Sequence[str]) -> str | None:
    """One name for all, outside of their blocks, whose numbers follow from those of the blocks; `None` where they do not.

    >>> numbered([0, 2, 4], ["layers.1.0.norm", "layers.3.0.norm", "layers.5.0.norm"])
    '^layers.{i+1}.0.norm'
    """
    if len({unnumbered(name) for name in names}) > 1:
        return None
    forms = [
        _form(indices, [int(number) for number in column]) for column in zip(*map(NUMBER.findall, names), strict=True)
    ]
    if None in forms:
        return None
    rest = iter(forms)
    return "^" + NUMBER.sub(lambda match: next(rest) or "", names[0])


def _form(indices: Sequence[int], numbers: Sequence[int]) -> str | None:
    """Numbers as `{i}`, `{i+1}` or `{3i+1}` of the blocks' own."""
    if len(set(numbers)) == 1:
        return "{i}" if list(numbers) == list(indices) else str(numbers[0])
    step = (numbers[1] - numbers[0]) // max(1, indices[1] - indices[0])
    first = numbers[0] - step * indices[0]
    if step < 1 or any(step * index + first != number for index, number in zip(indices, numbers, strict=True)):
        return None
    return f"{{{step if step > 1 else ''}i{f'{first:+d}' if first else ''}}}"


def spelled(block: str, index: int, weight: str, bias: str) -> str:
    """The path that names a weight and its bias.

    >>> spelled("layers.0", 0, "layers.0.norm.a_2", "layers.0.norm.b_2")
    'norm.[a_2,b_2]'
    """
    return with_bias(relative(block, index, weight), relative(block, index, bias) if bias else "")


def with_bias(weight: str, bias: str) -> str:
    """The path that names both, from the name of each.

    >>> with_bias("attention.dense.weight", "attention.dense_bias")
    'attention.[dense.weight,dense_bias]'
    """
    stem = weight.removesuffix(".weight")
    if stem != weight and bias in ("", f"{stem}.bias"):
        return stem
    stem = weight.removesuffix("weight")
    if stem and stem != weight and bias in ("", f"{stem}bias"):
        return f"{stem}*"
    parts = weight.split(".")
    above = shared([parts[:-1], bias.split(".")[:-1]]) if bias else parts[:-1]
    last = ".".join(parts[len(above) :])
    listed = f"[{last},{'.'.join(bias.split('.')[len(above) :])}]" if bias else f"[{last}]"
    return ".".join([*above, listed])


def shared(paths: Sequence[Sequence[str]]) -> list[str]:
    """The parts that all paths begin with."""
    return [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]


def stack_labels(templates: Sequence[str], tails: Sequence[str]) -> list[str]:
    """What tells stacks apart: the paths of their blocks and, where these are the same, `tails` below the blocks.

    >>> stack_labels(["layers.{i}", "layers.{i}", "blocks.{i}"], [".self.out", ".cross.out", ".out"])
    ['self', 'cross', 'blocks']
    """
    pairs = zip(templates, tails, strict=True)
    return labels_of([template + tail if templates.count(template) > 1 else template for template, tail in pairs])


def labels_of(templates: Sequence[str]) -> list[str]:
    """What tells paths apart, as short as possible: nothing if there is one.

    >>> labels_of(["encoder.text_model.layers.{i}", "encoder.vision_tower.layers.{i}", "decoder.layers.{i}"])
    ['text', 'vision', 'decoder']
    """
    if len(templates) == 1:
        return [""]
    found = _first_difference(templates)
    for label in dict.fromkeys(found):
        alike = [place for place, other in enumerate(found) if other == label]
        if 1 < len(alike) < len(found):
            inner = labels_of([templates[place] for place in alike])
            is_enough = not set(inner) & set(found)
            for place, own in zip(alike, inner, strict=True):
                found[place] = own if is_enough else f"{label}.{own}"
    return found if len(set(found)) == len(found) else [template.replace(".{i}", "") for template in templates]


def _first_difference(templates: Sequence[str]) -> list[str]:
    """The first part of each path in which they differ."""
    split = [re.split(r"[.,]", template) for template in templates]
    front = len(shared(split))
    found = [part[front] if len(part) > front else part[-1] for part in split]
    while front and any(NUMBERED.match(label) for label in found):
        front -= 1
        found = [f"{split[0][front]}.{label}" for label in found]
    return [re.sub(r"(?<=.)_(model|tower|transformer)$", "", label).replace(".{i}", "") for label in found]


# --- which layers are one stack: blocks that are alike and differ in a number of their path ---


@dataclass(eq=False, slots=True)
class DistinctLayer:
    """One layer with its own weights, and every pass through it."""

    layer: FoundLayer
    layout: Layout
    order: list[int] = field(default_factory=list)
    """Which of all attention layers it was, each time it ran."""
    index: int = 0
    """Number of its block in the stack."""
    path: str = ""
    """Path of its block."""

    @property
    def name(self) -> str:
        return self.layer.output.weight

    @property
    def module(self) -> str:
        return self.layer.mixings[0].module

    def place_in(self, template: str) -> None:
        """Notes which block of a stack it is."""
        if "{i}" in template:
            match = re.match(_pattern(template), self.name)
            assert match is not None, "a layer belongs to the template that was made from it"
            self.index, self.path = int(match[1]), template.replace("{i}", match[1])
        else:
            self.path = block_of(self)
            self.index = template.split(",").index(self.path)

    def below(self, name: str) -> str:
        return relative(self.path, self.index, name)


Stacked = tuple[str, list[DistinctLayer]]
"""Path of the block with `{i}` (or the listed paths of blocks without a number), and its layers."""


def _pattern(template: str) -> str:
    return re.escape(template).replace(r"\{i\}", r"(\d+)")


def stacks_of(seen: Sequence[DistinctLayer], refused: Collection[str]) -> list[Stacked]:
    """Layers by stack, in the order in which they run; `refused`: modules whose attention is not a layer."""
    alike: dict[tuple[object, ...], list[DistinctLayer]] = {}
    for one in seen:
        alike.setdefault((unnumbered(one.name), _kind(one)), []).append(one)
    forms = Counter(unnumbered(one.name) for one in seen)
    found: list[Stacked] = []
    listed: dict[tuple[object, ...], list[DistinctLayer]] = {}
    for (form, kind), members in alike.items():
        numbers = [NUMBER.findall(member.name) for member in members]
        varying = [place for place in range(len(numbers[0])) if len({number[place] for number in numbers}) > 1]
        if not varying and numbers[0] and forms[str(form)] == len(members):
            varying = [0]
        if not varying:
            listed.setdefault((tails_of(members[0]), kind), []).extend(members)
            continue
        stages: dict[tuple[str, ...], list[DistinctLayer]] = {}
        for member, number in zip(members, numbers, strict=True):
            outer = tuple(value for place, value in enumerate(number) if place != varying[-1])
            stages.setdefault(outer, []).append(member)
        for group in stages.values():
            template = template_of(group[0].name, varying[-1])
            if _is_exact(template, group, seen, set(refused) - {one.module for one in seen}):
                found.append((template, group))
            else:
                listed.setdefault((tails_of(group[0]), kind, template), []).extend(group)
    found += [(",".join(block_of(member) for member in members), members) for members in listed.values()]
    return sorted(found, key=lambda stack: stack[1][0].order[0])


def _is_exact(
    template: str, group: Sequence[DistinctLayer], seen: Sequence[DistinctLayer], refused: Collection[str]
) -> bool:
    """Whether a template means the blocks of a group and no others, such as one whose attention is refused."""
    pattern = re.compile(_pattern(template) + r"\.")
    has_others = any(pattern.match(other) and unnumbered(other) == unnumbered(group[0].module) for other in refused)
    return not has_others and sum(1 for one in seen if pattern.match(one.name)) == len(group)


def _kind(one: DistinctLayer) -> tuple[object, ...]:
    """What all blocks of one stack have in common."""
    layout, layer, mixing = one.layout, one.layer, one.layer.mixings[0]
    sizes = () if layout.fused is None else (layout.n_heads, layout.n_kv, layout.d_head)
    latent = layer.latent and layer.latent.first
    form = (layout.fused, layout.value_axes, layout.output_axes, latent, mixing.value_factor)
    return (layout.d_model, *form, "inner_norm" in layer.norms, sizes, layer.residual, mixing.is_causal)


def block_of(one: DistinctLayer) -> str:
    """The module that holds both projections of a layer and the norms of the same block."""
    block = shared([name.split(".") for name in (one.layer.value.weight, one.name)])
    for call in one.layer.norms.values():
        together = shared([block, call.path.split(".")])
        if together and NUMBER.findall(".".join(together)) == NUMBER.findall(".".join(block)):  # not the next block's
            block = together
    return ".".join(block)


def tails_of(one: DistinctLayer) -> tuple[str, ...]:
    block = block_of(one)
    return tuple(name.removeprefix(block) for name in (one.layer.value.weight, one.name))


# --- from layers to declarations ---


def declared(
    trace: Trace, found: Sequence[FoundLayer], refused: list[Refused], name: str, kind: str
) -> tuple[Arch, ...]:
    """One declaration per stack of alike blocks, in the order in which they run; adds to what is refused."""
    seen: dict[tuple[str, str], DistinctLayer] = {}
    for order, layer in enumerate(found):
        layout = layout_of(trace, layer)
        if isinstance(layout, Obstacle):
            refused.append(Refused(layer.mixings[0].module, layer.output.weight, layout))
            continue
        one = seen.setdefault((layer.value.weight, layer.output.weight), DistinctLayer(layer, layout))
        one.order.append(order)
    stacks = stacks_of(list(seen.values()), [one.module for one in refused])
    labels = stack_labels([template for template, _ in stacks], [tails_of(members[0])[1] for _, members in stacks])
    inner = {call.path for layer in found for call in layer.norms.values()}
    archs = []
    for (template, members), label in zip(stacks, labels, strict=True):
        for one in members:
            one.place_in(template)
        members.sort(key=lambda one: one.index)
        arch = _arch(trace, template, members, inner, kind)
        archs.append(replace(arch, name=f"{name}.{label}" if label else name, stack=label))
    return tuple(archs)


def _arch(trace: Trace, template: str, members: list[DistinctLayer], inner: Collection[str], kind: str) -> Arch:
    """The declaration of one stack; `inner`: norms inside the blocks of all stacks."""
    first, layout, mixing = members[0].layer, members[0].layout, members[0].layer.mixings[0]
    heads = tuple(one.layout.n_heads for one in members)
    is_plain = layout.fused is None
    norms = {role: [one.layer.norms[role] for one in members if role in one.layer.norms] for role in NORM_ROLES}
    without = tuple(role for role, calls in norms.items() if calls and not calls[0].facts.weight)
    kinds = Counter(call.facts.kind for calls in norms.values() for call in calls)
    plain_axes = {"out in": "out_in", "in out": "in_out"}
    stored = plain_axes.get(layout.value_axes, plain_axes.get(layout.output_axes, "out_in"))
    stream = _stream_shape(trace, members[0])
    return Arch(
        name="",
        model_types=(),
        paths=_paths(trace, template, members, inner, without),
        kind=kind,  # type: ignore[arg-type]
        norm=kinds.most_common(1)[0][0] if kinds else "layer",
        residual=first.residual,
        is_causal=mixing.is_causal,
        fused=layout.fused or "stacked",
        stored=stored,  # type: ignore[arg-type]
        value_axes="" if plain_axes.get(layout.value_axes) == stored else layout.value_axes,
        output_axes="" if plain_axes.get(layout.output_axes) == stored else layout.output_axes,
        latent_first=0 if first.latent is None else first.latent.first,
        gains=tuple(dict.fromkeys(gain for one in members for gain in one.layer.gains)),
        inner_norm_per_head=any(call.shape[-1] == layout.d_head for call in norms["inner_norm"]) and layout.n_heads > 1,
        value_gain=mixing.value_factor * (1.0 if first.latent is None else first.latent.factor),
        n_heads=heads[0] if len(set(heads)) == 1 else heads,
        n_kv="shape" if is_plain else layout.n_kv,
        d_head="config" if is_plain else layout.d_head,
        token_axis=0 if len(stream) == 3 and stream[0] == mixing.keys != stream[1] else 1,
        is_hybrid=_is_hybrid(trace, template, [one.index for one in members]),
        branch_gain=first.branch.factor,
        norms_without_weight=without,
        passes=_passes(members),
        proof=math.inf,  # not proved yet
    )


def _stream_shape(trace: Trace, one: DistinctLayer) -> tuple[int, ...]:
    """Shape of the stream as modules pass it on; as its own block receives it, where that shows it."""
    stream = one.layer.branch.stream
    received = [call for call in trace.calls if call.received is not None and call.received.root is stream]
    for call in sorted(received, key=lambda call: call.path != one.path):
        if call.received is not None and len(call.received.shape) > 2:
            return call.received.shape
    return stream.shape


def _is_hybrid(trace: Trace, template: str, indices: Sequence[int]) -> bool:
    if "{i}" not in template:
        return False
    pattern = re.compile(_pattern(template) + r"\.")
    own = trace.parameters.by_name.keys() - trace.parameters.aliases
    numbers = {int(match[1]) for name in own if (match := pattern.match(name))}
    return set(indices) != set(range(max(numbers, default=0) + 1))


def _passes(members: Sequence[DistinctLayer]) -> tuple[tuple[int, ...], ...]:
    """When each block runs, where that is not simply one after the other."""
    every = sorted(order for one in members for order in one.order)
    passes = tuple(tuple(every.index(order) for order in one.order) for one in members)
    return () if all(found == (place,) for place, found in enumerate(passes)) else passes


def _paths(
    trace: Trace, template: str, members: Sequence[DistinctLayer], inner: Collection[str], without: Collection[str]
) -> Paths:
    value = _common(
        [(one, one.layer.value.weight, "" if one.layout.has_own_bias else one.layout.value_bias) for one in members]
    )
    is_plain = members[0].layout.fused is None
    roles = {}
    for role in NORM_ROLES:
        calls = [(one, one.layer.norms[role]) for one in members if role in one.layer.norms]
        if role in without:
            roles[role] = calls[0][0].below(calls[0][1].path)
        elif calls:
            roles[role] = _common(
                [
                    (
                        one,
                        f"{call.path}.{call.facts.weight}",
                        f"{call.path}.{call.facts.bias}" if call.facts.bias else "",
                    )
                    for one, call in calls
                ]
            )
    latents = [(one, one.layer.latent) for one in members if one.layer.latent is not None]
    return Paths(
        block=template,
        v=value if is_plain else "",
        qkv="" if is_plain else value,
        v_bias=next((one.below(one.layout.value_bias) for one in members if one.layout.has_own_bias), ""),
        o=_common([(one, one.name, one.layout.output_bias) for one in members]),
        latent=_common([(one, latent.product.weight, latent.bias) for one, latent in latents]),
        attn_gain=next((one.below(one.layer.branch.gain) for one in members if one.layer.branch.gain), ""),
        final_norm=_final_norm(trace, template, max(members, key=lambda one: one.order[-1]).layer, inner),
        **_taps(trace, members),
        **roles,
    )


def _common(found: Sequence[tuple[DistinctLayer, str, str]]) -> str:
    """The path that names the weight and the bias of a role below the block; alternates where blocks differ."""
    if found and not any(name.startswith(f"{one.path}.") for one, name, _ in found):
        indices = [one.index for one, _, _ in found]
        weight = numbered(indices, [name for _, name, _ in found])
        bias = numbered(indices, [name for _, _, name in found])
        if weight is not None and bias is not None:
            return with_bias(weight, bias.removeprefix("^") and bias)
    paths = Counter(spelled(one.path, one.index, weight, bias) for one, weight, bias in found)
    return "|".join(path for path, _ in paths.most_common())


def _final_norm(trace: Trace, template: str, last: FoundLayer, inner: Collection[str]) -> str:
    """The norm that reads the stream behind the last block."""
    if last.end is None or last.residual == "post":
        return ""
    in_block = re.compile(_pattern(template).replace(",", "|") + r"(\.|$)")
    for call in trace.norms:
        is_outside = call.path not in inner and not in_block.match(call.path)
        is_whole = math.prod(call.shape) == math.prod(last.end.shape) and last.width in call.shape
        if call.read is last.end.root and is_whole and is_outside and call.facts.weight:
            weight, bias = call.facts.weight, call.facts.bias
            is_usual = weight == "weight" and bias in ("", "bias")
            return call.path if is_usual else f"{call.path}.[{weight},{bias}]"
    return ""


def _taps(trace: Trace, members: Sequence[DistinctLayer]) -> dict[str, str]:
    """Modules that receive the stream, where the block itself or its norms do not show it."""
    layer, block = members[0].layer, members[0].path
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
    end = members[-1].layer.end
    found = {
        "before": _reader(trace, members, [one.layer.branch.stream for one in members]),
        "after": _reader(trace, members, [one.layer.branch.total for one in members]),
        "end": None if end is None else next(iter(readers_of(trace, end)), None),
    }
    return {name: path for name, path in found.items() if path is not None}


def _reader(trace: Trace, members: Sequence[DistinctLayer], nodes: Sequence[Node]) -> str | None:
    """The module of every block that receives one of these tensors, as one path."""
    readers = [[path for path in readers_of(trace, node) if path] for node in nodes]
    for first in readers[0]:
        alike = [[path for path in paths if unnumbered(path) == unnumbered(first)] for paths in readers]
        if not all(alike):
            continue
        below = {one.below(paths[0]) for one, paths in zip(members, alike, strict=True)}
        if len(below) == 1 and not min(below).startswith("^"):
            return min(below)
        path = numbered([one.index for one in members], [paths[0] for paths in alike])
        if path is not None:
            return path
    return None
