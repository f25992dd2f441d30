"""The value path as a model runs it, step by step: latent, norms with each token's own scale, gains, biases.

    values     x -> (latent -> norm) -> W_V x + b_V
    written    mixed heads -> gains -> (norm on the mixed heads -> gains)
    projected  W_O z + b_O

The equal-token identity and the last rung of the ladder both end here, so that a wrong norm, gain or head order fails both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.models.canonical import AttentionWeights, Norm
from oversmooth.models.hooks.gains import TokenGains


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
            repeated = norm.bias.to(heads).expand(heads.shape[-2:]) if self.is_normed_per_head else norm.bias.to(heads)
            bias = repeated.reshape(heads.shape[-2:])
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
