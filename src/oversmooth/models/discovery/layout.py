"""How a layer's value and output weights are stored, read off the codes: rows, heads, axes and biases."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from oversmooth.models.declaration import Fused, Rows
from oversmooth.models.discovery.blocks import FoundLayer
from oversmooth.models.discovery.obstacles import Obstacle
from oversmooth.models.discovery.trace import Trace
from oversmooth.models.discovery.weights import SHIFT, Parameter
from oversmooth.models.stored import value_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Everything that `assemble` has to know about the storage of one layer."""

    d_model: int
    n_heads: int
    n_kv: int
    d_head: int
    fused: Fused | Rows | None
    """`None` where the values have a weight of their own."""
    value_axes: str
    """`out in` and `in out` are plain matrices."""
    output_axes: str
    value_bias: str
    has_own_bias: bool
    """Whether the bias has one entry per value channel, whatever the rows of the weight."""
    output_bias: str


class Irregular(Exception):
    """Codes that no declaration can say."""


def layout_of(trace: Trace, layer: FoundLayer) -> Layout | Obstacle:
    """The storage of a layer, or why it cannot be said."""
    read, made = layer.value.columns.shape[-1], len(layer.output.rows)
    if layer.latent is None and read != made:
        if (beside := _beside_the_stream(trace, layer)) is not None:
            return beside
        words = f"{layer.output.weight} leads from one stage of width {read} to the next of width {made}"
        return Obstacle(kind="stage", where=layer.output.weight.rpartition(".")[0], reason=words)
    try:
        return _layout(trace, layer)
    except Irregular as error:
        words = f"{layer.output.weight}: {error}"
        return Obstacle(kind="layout", where=layer.output.weight.rpartition(".")[0], reason=words)


def _beside_the_stream(trace: Trace, layer: FoundLayer) -> Obstacle | None:
    """Something else that the values read together with the stream."""
    first = layer.value.read.root
    for read in (first, *(norm.read.root for norm in trace.norms if norm.made is first)):
        if read.op == "cat":
            where = read.module or "the model"
            words = f"{where} puts other features beside the residual stream in front of {layer.value.weight}"
            return Obstacle(kind="concatenation", where=where, reason=words)
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
    alternating = torch.equal(channels, torch.arange(inner) // n_heads) and not torch.equal(
        channels, torch.arange(inner) % d_head
    )
    if alternating:
        rows, channels = (part.reshape(d_head, n_heads).T.flatten() for part in (rows, channels))
        output_axes = f"{output_axes.split()[0]} channel head"
    if not torch.equal(channels, torch.arange(inner) % d_head):
        raise Irregular("the channels of the heads reach the output projection in no regular order")
    norm = layer.norms.get("inner_norm")
    if norm is not None and norm.shape[-1] not in (inner, d_head):
        raise Irregular(f"the norm {norm.path} takes neither single heads nor all of them")
    heads = rows.reshape(n_heads, d_head)
    n_kv, of_heads = _value_heads(heads)
    all_rows = _out_size(value_parameter, value_axes)
    fused = fused_form(of_heads, n_heads, all_rows)
    bias, has_own = _bias(trace, layer, of_heads, value_axes, value_parameter, all_rows)
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
        output_bias=_output_bias(trace, layer),
    )


def _value_rows(parameter: Parameter, in_step: int, positions: Int[Tensor, " in"]) -> tuple[str, Int[Tensor, " in"]]:
    """Names of the parameter's axes, and for each value channel its row among all rows."""
    shape = parameter.shape
    if len(shape) > 2 and set(shape[2:]) == {1}:
        shape = shape[:2]
    axis = _axis_with(parameter, in_step, len(shape))
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


def _axis_with(parameter: Parameter, step: int, axes: int) -> int:
    for axis in range(axes):
        if parameter.strides[axis] == step and parameter.shape[axis] > 1:
            return axis
    raise Irregular(f"{parameter.name} is used along none of its axes")


def _out_size(parameter: Parameter, axes: str) -> int:
    sizes = [size for size, name in zip(parameter.shape, axes.split(), strict=False) if name != "in"]
    return int(torch.tensor(sizes).prod())


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


def fused_form(rows: Int[Tensor, "kv channel"], n_heads: int, all_rows: int) -> Fused | Rows | None:
    n_kv, d_head = rows.shape
    if rows.numel() == all_rows and torch.equal(rows.flatten(), torch.arange(all_rows)):
        return None
    if all_rows == (n_heads + 2 * n_kv) * d_head:
        for name in ("stacked", "grouped"):
            if torch.equal(value_rows(name, n_heads, n_kv, d_head), rows.flatten()):
                return name
    per_channel = int(rows[0, 1] - rows[0, 0]) if d_head > 1 else 1
    found = Rows(
        first=int(rows[0, 0]), per_head=int(rows[1, 0] - rows[0, 0]) if n_kv > 1 else 0, per_channel=per_channel
    )
    if d_head % 2 == 0 and not torch.equal(value_rows(found, n_heads, n_kv, d_head), rows.flatten()):
        found = replace(found, second_half=int(rows[0, d_head // 2] - rows[0, 0]))
    if not torch.equal(value_rows(found, n_heads, n_kv, d_head), rows.flatten()):
        raise Irregular("the rows of the values follow no regular order in their weight")
    return found


def _bias(
    trace: Trace, layer: FoundLayer, rows: Tensor, axes: str, parameter: Parameter, all_rows: int
) -> tuple[str, bool]:
    """Name of the value bias, and whether it has one entry per value channel instead of one per row."""
    found: dict[int, float] = {}
    for positions, bias in layer.value.biases:
        found.update(zip(positions.reshape(-1).tolist(), bias.reshape(-1).tolist(), strict=True))
    if not found:
        return "", False
    by_row = {
        int(_value_rows(parameter, layer.value.in_step, torch.tensor([int(position)]))[1]): code
        for position, code in found.items()
    }
    codes = [by_row.get(int(row), -1.0) for row in rows.flatten()]
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


def _output_bias(trace: Trace, layer: FoundLayer) -> str:
    for _, codes in layer.output.biases:
        source = trace.sources[int(codes.reshape(-1)[0] // SHIFT)]
        if isinstance(source, Parameter):
            return source.name
    return ""
