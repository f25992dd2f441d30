"""Norm weights and gains multiplied into the value path, at unit token scale: the one place that knows how.

In the row convention, G a norm's weight, C the centring of a LayerNorm and g the gain of the branch: a norm before
attention gives `C G W_V`, a norm on the branch and the gain `W_O C G g`, a norm after the sum acts on the skip connection
too, `(I + H) C G`.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from oversmooth.models.canonical import AttentionWeights, Norm


def norm_before(weights: AttentionWeights) -> Norm | None:
    """The norm that divides what attention reads."""
    return None if weights.residual == "post" else weights.norms.get("attn_norm")


def norm_on_branch(weights: AttentionWeights) -> Norm | None:
    """The norm that divides what attention writes, before it is added."""
    return weights.norms.get("attn_branch_norm")


def folded_values(weights: AttentionWeights, w_v: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
    """Value weights behind the norm before attention."""
    norm = norm_before(weights)
    if norm is None:
        return w_v
    w_v = w_v * norm.weight.to(w_v)
    return w_v - w_v.mean(-1, keepdim=True) if norm.kind == "layer" else w_v


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
