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
from oversmooth.prediction.theory.operator import LayerOperator, ValuePath, value_path
from oversmooth.spectra import folding

NO_EPSILON: Mapping[str, float] = {}


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ExactBranch:
    """The attention branch of one sequence and the token scales that its norms divided by."""

    output: Float[Tensor, "token d_model"]
    """What is added to the residual stream."""
    scales: Float[Tensor, " token"] | None
    """Each token's scale in the norm before attention; `None` without such a norm."""
    branch_scales: Float[Tensor, " token"] | None
    """Each token's scale in a norm on the branch."""

    @property
    def common_scale(self) -> float:
        """One scale for all tokens: the mean, of both norms together."""
        product = 1.0
        for scales in (self.scales, self.branch_scales):
            product *= 1.0 if scales is None else scales.mean().item()
        return product


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionLayer:
    """The attention sub-block of one layer, ready for any sequence."""

    weights: AttentionWeights
    epsilon: Mapping[str, float] = field(default_factory=lambda: NO_EPSILON)
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
        has_any = self.norm_before or self.norm_on_branch or self.weights.gain is not None
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

    def operator(self, attention: Float[Tensor, "head token token"], scale: float) -> LayerOperator:
        """What acts across the branch at a common token scale: the operator of the ladder."""
        return LayerOperator(path=self.branch, attention=attention, scale=scale, skip=self.skip)

    def exact(self, attention: Float[Tensor, "head token token"], x: Float[Tensor, "token d_model"]) -> ExactBranch:
        """The branch with each token's own scales, all biases and gains: what the model adds to the stream."""
        weights, scales, branch_scales = self.weights, None, None
        if self.norm_before is not None:
            x, scales = self._normed("attn_norm", self.norm_before, x)
        z = x @ self.plain.value_rows.T
        if self.has_biases and weights.b_v is not None:
            z = z + weights.b_v.to(z).flatten()
        y = LayerOperator(path=self.plain, attention=attention).mixed(z) @ self.plain.output_rows
        if self.has_biases and weights.b_o is not None:
            y = y + weights.b_o.to(y)
        if self.norm_on_branch is not None:
            y, branch_scales = self._normed("attn_branch_norm", self.norm_on_branch, y)
        if weights.gain is not None:
            y = y * weights.gain.to(y)
        return ExactBranch(output=y, scales=scales, branch_scales=branch_scales)

    def _normed(
        self, role: str, norm: Norm, x: Float[Tensor, "token d_model"]
    ) -> tuple[Float[Tensor, "token d_model"], Float[Tensor, " token"]]:
        x = x - x.mean(-1, keepdim=True) if norm.kind == "layer" else x
        scale = (x.square().mean(-1) + self.epsilon.get(role, 0.0)).sqrt()
        x = x / scale[:, None] * norm.weight.to(x)
        return (x + norm.bias.to(x) if self.has_biases and norm.bias is not None else x), scale

    def bias(self, row_sums: Float[Tensor, " head"], branch_scale: float = 1.0) -> Float[Tensor, " d_model"]:
        """`c`: what biases add to every token alike, `(beta W_V + b_V) W_O + b_O`, then the branch's norm and gain."""
        weights = self.weights
        total = torch.zeros(weights.d_model, dtype=self.dtype, device=weights.w_o.device)
        if not self.has_biases:
            return total
        z = torch.zeros(self.plain.channels, dtype=self.dtype, device=weights.w_o.device)
        if self.norm_before is not None and self.norm_before.bias is not None:
            z = z + self.plain.value_rows @ self.norm_before.bias.to(z)
        if weights.b_v is not None:
            z = z + weights.b_v.to(z).flatten()
        total = total + self.plain.dc_map(row_sums).left @ z
        if weights.b_o is not None:
            total = total + weights.b_o.to(total)
        if (norm := self.norm_on_branch) is not None:
            total = total - total.mean() if norm.kind == "layer" else total
            total = total / branch_scale * norm.weight.to(total)
            total = total + norm.bias.to(total) if norm.bias is not None else total
        return total if weights.gain is None else total * weights.gain.to(total)
