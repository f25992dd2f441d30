"""`AttentionWeights`: the value path of a layer in one canonical form, whatever the storage.

w_v (n_kv, d_head, d_model)     w_o (d_model, n_heads, d_head)     acting from the left on column vectors

Values made from a latent have two matrices, `w_v (n_kv, d_head, latent)` behind `latent.w (latent, d_model)`.

    values     x -> (latent -> norm) -> W_V x + b_V
    written    mixed heads -> gains -> (norm on the mixed heads -> gains)
    projected  W_O z + b_O

The equal-token identity and the exact prediction both use this, so a wrong norm, gain or head order fails both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from oversmooth.errors import AdapterMismatch, ConfigMismatch, HeadsUnknown
from oversmooth.models.declaration import (
    Arch,
    Fused,
    FusedRows,
    Gain,
    NormKind,
    Residual,
    StackSizes,
    norm_centres,
    norm_offset,
)
from oversmooth.models.identify import BlockNames, TensorNames

# --- tensors as they are stored, read as the matrices and vectors that they stand for ---

Read = Callable[[str], Tensor]


def value_rows(fused: Fused | FusedRows, n_heads: int, n_kv: int, d_head: int) -> Int[Tensor, " rows"]:
    """Rows of the values inside a fused query-key-value weight, in the order (value head, channel).

    >>> value_rows("stacked", n_heads=2, n_kv=1, d_head=2)
    tensor([6, 7])
    >>> value_rows("grouped", n_heads=2, n_kv=2, d_head=1)
    tensor([2, 5])
    """
    if isinstance(fused, FusedRows):
        heads = torch.arange(n_kv)[:, None] * fused.per_head
        half = d_head if fused.second_half is None else d_head // 2
        channels = torch.arange(d_head) % half * fused.per_channel
        channels += torch.arange(d_head) // half * (fused.second_half or 0)
        return (fused.first + heads + channels).flatten()
    if fused == "stacked":
        return torch.arange((n_heads + n_kv) * d_head, (n_heads + 2 * n_kv) * d_head)
    per_group = n_heads // n_kv + 2
    group = torch.arange(n_kv)[:, None] * per_group * d_head
    return (group + (per_group - 1) * d_head + torch.arange(d_head)).flatten()


def rows_behind_keys(value: Float[Tensor, "rows read"], n_kv: int, d_head: int, name: str) -> FusedRows:
    """Value heads that stand behind the key of each head."""
    per_head, rest = divmod(len(value), n_kv)
    if rest or per_head < d_head:
        says = f"{n_kv} heads with values of size {d_head}"
        raise ConfigMismatch("the value heads", says, f"{len(value)} rows", name)
    return FusedRows(first=per_head - d_head, per_head=per_head)


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
    """The bias of the values: one entry per row of their weight, or per value channel if it is a separate tensor."""
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
    gain = read(name)
    return read_vector(name, length, lambda _: gain.flatten() if gain.shape[1:] == (1, 1) else gain)


# --- the canonical form of an attention layer's value path ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A normalization layer: subtract the feature mean (`layer` only), divide by the scale, multiply by `weight`."""

    kind: Literal["layer", "rms"]
    weight: Float[Tensor, " width"]
    bias: Float[Tensor, " width"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """A projection to fewer channels between the stream and the values. A norm on it is `latent_norm`."""

    w: Float[Tensor, "latent d_model"]
    b: Float[Tensor, " latent"] | None = None


class ValueSizes:
    """Sizes that the two weights of a value path state."""

    w_v: Float[Tensor, "kv d_head read"]
    w_o: Float[Tensor, "d_model head d_head"]

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

    @property
    def channels(self) -> int:
        """Value channels K = n_kv d_head: the rank of H is at most this."""
        return self.n_kv * self.d_head


@dataclass(frozen=True, kw_only=True)
class AttentionWeights(ValueSizes):
    """The value path of one attention layer in canonical form, with the norms around it."""

    w_v: Float[Tensor, "kv d_head read"]
    w_o: Float[Tensor, "d_model head d_head"]
    latent: Latent | None = None
    """What the values read, if not the stream itself."""
    gains: tuple[Gain, ...] = ()
    """What else multiplies the token that is written; only a running model shows by how much."""
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
    def d_read(self) -> int:
        """Width of what the value path reads."""
        return (self.w_v if self.latent is None else self.latent.w).shape[-1]

    @property
    def core_width(self) -> int:
        """Channels of the narrowest place on the value path except the width of the model: H has no larger rank."""
        return self.channels if self.latent is None else min(self.channels, self.latent.w.shape[0])

    @property
    def beyond_plain(self) -> str | None:
        """Why what is proved for `A X W_V W_O` with rows that sum to one does not cover this layer; `None` if it does."""
        if self.latent is not None:
            return f"values are made from a latent of {self.latent.w.shape[0]} channels"
        if "inner_norm" in self.norms:
            return "a norm between attention and the output projection divides what every token writes"
        words = {
            "gate": "a gate multiplies what every token writes",
            "sink": "a sink takes part of every row of attention",
            "differential": "one attention is subtracted from another",
        }
        return words[self.gains[0]] if self.gains else None

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

    Member by member, so all heads are never in memory in a wider type.
    """
    members = w_o.unflatten(1, (n_kv, w_o.shape[1] // n_kv)).unbind(2)
    if len(members) == 1:
        return members[0] if dtype is None else members[0].to(dtype)
    total = members[0].to(dtype or w_o.dtype, copy=True)
    for member in members[1:]:
        total += member
    return total


def assemble(
    arch: Arch, sizes: StackSizes, block: BlockNames, read: Read, branch_gain: float = 1.0
) -> AttentionWeights:
    """Reads one block's tensors and brings them into canonical form, in the dtype in which they are stored."""
    output = read_matrix(arch, block.output.weight, read, arch.output_axes, "out")
    d_model, inner = output.shape
    if sizes.d_model not in (None, d_model):
        raise ConfigMismatch("the width", sizes.d_model, d_model, block.output.weight)
    value = read_matrix(arch, block.value.weight, read, arch.value_axes, "in")
    n_heads, n_kv, d_head = heads = _head_sizes(arch, sizes, block, value, inner)
    value, b_v, rows = _values(arch, heads, block, value, read)
    latent = None if block.latent is None else _latent(arch, block.latent, value.shape[1], read)
    d_read = d_model if latent is None else value.shape[1]
    if tuple(value.shape) != (n_kv * d_head, d_read):
        says = f"{n_kv} value heads of size {d_head} at width {d_read}"
        raise ConfigMismatch("the value heads", says, f"shape {tuple(value.shape)}", block.value.weight)
    gain = read_gain(block.gain, d_model, read) if block.gain else None
    if branch_gain != 1.0:
        gain = branch_gain * (gain if gain is not None else torch.ones(d_model, dtype=torch.float64))
    if arch.output_axes.endswith("channel head"):
        w_o = output.reshape(d_model, d_head, n_heads).transpose(1, 2)
    else:
        w_o = output.reshape(d_model, n_heads, d_head)
    widths = {"latent_norm": d_read, "inner_norm": d_head if arch.inner_norm_per_head else inner}
    return AttentionWeights(
        w_v=value.reshape(n_kv, d_head, d_read),
        w_o=w_o,
        latent=latent,
        gains=arch.gains,
        b_v=b_v.reshape(n_kv, d_head) if b_v is not None else None,
        b_o=read_vector(block.output.bias, d_model, read) if block.output.bias else None,
        residual=arch.residual,
        norms={role: _norm(arch, names, widths.get(role, d_model), read) for role, names in block.norms.items()},
        gain=gain,
        heads_known=sizes.n_heads is not None or arch.n_heads != "config",
        value_rows=rows,
    )


def _values(
    arch: Arch, heads: tuple[int, int, int], block: BlockNames, value: Float[Tensor, "rows read"], read: Read
) -> tuple[Float[Tensor, "channel read"], Float[Tensor, " channel"] | None, Int[Tensor, " channel"] | None]:
    """The rows of the values in their weight, their bias, and the indices of these rows in a fused weight."""
    n_heads, n_kv, d_head = heads
    rows, name = None, block.value.weight
    b_v = read_value_bias(arch, block.value.bias, value.shape[0], n_kv * d_head, read) if block.value.bias else None
    if block.is_fused:
        expected = (n_heads + 2 * n_kv) * d_head
        if value.shape[0] != expected and arch.fused in ("stacked", "grouped"):
            says = f"{n_heads} heads and {n_kv} value heads of size {d_head}, so {expected} rows"
            raise ConfigMismatch("the heads", says, f"{value.shape[0]} rows", name)
        form = rows_behind_keys(value, n_kv, d_head, name) if arch.fused == "key_value" else arch.fused
        rows = value_rows(form, n_heads, n_kv, d_head)
        b_v = b_v[rows] if b_v is not None and len(b_v) == len(value) else b_v
        value = value[rows]
    if arch.value_gain != 1.0:
        wide = torch.promote_types(value.dtype, torch.float32)  # a product in half precision would lose digits
        value, b_v = value.to(wide) * arch.value_gain, None if b_v is None else b_v.to(wide) * arch.value_gain
    return value, b_v, rows


def _latent(arch: Arch, names: TensorNames, width: int, read: Read) -> Latent:
    """The rows of a projection that make the latent; the others make keys."""
    weight = read_matrix(arch, names.weight, read, "", "in")
    rows = slice(arch.latent_first, arch.latent_first + width)
    if len(weight[rows]) != width:
        says = f"{width} rows from row {arch.latent_first}"
        raise ConfigMismatch("the latent", says, f"shape {tuple(weight.shape)}", names.weight)
    return Latent(w=weight[rows], b=read_vector(names.bias, len(weight), read)[rows] if names.bias else None)


def _head_sizes(arch: Arch, sizes: StackSizes, block: BlockNames, value: Tensor, inner: int) -> tuple[int, int, int]:
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


def _norm(arch: Arch, names: TensorNames, width: int, read: Read) -> Norm:
    kind: Literal["layer", "rms"] = "layer" if norm_centres(arch.norm) else "rms"
    if not names.weight:
        return Norm(kind=kind, weight=torch.ones(width))
    weight = read_vector(names.weight, width, read)
    if offset := norm_offset(arch.norm):
        wide = torch.promote_types(weight.dtype, torch.float32)  # bfloat16 cannot hold 1 + small
        weight = weight.to(wide) + offset  # stored as an offset from one
    bias = read_vector(names.bias, width, read) if names.bias else None
    return Norm(kind=kind, weight=weight, bias=bias)


# --- what a live normalization module divides each token by ---

EPSILONS = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps", "norm_eps")


def epsilon_of(norm: nn.Module) -> float:
    """What a norm adds under its square root, under the names that libraries use for it; perhaps in a module inside."""
    for part in norm.modules():
        for name in EPSILONS:
            value = getattr(part, name, None)
            if isinstance(value, float):
                return value
    return 0.0


def token_scales(x: Float[Tensor, "*token d_model"], kind: NormKind, epsilon: float) -> Float[Tensor, "*token"]:
    """The number by which a norm divides each token, in float32 or better."""
    x = x if x.dtype == torch.float64 else x.float()
    squares = x.var(-1, correction=0) if norm_centres(kind) else x.square().mean(-1)
    return (squares + epsilon).sqrt()


# --- gains of the token that is written ---


@dataclass(frozen=True, eq=False, slots=True)
class TokenGains:
    """Gates, what sinks leave of a row, and constant factors, for one sequence; `channel` is the head size or 1."""

    before: Float[Tensor, "token head channel"]
    """What multiplies the mixed heads themselves."""
    after: Float[Tensor, "token head channel"] | None = None
    """What multiplies them behind a norm on the mixed heads, if there is one."""

    def times(self, row_sums: Float[Tensor, "head token"]) -> "TokenGains":
        """With what the rows of attention sum to, which belongs to the token that is written too."""
        return TokenGains(self.before * row_sums.T[..., None].to(self.before), self.after)

    def of(self, keep: Tensor, dtype: torch.dtype) -> "TokenGains":
        """Those of the tokens that count."""
        after = None if self.after is None else self.after[keep].to(dtype)
        return TokenGains(self.before[keep].to(dtype), after)


# --- the value path as a model runs it, step by step: latent, norms with each token's own scale, gains ---


@dataclass(frozen=True, eq=False, kw_only=True)
class ValueChain:
    """The value path of one layer, for any tokens."""

    weights: AttentionWeights
    epsilon: Mapping[str, float] = field(default_factory=dict)
    """What each norm adds under its square root, by role."""
    dtype: torch.dtype = torch.float32
    has_biases: bool = True

    @cached_property
    def value_rows(self) -> Float[Tensor, "channel read"]:
        return self.weights.w_v.to(self.dtype).flatten(0, 1).contiguous()

    @cached_property
    def output_rows(self) -> Float[Tensor, "inner d_model"]:
        return self.weights.w_o.to(self.dtype).flatten(1).T.contiguous()

    @property
    def inner_norm(self) -> Norm | None:
        """The norm on the mixed heads."""
        return self.weights.norms.get("inner_norm")

    @property
    def is_normed_per_head(self) -> bool:
        return self.inner_norm is not None and len(self.inner_norm.weight) == self.weights.d_head

    def values(
        self, x: Float[Tensor, "*token d_model"]
    ) -> tuple[Float[Tensor, "*token channel"], Float[Tensor, "*token"] | None]:
        """The value channels of what the value path reads, and what a norm on its latent divided each token by."""
        weights, scales = self.weights, None
        if weights.latent is not None:
            x = self.with_bias(x @ weights.latent.w.to(x).T, weights.latent.b)
            if (norm := weights.norms.get("latent_norm")) is not None:
                x, scales = self.normed("latent_norm", norm, x)
        z = x @ self.value_rows.T
        return self.with_bias(z, None if weights.b_v is None else weights.b_v.flatten()), scales

    def written(
        self, mixed: Float[Tensor, "token inner"], gains: TokenGains | None
    ) -> tuple[Float[Tensor, "token inner"], Float[Tensor, "token head channel"] | None]:
        """Mixed heads with the gains of their tokens and the norm on them, and all that multiplied each token."""
        if gains is None and self.inner_norm is None:
            return mixed, None
        heads = self.by_head(mixed)
        total = heads.new_ones(len(mixed), 1, 1)
        if gains is not None:
            heads, total = heads * gains.before, gains.before
        if self.inner_norm is not None:
            per_head = self.is_normed_per_head
            normed, scales = self.normed("inner_norm", self.inner_norm, heads if per_head else heads.flatten(-2))
            heads = normed if per_head else self.by_head(normed)
            total = total / (scales[..., None] if per_head else scales[:, None, None])
        if gains is not None and gains.after is not None:
            heads, total = heads * gains.after, total * gains.after
        return heads.flatten(-2), total

    def written_at(
        self, heads: Float[Tensor, "*token head d_head"], gains: TokenGains | None
    ) -> Float[Tensor, "*token inner"]:
        """Heads to which mean gains were applied, through the norm on them without its scale, which is among the gains."""
        norm = self.inner_norm
        if norm is None:
            return heads.flatten(-2)
        flat = heads if self.is_normed_per_head else heads.flatten(-2)
        flat = (flat - flat.mean(-1, keepdim=True) if norm.kind == "layer" else flat) * norm.weight.to(flat)
        heads = flat if self.is_normed_per_head else self.by_head(flat)
        if norm.bias is not None and self.has_biases:
            bias = norm.bias.to(heads)
            bias = bias.expand(heads.shape[-2:]) if self.is_normed_per_head else bias.reshape(heads.shape[-2:])
            heads = heads + (bias if gains is None or gains.after is None else bias * gains.after.mean(0))
        return heads.flatten(-2)

    def projected(self, written: Float[Tensor, "*token inner"]) -> Float[Tensor, "*token d_model"]:
        return self.with_bias(written @ self.output_rows, self.weights.b_o)

    def by_head(self, inner: Float[Tensor, "*token inner"]) -> Float[Tensor, "*token head d_head"]:
        return inner.unflatten(-1, (self.weights.n_heads, self.weights.d_head))

    def repeated(self, values: Float[Tensor, "*token channel"]) -> Float[Tensor, "*token head d_head"]:
        """Value channels as each head reads them."""
        heads = values.unflatten(-1, (self.weights.n_kv, self.weights.d_head))
        return heads.repeat_interleave(self.weights.n_heads // self.weights.n_kv, -2)

    def with_bias(self, x: Float[Tensor, "*token width"], bias: Tensor | None) -> Float[Tensor, "*token width"]:
        return x + bias.to(x) if self.has_biases and bias is not None else x

    def normed(
        self, role: str, norm: Norm, x: Float[Tensor, "*token width"]
    ) -> tuple[Float[Tensor, "*token width"], Float[Tensor, "*token"]]:
        """What a norm returns, and the number by which it divided each token."""
        x = x - x.mean(-1, keepdim=True) if norm.kind == "layer" else x
        scale = (x.square().mean(-1) + self.epsilon.get(role, 0.0)).sqrt()
        return self.with_bias(x / scale[..., None] * norm.weight.to(x), norm.bias), scale
