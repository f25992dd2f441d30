"""Norm weights and gains multiplied into the value path, at unit token scale: the one place that knows how.

In the row convention, G a norm's weight, C the centring of a LayerNorm and g the gain of the branch: a norm before
attention gives `C G W_V`, one on a latent `W_D C G W_U`, one on the mixed heads `C G W_O`, a norm on the branch and the gain
`W_O C G g`; a norm after the sum acts on the skip connection too, `(I + H) C G`. What depends on the token that is written
(gates, sinks, the scale of the norm on the mixed heads) is at one here: only a running model shows it.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.models.canonical import AttentionWeights, Norm


def norm_before(weights: AttentionWeights) -> Norm | None:
    """The norm that divides what attention reads."""
    return None if weights.residual == "post" else weights.norms.get("attn_norm")


def norm_on_branch(weights: AttentionWeights) -> Norm | None:
    """The norm that divides what attention writes, before it is added."""
    return weights.norms.get("attn_branch_norm")


def behind(norm: Norm | None, w: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
    """Weights that read what a norm returns, its weight and centring multiplied in."""
    if norm is None:
        return w
    w = w * norm.weight.to(w)
    return w - w.mean(-1, keepdim=True) if norm.kind == "layer" else w


def folded_values(weights: AttentionWeights, w_v: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
    """Weights that read the stream, behind the norm before attention."""
    return behind(norm_before(weights), w_v)


def folded_latent(weights: AttentionWeights, w: Float[Tensor, "... latent"]) -> Float[Tensor, "... latent"]:
    """Weights that read the latent, behind the norm on it."""
    return behind(weights.norms.get("latent_norm"), w)


def value_weights(weights: AttentionWeights, dtype: torch.dtype, *, folded: bool) -> Float[Tensor, "kv d_head d_model"]:
    """`W_V` of every value head from the stream on, through a latent where there is one, with norms or without."""
    w_v = weights.w_v.to(dtype)
    if weights.latent is not None:
        w_v = (folded_latent(weights, w_v) if folded else w_v) @ weights.latent.w.to(dtype)
    return folded_values(weights, w_v) if folded else w_v


def folded_heads(
    weights: AttentionWeights, w_o: Float[Tensor, "d_model head d_head"]
) -> Float[Tensor, "d_model head d_head"]:
    """Output weights of single heads behind the norm on the mixed heads, all together or each by itself."""
    norm = weights.norms.get("inner_norm")
    if norm is None or len(norm.weight) == weights.d_head:
        return behind(norm, w_o)
    return behind(norm, w_o.flatten(1)).view(w_o.shape)


def folded_output(weights: AttentionWeights, w_o: Float[Tensor, "d_model ..."]) -> Float[Tensor, "d_model ..."]:
    """Output weights, of single heads or summed over groups, with the norm on the branch and the gain."""
    norm = norm_on_branch(weights)
    if norm is not None:
        w_o = _per_row(norm.weight, w_o) * (w_o - w_o.mean(0) if norm.kind == "layer" else w_o)
    return w_o if weights.gain is None else _per_row(weights.gain, w_o) * w_o


def _per_row(weight: Float[Tensor, " d_model"], like: Tensor) -> Tensor:
    return weight.to(like).view(-1, *[1] * (like.ndim - 1))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class NormAfter:
    """The linear part of a norm after the sum, without its scale."""

    weight: Float[Tensor, " d_model"]
    centres: bool
    """Whether it takes the feature mean off (LayerNorm)."""

    def rows(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """On features that are rows."""
        return (x - x.mean(-1, keepdim=True) if self.centres else x) * self.weight

    def columns(self, x: Float[Tensor, "d_model column"]) -> Float[Tensor, "d_model column"]:
        """On features that are columns."""
        return self.rows(x.T).T


def norm_after(weights: AttentionWeights, like: Tensor) -> NormAfter | None:
    """The norm after the sum of a post-norm layer, in the precision of `like`."""
    norm = weights.norms.get("attn_norm") if weights.residual == "post" else None
    return None if norm is None else NormAfter(weight=norm.weight.to(like), centres=norm.kind == "layer")
