"""Tensors as they are stored, read as the matrices and vectors that they stand for."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oversmooth.errors import AdapterMismatch, ConfigMismatch
from oversmooth.models.declaration import Arch, Fused, Rows

Read = Callable[[str], Tensor]


def value_rows(fused: Fused | Rows, n_heads: int, n_kv: int, d_head: int) -> Int[Tensor, " rows"]:
    """Rows of the values inside a fused query-key-value weight, in the order (value head, channel).

    >>> value_rows("stacked", n_heads=2, n_kv=1, d_head=2)
    tensor([6, 7])
    >>> value_rows("grouped", n_heads=2, n_kv=2, d_head=1)
    tensor([2, 5])
    """
    if isinstance(fused, Rows):
        heads = torch.arange(n_kv)[:, None] * fused.per_head
        channels = torch.arange(d_head)
        if fused.second_half is not None:
            half = d_head // 2
            return (
                fused.first + heads + channels % half * fused.per_channel + channels // half * fused.second_half
            ).flatten()
        return (fused.first + heads + channels * fused.per_channel).flatten()
    if fused == "stacked":
        return torch.arange((n_heads + n_kv) * d_head, (n_heads + 2 * n_kv) * d_head)
    per_group = n_heads // n_kv + 2
    group = torch.arange(n_kv)[:, None] * per_group * d_head
    return (group + (per_group - 1) * d_head + torch.arange(d_head)).flatten()


def rows_behind_keys(value: Float[Tensor, "rows read"], n_kv: int, d_head: int, name: str) -> Rows:
    """Value heads that stand behind the key of each head."""
    per_head, rest = divmod(len(value), n_kv)
    if rest or per_head < d_head:
        says = f"{n_kv} heads with values of size {d_head}"
        raise ConfigMismatch("the value heads", says, f"{len(value)} rows", name)
    return Rows(first=per_head - d_head, per_head=per_head)


def read_matrix(arch: Arch, name: str, read: Read, axes: str, features: str) -> Float[Tensor, "out in"]:
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


def read_value_bias(arch: Arch, name: str, rows: int, channels: int, read: Read) -> Float[Tensor, " rows"]:
    """The bias of the values: one entry per row of their weight, or per value channel where it is a tensor of its own."""
    if arch.proof is None and not arch.paths.v_bias:
        return read_vector(name, rows, read)
    bias = read(name).flatten()
    if len(bias) not in (rows, channels):
        raise ConfigMismatch("the value bias", f"{rows} or {channels} numbers", len(bias), name)
    return bias


def read_vector(name: str, length: int, read: Read) -> Float[Tensor, " length"]:
    vector = read(name)
    if tuple(vector.shape) != (length,):
        raise ConfigMismatch("the width", f"{length} numbers, as the matrix beside it", tuple(vector.shape), name)
    return vector


def read_gain(name: str, length: int, read: Read) -> Float[Tensor, " length"]:
    """A gain for every channel; convolutional models keep theirs as (d_model, 1, 1)."""

    def flat(name: str) -> Tensor:
        gain = read(name)
        return gain.flatten() if gain.ndim == 3 and gain.shape[1:] == (1, 1) else gain

    return read_vector(name, length, flat)
