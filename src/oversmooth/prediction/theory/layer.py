"""One attention sub-block with everything that acts on its branch: norms with their own scales, biases, gains.

`AttentionLayer` belongs to the weights and keeps what every sequence needs again; `exact` is the branch as the model
computes it from the attention maps, which the ladder of explanation ends in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.models.canonical import AttentionWeights, Norm
from oversmooth.models.hooks.gains import TokenGains
from oversmooth.models.value_chain import ValueChain
from oversmooth.prediction.theory.operator import LayerOperator, ValuePath, value_path
from oversmooth.spectra import folding

INNER_NORMS = {"latent_norm", "inner_norm", "attn_branch_norm"}
"""Norms that act on the branch wherever the residual form puts `attn_norm`."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ExactBranch:
    """The attention branch of one sequence, and the scales and gains of its tokens."""

    output: Float[Tensor, "token d_model"]
    """What is added to the residual stream."""
    mixed: Float[Tensor, "token inner"]
    """The values of every head mixed by its attention."""
    scales: Float[Tensor, " token"] | None
    """What divides each token that is read: by the norm before attention and by one on a latent; `None` without both."""
    latent_scales: Float[Tensor, " token"] | None
    """The part of it that a norm on a latent divides by."""
    gains: Float[Tensor, "token head channel"] | None
    """What multiplies each token that is written: gates, sinks, and one over the scale of a norm on the mixed heads."""
    branch_scales: Float[Tensor, " token"] | None
    """Each token's scale in a norm on the branch."""

    @property
    def common_scale(self) -> float:
        """One scale for all tokens: the mean, of all norms that divide together."""
        product = 1.0
        for scales in (self.scales, self.branch_scales):
            product *= 1.0 if scales is None else scales.mean().item()
        return product

    @property
    def mean_gains(self) -> Float[Tensor, "head channel"] | None:
        """One gain for all tokens."""
        return None if self.gains is None else self.gains.mean(0)


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionLayer:
    """The attention sub-block of one layer, ready for any sequence."""

    weights: AttentionWeights
    epsilon: Mapping[str, float] = field(default_factory=dict)
    """What each norm adds under its square root, by role."""
    dtype: torch.dtype = torch.float32
    has_biases: bool = True
    skip: float = 1.0

    @cached_property
    def plain(self) -> ValuePath:
        return value_path(self.weights, "plain", self.dtype)

    @cached_property
    def branch(self) -> ValuePath:
        """With every norm and gain that acts on the branch."""
        has_any = self.weights.norms.keys() & INNER_NORMS or self.norm_before or self.weights.gain is not None
        return value_path(self.weights, "branch", self.dtype) if has_any else self.plain

    @cached_property
    def folded(self) -> ValuePath | None:
        """With the norm after the sum too; `None` where the layer has neither norms nor gains."""
        if self.weights.residual == "post" and "attn_norm" in self.weights.norms:
            return value_path(self.weights, "folded", self.dtype)
        return self.branch if self.branch is not self.plain else None

    @property
    def norm_before(self) -> Norm | None:
        return folding.norm_before(self.weights)

    @property
    def norm_on_branch(self) -> Norm | None:
        return folding.norm_on_branch(self.weights)

    @cached_property
    def chain(self) -> ValueChain:
        """The value path as the model runs it."""
        return ValueChain(weights=self.weights, epsilon=self.epsilon, dtype=self.dtype, has_biases=self.has_biases)

    def operator(self, attention: Float[Tensor, "head token token"], exact: ExactBranch) -> LayerOperator:
        """What acts across the branch at common scales and gains: the averaged operator of the ladder."""
        path = self.branch.with_gains(exact.mean_gains)
        return LayerOperator(path=path, attention=attention, scale=exact.common_scale, skip=self.skip)

    def exact(
        self,
        attention: Float[Tensor, "head token token"],
        x: Float[Tensor, "token d_model"],
        gains: TokenGains | None = None,
    ) -> ExactBranch:
        """The branch with each token's own scales and gains, and all biases: what the model adds to the stream."""
        scales = None
        if self.norm_before is not None:
            x, scales = self.chain.normed("attn_norm", self.norm_before, x)
        z, latent_scales = self.chain.values(x)
        if latent_scales is not None:
            scales = latent_scales if scales is None else scales * latent_scales
        mixed = LayerOperator(path=self.plain, attention=attention).mixed(z)
        written, all_gains = self.chain.written(mixed, gains)
        output, branch_scales = self._added(written)
        return ExactBranch(
            output=output,
            mixed=mixed,
            scales=scales,
            latent_scales=latent_scales,
            gains=all_gains,
            branch_scales=branch_scales,
        )

    def at_mean_gains(self, exact: ExactBranch, gains: TokenGains | None) -> Float[Tensor, "token d_model"]:
        """The branch with each token's own scale as it is read, and the gains of what is written averaged."""
        heads = self.chain.by_head(exact.mixed)
        heads = heads if exact.mean_gains is None else heads * exact.mean_gains
        return self._added(self.chain.written_at(heads, gains))[0]

    def _added(self, written: Float[Tensor, "token inner"]) -> tuple[Float[Tensor, "token d_model"], Tensor | None]:
        """What is added to the stream, and each token's scale in a norm on the branch."""
        scales, y = None, self.chain.projected(written)
        if self.norm_on_branch is not None:
            y, scales = self.chain.normed("attn_branch_norm", self.norm_on_branch, y)
        return (y if self.weights.gain is None else y * self.weights.gain.to(y)), scales

    def bias(
        self, row_sums: Float[Tensor, " head"], exact: ExactBranch, gains: TokenGains | None = None
    ) -> Float[Tensor, " d_model"]:
        """`c`: what biases add to every token alike, `(beta W_V + b_V) W_O + b_O`, then the branch's norm and gain."""
        weights, chain = self.weights, self.chain
        if not self.has_biases:
            return torch.zeros(weights.d_model, dtype=self.dtype, device=weights.w_o.device)
        shared = chain.repeated(self._value_bias(exact)) * row_sums[:, None]
        shared = shared if exact.mean_gains is None else shared * exact.mean_gains
        total = chain.projected(chain.written_at(shared, gains))
        if (norm := self.norm_on_branch) is not None:
            total = total - total.mean() if norm.kind == "layer" else total
            scale = 1.0 if exact.branch_scales is None else exact.branch_scales.mean().item()
            total = chain.with_bias(total / scale * norm.weight.to(total), norm.bias)
        return total if weights.gain is None else total * weights.gain.to(total)

    def _value_bias(self, exact: ExactBranch) -> Float[Tensor, " channel"]:
        """What the biases before attention add to every value channel, at the mean scale of a norm on a latent."""
        weights, chain, norm = self.weights, self.chain, self.norm_before
        x = torch.zeros(weights.d_read, dtype=self.dtype, device=weights.w_o.device)
        x = x if norm is None else chain.with_bias(x, norm.bias)
        if weights.latent is not None:
            x = chain.with_bias(weights.latent.w.to(x) @ x, weights.latent.b)
            if (inner := weights.norms.get("latent_norm")) is not None and exact.latent_scales is not None:
                x = x - x.mean() if inner.kind == "layer" else x
                x = chain.with_bias(x / exact.latent_scales.mean() * inner.weight.to(x), inner.bias)
        return chain.with_bias(chain.value_rows @ x, None if weights.b_v is None else weights.b_v.flatten())
