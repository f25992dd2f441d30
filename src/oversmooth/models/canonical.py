"""The canonical form of an attention layer's value path, whatever the storage:

w_v (n_kv, d_head, d_model)     w_o (d_model, n_heads, d_head)     acting from the left on column vectors
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oversmooth.errors import AdapterMismatch, ConfigMismatch, HeadsUnknown
from oversmooth.models.declaration import Arch, Fused, Residual, Rows
from oversmooth.models.resolve import BlockNames, TensorNames
from oversmooth.models.sizes import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A normalization layer: subtract the feature mean (`layer` only), divide by the scale, multiply by `weight`."""

    kind: Literal["layer", "rms"]
    weight: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"] | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """The value path of one attention layer in canonical form, with the norms around it."""

    w_v: Float[Tensor, "kv d_head d_model"]
    w_o: Float[Tensor, "d_model head d_head"]
    b_v: Float[Tensor, "kv d_head"] | None = None
    b_o: Float[Tensor, " d_model"] | None = None
    residual: Residual = "pre"
    norms: Mapping[str, Norm] = field(default_factory=dict)
    gain: Float[Tensor, " d_model"] | None = None
    """Multiplies the attention branch, per channel."""
    heads_known: bool = True
    """False where no config gave the number of heads: the layer is one head then, exact for the layer as a whole."""
    value_rows: Int[Tensor, " rows"] | None = None
    """Rows of the values inside the fused weight, for writing back; `None` where values have a weight of their own."""

    @property
    def d_model(self) -> int:
        return self.w_o.shape[0]

    @property
    def n_heads(self) -> int:
        return self.w_o.shape[1]

    @property
    def n_kv(self) -> int:
        return self.w_v.shape[0]

    @property
    def d_head(self) -> int:
        return self.w_v.shape[1]

    @cached_property
    def w_o_shared(self) -> Float[Tensor, "d_model kv d_head"]:
        """Output weights summed over the query heads that read the same value head.

        The sum is taken one precision above the stored one: in half precision it would lose the last digits of all.
        """
        if self.n_heads == self.n_kv:
            return self.w_o
        return summed_over_groups(self.w_o, self.n_kv, torch.float32 if self.w_o.dtype.itemsize < 4 else torch.float64)


def summed_over_groups(
    w_o: Float[Tensor, "d_model head d_head"], n_kv: int, dtype: torch.dtype | None = None
) -> Float[Tensor, "d_model kv d_head"]:
    """Output weights summed over the query heads that read the same value head, in `dtype` (their own without one).

    Member by member, so that no copy of all heads in a wider type is ever in memory.
    """
    members = w_o.unflatten(1, (n_kv, w_o.shape[1] // n_kv)).unbind(2)
    if len(members) == 1:
        return members[0] if dtype is None else members[0].to(dtype)
    total = members[0].to(dtype or w_o.dtype, copy=True)
    for member in members[1:]:
        total += member
    return total


def value_rows(fused: Fused | Rows, n_heads: int, n_kv: int, d_head: int) -> Int[Tensor, " rows"]:
    """Rows of the values inside a fused query-key-value weight, in the order (value head, channel).

    >>> value_rows("stacked", n_heads=2, n_kv=1, d_head=2)
    tensor([6, 7])
    >>> value_rows("grouped", n_heads=2, n_kv=2, d_head=1)
    tensor([2, 5])
    """
    if isinstance(fused, Rows):
        heads = torch.arange(n_kv)[:, None] * fused.per_head
        return (fused.first + heads + torch.arange(d_head) * fused.per_channel).flatten()
    if fused == "stacked":
        return torch.arange((n_heads + n_kv) * d_head, (n_heads + 2 * n_kv) * d_head)
    per_group = n_heads // n_kv + 2
    group = torch.arange(n_kv)[:, None] * per_group * d_head
    return (group + (per_group - 1) * d_head + torch.arange(d_head)).flatten()


def assemble(
    arch: Arch, sizes: Sizes, block: BlockNames, read: Callable[[str], Tensor], branch_gain: float = 1.0
) -> AttentionWeights:
    """Reads one block's tensors and brings them into canonical form, in the dtype in which they are stored."""
    value = _matrix(arch, block.value.weight, read, arch.value_axes, "in")
    output = _matrix(arch, block.output.weight, read, arch.output_axes, "out")
    d_model, inner = output.shape
    if sizes.d_model not in (None, d_model):
        raise ConfigMismatch("the width", sizes.d_model, d_model, block.output.weight)
    n_heads, n_kv, d_head = _head_sizes(arch, sizes, block, value, inner)
    rows = None
    b_v = _value_bias(arch, block.value.bias, value.shape[0], n_kv * d_head, read) if block.value.bias else None
    if block.is_fused:
        expected = (n_heads + 2 * n_kv) * d_head
        if value.shape[0] != expected and not isinstance(arch.fused, Rows):
            says = f"{n_heads} heads and {n_kv} value heads of size {d_head}, so {expected} rows"
            raise ConfigMismatch("the heads", says, f"{value.shape[0]} rows", block.value.weight)
        rows = value_rows(arch.fused, n_heads, n_kv, d_head)
        b_v = b_v[rows] if b_v is not None and len(b_v) == len(value) else b_v
        value = value[rows]
    if tuple(value.shape) != (n_kv * d_head, d_model):
        says = f"{n_kv} value heads of size {d_head} at width {d_model}"
        raise ConfigMismatch("the value heads", says, f"shape {tuple(value.shape)}", block.value.weight)
    gain = _vector(block.gain, d_model, read) if block.gain else None
    if branch_gain != 1.0:
        gain = branch_gain * (gain if gain is not None else torch.ones(d_model))
    w_o = output.reshape(d_model, n_heads, d_head)
    if arch.output_axes.endswith("channel head"):
        w_o = output.reshape(d_model, d_head, n_heads).transpose(1, 2)
    return AttentionWeights(
        w_v=value.reshape(n_kv, d_head, d_model),
        w_o=w_o,
        b_v=b_v.reshape(n_kv, d_head) if b_v is not None else None,
        b_o=_vector(block.output.bias, d_model, read) if block.output.bias else None,
        residual=arch.residual,
        norms={role: _norm(arch, names, d_model, read) for role, names in block.norms.items()},
        gain=gain,
        heads_known=sizes.n_heads is not None or arch.n_heads != "config",
        value_rows=rows,
    )


