"""One attention layer at fixed attention as a linear operator on the tokens.

    T(X) = (skip X + sum_h A_h X H_h / scale) N          X (token, d_model), tokens are rows, H_h = W_V^h W_O^h

`ValuePath` holds the weights, with norms and gains folded in or not, at unit token scale; it belongs to a layer and
keeps what is needed again for every sequence. `LayerOperator` adds the attention and the token scale of one sequence. N
is the norm after the sum in post-norm blocks, without its common scale, which drops out of every exponent.

`AttentionLayer` belongs to the weights and keeps what every sequence needs again; `exact` is the branch as the model
computes it from the attention maps, which the ladder of explanation ends in.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from oversmooth.models.canonical import AttentionWeights, Norm, TokenGains, ValueChain, ValueSizes, summed_over_groups
from oversmooth.spectra import value_map as folding
from oversmooth.spectra.value_map import NormAfter, ValueMap, folded_heads, folded_output, norm_after, value_weights

# --- one attention layer at fixed attention, as the linear operator that the theorems speak of ---

View = Literal["plain", "branch", "folded"]
"""`plain`: value and output weights alone. `branch`: with every norm and gain that acts on the attention branch.
`folded`: with the norm after the sum too, in post-norm blocks; elsewhere the same as `branch`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ValuePath(ValueSizes):
    """The value path of one layer at unit token scale: `X H_h = X W_V^h W_O^h`, and what follows the sum."""

    w_v: Float[Tensor, "kv d_head d_model"]
    w_o: Float[Tensor, "d_model head d_head"]
    after_weight: Float[Tensor, " d_model"] | None = None
    """Weight of a norm after the sum; `None` where there is none."""
    after_centres: bool = False
    """Whether that norm takes the feature mean off (LayerNorm)."""

    @property
    def is_reducible(self) -> bool:
        """Whether the branch can be followed in its K value channels instead of the d_model features.

        Not with a norm after the sum, which acts on the skip connection too, nor with more channels than features,
        where eigenvalues of zero would appear that the layer does not have.
        """
        return self.after_weight is None and self.channels <= self.d_model

    @property
    def idle_features(self) -> int:
        """Features in no value channel: so often is zero an eigenvalue of H, whatever the attention."""
        return max(self.d_model - self.channels, 0) if self.after_weight is None else 0

    def after(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """The linear part of the norm after the sum, without its scale."""
        if self.after_weight is None:
            return x
        return NormAfter(weight=self.after_weight, centres=self.after_centres).rows(x)

    @cached_property
    def value_rows(self) -> Float[Tensor, "channel d_model"]:
        return self.w_v.flatten(0, 1).contiguous()

    @cached_property
    def output_rows(self) -> Float[Tensor, "inner d_model"]:
        """`W_O` of all heads below one another, in the row convention."""
        return self.w_o.flatten(1).T.contiguous()

    @cached_property
    def core(self) -> Float[Tensor, "inner channel"]:
        """`W_O W_V` in the row convention: from the mixed channels of every head to the value channels."""
        return self.output_rows @ self.value_rows.T

    @cached_property
    def head_traces(self) -> Float[Tensor, " head"]:
        """`tr(H_h)`."""
        by_head = self.core.unflatten(0, (self.n_heads, self.d_head)).unflatten(-1, (self.n_kv, self.d_head))
        own = by_head[torch.arange(self.n_heads), :, self.value_head]
        return own.diagonal(dim1=1, dim2=2).sum(-1)

    @cached_property
    def head_gram(self) -> Float[Tensor, "head head"]:
        """`tr(H_h^T H_k)` for every pair of heads, from `d_head x d_head` matrices."""
        outputs = (self.output_rows @ self.output_rows.T).unflatten(0, (self.n_heads, self.d_head))
        outputs = outputs.unflatten(-1, (self.n_heads, self.d_head))
        values = (self.value_rows @ self.value_rows.T).unflatten(0, (self.n_kv, self.d_head))
        values = values.unflatten(-1, (self.n_kv, self.d_head))
        mine = values[self.value_head][:, :, self.value_head]
        return torch.einsum("hikj,hikj->hk", outputs, mine)

    @property
    def value_head(self) -> Tensor:
        """The value head that each head reads."""
        return torch.arange(self.n_heads) // (self.n_heads // self.n_kv)

    @cached_property
    def head_eigenvalues(self) -> Complex[Tensor, "head core"]:
        """Eigenvalues of every head's own `H_h` that its shape does not force to zero."""
        if self.d_head > self.d_model:
            whole = self.w_v[self.value_head].mT @ self.output_rows.unflatten(0, (self.n_heads, self.d_head))
            return torch.linalg.eigvals(whole.cpu().double())
        by_head = self.core.unflatten(0, (self.n_heads, self.d_head)).unflatten(-1, (self.n_kv, self.d_head))
        return torch.linalg.eigvals(by_head[torch.arange(self.n_heads), :, self.value_head].cpu().double())

    @cached_property
    def head_norms(self) -> Float[Tensor, " head"]:
        """The largest singular value of every `H_h`, from `d_head x d_head` matrices."""
        outputs = self.output_rows.unflatten(0, (self.n_heads, self.d_head)).cpu().double()
        values = self.w_v.cpu().double()[self.value_head]
        squares = torch.linalg.eigvals((outputs @ outputs.mT) @ (values @ values.mT)).real.amax(-1)
        return squares.clamp(min=0).sqrt().to(self.w_v)

    @property
    def after_norm(self) -> float:
        """Upper bound of what the norm after the sum stretches."""
        return 1.0 if self.after_weight is None else self.after_weight.abs().max().item()

    @cached_property
    def dc_core(self) -> Float[Tensor, "core core"]:
        """The smallest matrix with the nonzero eigenvalues of H, for attention whose rows sum to one."""
        ones = torch.ones(self.n_heads, dtype=self.w_v.dtype, device=self.w_v.device)
        return self.dc_map(ones).core.cpu().double()

    @cached_property
    def dc_eigenvalues(self) -> Complex[Tensor, " core"]:
        """All eigenvalues of `dc_core`."""
        return torch.linalg.eigvals(self.dc_core)

    def with_gains(self, gains: Float[Tensor, "head channel"] | None) -> "ValuePath":
        """`H_h = W_V^h diag(g^h) W_O^h`: the path with gains of the written token that are the same for every token."""
        return self if gains is None else replace(self, w_o=self.w_o * gains)

    def dc_map(self, row_sums: Float[Tensor, " head"]) -> ValueMap:
        """The map H that acts on what all tokens share, heads weighted by what the rows of their attention sum to."""
        shared = summed_over_groups(self.w_o * row_sums[:, None], self.n_kv)
        return ValueMap(left=shared.flatten(1), right=self.value_rows)


def value_path(weights: AttentionWeights, view: View, dtype: torch.dtype = torch.float32) -> ValuePath:
    """The value path of a layer in one of three views, at unit token scale."""
    w_v, w_o = value_weights(weights, dtype, folded=view != "plain"), weights.w_o.to(dtype)
    if view == "plain":
        return ValuePath(w_v=w_v, w_o=w_o)
    after = norm_after(weights, w_v) if view == "folded" else None
    return ValuePath(
        w_v=w_v,
        w_o=folded_output(weights, folded_heads(weights, w_o)),
        after_weight=None if after is None else after.weight,
        after_centres=after is not None and after.centres,
    )


@dataclass(frozen=True, eq=False)
class AttentionFacts:
    """What every operator with the same attention needs of it, computed once."""

    attention: Float[Tensor, "head token token"]

    @cached_property
    def row_sums(self) -> Float[Tensor, " head"]:
        """What the rows of each head's attention sum to: one for softmax."""
        return self.attention.sum(-1).mean(-1)

    @cached_property
    def is_causal(self) -> bool:
        """Whether no token sees a later one."""
        if self.attention.shape[-1] < 2 or bool(self.attention[:, 0, 1:].any()):  # the first token decides at once
            return False
        return not bool(torch.triu(self.attention, diagonal=1).any())

    @cached_property
    def diagonals(self) -> Float[Tensor, "token head"]:
        return self.attention.diagonal(dim1=1, dim2=2).T.contiguous()

    @cached_property
    def varying_gram(self) -> Float[Tensor, "head head"]:
        """`tr((P A_h)^T P A_k)` for every pair of heads."""
        varying = (self.attention - self.attention.mean(1, keepdim=True)).flatten(1)
        return varying @ varying.T


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerOperator:
    """T of one layer on one sequence; its attention need not be a softmax, but each head's rows sum to one number."""

    path: ValuePath
    attention: Float[Tensor, "head token token"]
    scale: float = 1.0
    """Common token scale of the norms that are folded in: H is divided by it."""
    skip: float = 1.0
    known: AttentionFacts | None = None
    """What another operator already found out about attention; of use where it is the same."""

    @property
    def tokens(self) -> int:
        return self.attention.shape[-1]

    @cached_property
    def facts(self) -> AttentionFacts:
        is_same = self.known is not None and self.known.attention is self.attention
        return self.known if is_same and self.known is not None else AttentionFacts(self.attention)

    def branch(self, x: Float[Tensor, "... token d_model"]) -> Float[Tensor, "... token d_model"]:
        """`sum_h A_h X H_h / scale`."""
        return self.mixed(x @ self.path.value_rows.T) @ self.path.output_rows / self.scale

    def mixed(self, z: Float[Tensor, "... token channel"]) -> Float[Tensor, "... token inner"]:
        """The value channels of every head mixed by its attention; the products of all heads in one."""
        path, n = self.path, self.tokens
        group = path.n_heads // path.n_kv
        several = z.reshape(-1, n, path.n_kv, path.d_head)  # side by side, so that attention is read once for all
        values = several.permute(2, 1, 0, 3).flatten(2)
        grouped = self.attention.reshape(path.n_kv, group * n, n)
        heads = (grouped @ values).view(path.n_kv, group, n, len(several), path.d_head)
        return heads.permute(3, 2, 0, 1, 4).reshape(*z.shape[:-1], path.n_heads * path.d_head)

    def apply(self, x: Float[Tensor, "... token d_model"]) -> Float[Tensor, "... token d_model"]:
        """T(X)."""
        return self.path.after(self.skip * x + self.branch(x))

    def shared(self, w: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """T on what all tokens share: `T(1 w^T) = 1 shared(w)^T`."""
        value_map = self.shared_map
        return self.path.after(self.skip * w + (w @ value_map.right.T) @ value_map.left.T / self.scale)

    @cached_property
    def shared_map(self) -> ValueMap:
        """H, with the heads weighted by what the rows of their attention sum to, at unit scale."""
        return self.path.dc_map(self.facts.row_sums)

    def centred(self, x: Float[Tensor, "... token d_model"]) -> Float[Tensor, "... token d_model"]:
        """`P T(X)`, on centred X: the block of T that maps AC to AC."""
        return centre(self.apply(x))


def centre(x: Float[Tensor, "... token d"]) -> Float[Tensor, "... token d"]:
    """`P X`: takes the mean over tokens off."""
    return x - x.mean(-2, keepdim=True)


# --- one attention sub-block with everything that acts on its branch: norms with their own scales ---

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
class AttentionLayer(ValueChain):
    """The attention sub-block of one layer, ready for any sequence; its value path as the model runs it, and more."""

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
            x, scales = self.normed("attn_norm", self.norm_before, x)
        z, latent_scales = self.values(x)
        if latent_scales is not None:
            scales = latent_scales if scales is None else scales * latent_scales
        mixed = LayerOperator(path=self.plain, attention=attention).mixed(z)
        written, all_gains = self.written(mixed, gains)
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
        heads = self.by_head(exact.mixed)
        heads = heads if exact.mean_gains is None else heads * exact.mean_gains
        return self._added(self.written_at(heads, gains))[0]

    def _added(self, written: Float[Tensor, "token inner"]) -> tuple[Float[Tensor, "token d_model"], Tensor | None]:
        """What is added to the stream, and each token's scale in a norm on the branch."""
        scales, y = None, self.projected(written)
        if self.norm_on_branch is not None:
            y, scales = self.normed("attn_branch_norm", self.norm_on_branch, y)
        return (y if self.weights.gain is None else y * self.weights.gain.to(y)), scales

    def bias(
        self, row_sums: Float[Tensor, " head"], exact: ExactBranch, gains: TokenGains | None = None
    ) -> Float[Tensor, " d_model"]:
        """`c`: what biases add to every token alike, `(beta W_V + b_V) W_O + b_O`, then the branch's norm and gain."""
        weights = self.weights
        if not self.has_biases:
            return torch.zeros(weights.d_model, dtype=self.dtype, device=weights.w_o.device)
        shared = self.repeated(self._value_bias(exact)) * row_sums[:, None]
        shared = shared if exact.mean_gains is None else shared * exact.mean_gains
        total = self.projected(self.written_at(shared, gains))
        if (norm := self.norm_on_branch) is not None:
            total = total - total.mean() if norm.kind == "layer" else total
            scale = 1.0 if exact.branch_scales is None else exact.branch_scales.mean().item()
            total = self.with_bias(total / scale * norm.weight.to(total), norm.bias)
        return total if weights.gain is None else total * weights.gain.to(total)

    def _value_bias(self, exact: ExactBranch) -> Float[Tensor, " channel"]:
        """What the biases before attention add to every value channel, at the mean scale of a norm on a latent."""
        weights, norm = self.weights, self.norm_before
        x = torch.zeros(weights.d_read, dtype=self.dtype, device=weights.w_o.device)
        x = x if norm is None else self.with_bias(x, norm.bias)
        if weights.latent is not None:
            x = self.with_bias(weights.latent.w.to(x) @ x, weights.latent.b)
            if (inner := weights.norms.get("latent_norm")) is not None and exact.latent_scales is not None:
                x = x - x.mean() if inner.kind == "layer" else x
                x = self.with_bias(x / exact.latent_scales.mean() * inner.weight.to(x), inner.bias)
        return self.with_bias(self.value_rows @ x, None if weights.b_v is None else weights.b_v.flatten())