def _matrix(arch: Arch, name: str, read: Callable[[str], Tensor], axes: str, features: str) -> Float[Tensor, "out in"]:
    """A weight as a matrix; `features` names the axis of `axes` on the features' side, all others are value channels."""
    weight, names = read(name), axes.split()
    if len(names) == weight.ndim and features in names:
        moved = weight.movedim(names.index(features), -1 if features == "in" else 0)
        return moved.flatten(0, -2) if features == "in" else moved.flatten(1)
    if arch.proof is not None and weight.ndim > 2 and set(weight.shape[2:]) == {1}:
        weight = weight.flatten(1)  # a convolution with a window of one
    if weight.ndim != 2 or not weight.numel():
        raise AdapterMismatch(arch.name, f"a matrix of numbers in {name}", f"shape {tuple(weight.shape)}")
    return weight.T if arch.stored == "in_out" else weight


def _value_bias(
    arch: Arch, name: str, rows: int, channels: int, read: Callable[[str], Tensor]
) -> Float[Tensor, " rows"]:
    """The bias of the values: one entry per row of their weight, or per value channel where it is a tensor of its own."""
    if arch.proof is None and not arch.paths.v_bias:
        return _vector(name, rows, read)
    bias = read(name).flatten()
    if len(bias) not in (rows, channels):
        raise ConfigMismatch("the value bias", f"{rows} or {channels} numbers", len(bias), name)
    return bias


def _vector(name: str, length: int, read: Callable[[str], Tensor]) -> Float[Tensor, " length"]:
    vector = read(name)
    if vector.ndim > 1 and max(vector.shape) == vector.numel():
        vector = vector.flatten()  # (d_model, 1, 1), as convolutional models keep their gains
    if tuple(vector.shape) != (length,):
        raise ConfigMismatch("the width", f"{length} numbers, as the matrix beside it", tuple(vector.shape), name)
    return vector


def _head_sizes(arch: Arch, sizes: Sizes, block: BlockNames, value: Tensor, inner: int) -> tuple[int, int, int]:
    """`(n_heads, n_kv, d_head)`, checked against the output projection's `inner` columns."""
    if isinstance(arch.n_heads, tuple):
        sizes = replace(sizes, n_heads=arch.n_heads[block.position])
    if arch.n_kv == "shape" and sizes.n_heads is not None:
        sizes = replace(sizes, n_kv=max(value.shape[0] // (sizes.d_head or inner // sizes.n_heads), 1))
    if sizes.n_heads is None:
        value_rows_are_heads = not block.is_fused and value.shape[0] == inner
        stacked_thirds = block.is_fused and arch.fused == "stacked" and value.shape[0] == 3 * inner
        if value_rows_are_heads or stacked_thirds:
            return 1, 1, inner  # one wide head: H of the layer is the same however its columns are cut into heads
        raise HeadsUnknown(block.value.weight, "its value heads are shared or fused in an order that needs that number")
    n_heads = sizes.n_heads
    d_head = sizes.d_head or inner // n_heads
    if n_heads * d_head != inner:
        says = f"{n_heads} heads" + (f" of size {sizes.d_head}" if sizes.d_head else "")
        raise ConfigMismatch("the heads", says, f"{inner} columns", block.output.weight)
    n_kv = sizes.n_kv or n_heads
    if n_heads % n_kv:
        raise ConfigMismatch("the value heads", f"{n_kv} for {n_heads} heads", "a divisor", "grouped attention")
    return n_heads, n_kv, d_head


def _norm(arch: Arch, names: TensorNames, d_model: int, read: Callable[[str], Tensor]) -> Norm:
    if not names.weight:
        return Norm(kind="layer" if arch.norm == "layer" else "rms", weight=torch.ones(d_model))
    weight = _vector(names.weight, d_model, read)
    if arch.norm == "rms+1":
        weight = weight.float() + 1.0  # stored as an offset from one; float32 because bfloat16 cannot hold 1 + small
    bias = _vector(names.bias, d_model, read) if names.bias else None
    return Norm(kind="layer" if arch.norm == "layer" else "rms", weight=weight, bias=bias)
