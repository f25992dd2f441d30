"""The value map of a layer, plain and with norms folded in.

In the row convention, G a norm's weight, C the centring of a LayerNorm and g the gain of the branch: a norm before
attention gives `C G W_V`, one on a latent `W_D C G W_U`, one on the mixed heads `C G W_O`, a norm on the branch and the gain
`W_O C G g`; a norm after the sum acts on the skip connection too, `(I + H) C G`. What depends on the token that is written
(gates, sinks, the scale of the norm on the mixed heads) is at one here: only a running model shows it.

`H = W_V W_O` in the row convention of the paper is the transpose of `W_O W_V` here; the eigenvalues are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.models.canonical import AttentionWeights, Norm, summed_over_groups

# --- norm weights and gains multiplied into the value path, at unit token scale ---


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


# --- the value map of an attention layer, plain and with its norms folded in ---

HEADS_AT_ONCE = 8
"""Heads that are brought into a wider type together where there are many: large products are faster than small ones."""

ROWS_AT_ONCE = 256
"""Rows that are brought into a wider type together for a product with few columns."""


@dataclass(frozen=True, kw_only=True)
class ValueMap:
    """The map M that a layer adds to what all tokens share, `x -> x + M x`, as a product `left @ right` plus `extra`.

    `extra` is present only for post-norm layers with the norm folded in, where M is not of low rank.
    """

    left: Float[Tensor, "d_model channel"]
    right: Float[Tensor, "channel d_model"]
    extra: Callable[[Float[Tensor, "d_model column"]], Float[Tensor, "d_model column"]] | None = None

    @property
    def size(self) -> int:
        return self.left.shape[0]

    @property
    def has_forced_zeros(self) -> bool:
        """Whether there are fewer channels than the width, so that some eigenvalues are exactly zero."""
        return self.extra is None and self.left.shape[1] < self.size

    @property
    def core_size(self) -> int:
        return self.left.shape[1] if self.has_forced_zeros else self.size

    def apply(self, x: Float[Tensor, "d_model column"]) -> Float[Tensor, "d_model column"]:
        product = _times(self.left, _times(self.right, x))
        return product if self.extra is None else self.extra(x + product) - x

    def core_product(self, x: Float[Tensor, "core column"]) -> Float[Tensor, "core column"]:
        """The core times some columns, without forming it, in the precision of the columns."""
        return _times(self.right, _times(self.left, x)) if self.has_forced_zeros else self.apply(x)

    def in_float64(self) -> "ValueMap":
        return replace(self, left=self.left.double(), right=self.right.double())

    @cached_property
    def core(self) -> Float[Tensor, "core core"]:
        """The smallest matrix with the same nonzero eigenvalues."""
        if self.has_forced_zeros:
            return self.right @ self.left
        product = self.left @ self.right
        if self.extra is None:
            return product
        eye = torch.eye(self.size, dtype=self.left.dtype, device=self.left.device)
        return self.extra(eye + product) - eye


def _times(matrix: Float[Tensor, "out in_"], x: Float[Tensor, "in_ column"]) -> Float[Tensor, "out column"]:
    """The product in the precision of the columns, a few rows at a time where a wider copy of the matrix would be needed."""
    if matrix.dtype == x.dtype:
        return matrix @ x
    return torch.cat([rows.to(x.dtype) @ x for rows in matrix.split(ROWS_AT_ONCE)])


def plain_map(weights: AttentionWeights, dtype: torch.dtype) -> ValueMap:
    """`M = W_O W_V`, with the output weights of heads that share values summed.

    Values made from a latent that is narrower than their channels are followed in it: `M = (W_O W_U) W_D`.
    """
    if weights.latent is None:
        left = summed_over_groups(weights.w_o, weights.n_kv, dtype).flatten(1)
        return ValueMap(left=left, right=weights.w_v.to(dtype).flatten(0, 1))
    if _is_followed_in_latent(weights):
        return ValueMap(left=_written_from_latent(weights, dtype), right=weights.latent.w.to(dtype))
    left = summed_over_groups(weights.w_o, weights.n_kv, dtype).flatten(1)
    return ValueMap(left=left, right=value_weights(weights, dtype, folded=False).flatten(0, 1))


def _is_followed_in_latent(weights: AttentionWeights) -> bool:
    return weights.latent is not None and weights.core_width < weights.channels


def _written_from_latent(
    weights: AttentionWeights, dtype: torch.dtype, *, folded: bool = False
) -> Float[Tensor, "d_model latent"]:
    """`W_O W_U`, a few heads at a time, so that no copy of all heads in a wider type is ever in memory."""
    total = torch.zeros(weights.d_model, weights.w_v.shape[-1], dtype=dtype, device=weights.w_o.device)
    w_o = folded_heads(weights, weights.w_o.to(dtype)) if folded else weights.w_o
    w_v = weights.w_v.repeat_interleave(weights.n_heads // weights.n_kv, 0)
    for output, up in zip(w_o.split(HEADS_AT_ONCE, 1), w_v.split(HEADS_AT_ONCE), strict=True):
        total.addmm_(output.flatten(1).to(dtype), up.flatten(0, 1).to(dtype))
    return total


def folded_map(
    weights: AttentionWeights, dtype: torch.dtype, plain: ValueMap | None = None
) -> tuple[ValueMap, str] | None:
    """The map with the attention sub-block's own norm weights and gain folded in, at unit token scale, and in words.

    In the row convention: pre-norm and parallel `C G H g`, post-norm `(I + H g) C G - I`, a norm on the branch
    `... H C' G' g`; G is the norm's weight, C the centring of a LayerNorm, g the branch gain. `None` without norms.
    A `plain` map that is already there is taken instead of building it again.
    """
    if not weights.norms.keys() & FOLDED_ROLES.keys() and weights.gain is None:
        return None
    plain = plain or plain_map(weights, dtype)
    after = norm_after(weights, plain.left)
    words = {
        "norm before attention": norm_before(weights) is not None,
        **{word: role in weights.norms for role, word in FOLDED_ROLES.items() if word},
        "branch gain": weights.gain is not None,
        "norm after the sum": after is not None,
    }
    folded = ValueMap(
        left=folded_output(weights, _folded_left(weights, plain)),
        right=folded_values(weights, _folded_right(weights, plain)),
        extra=None if after is None else after.columns,
    )
    return folded, ", ".join(word for word, is_there in words.items() if is_there)


FOLDED_ROLES = {
    "attn_norm": "",
    "latent_norm": "norm on the latent",
    "inner_norm": "norm between attention and output",
    "attn_branch_norm": "norm on the branch",
}
"""Norms of the attention sub-block, in words; the place of `attn_norm` depends on the residual form."""


def _folded_left(weights: AttentionWeights, plain: ValueMap) -> Float[Tensor, "d_model channel"]:
    """The left factor with the norms inside of it: on the mixed heads, and on the latent where that is its right side."""
    left, dtype = plain.left, plain.left.dtype
    in_latent = _is_followed_in_latent(weights)
    if "inner_norm" in weights.norms and in_latent:
        left = _written_from_latent(weights, dtype, folded=True)
    elif "inner_norm" in weights.norms:
        left = summed_over_groups(folded_heads(weights, weights.w_o.to(dtype)), weights.n_kv).flatten(1)
    return folded_latent(weights, left) if in_latent else left


def _folded_right(weights: AttentionWeights, plain: ValueMap) -> Float[Tensor, "channel d_model"]:
    if weights.latent is None or _is_followed_in_latent(weights):
        return plain.right
    up = folded_latent(weights, weights.w_v.to(plain.right.dtype))
    return up.flatten(0, 1) @ weights.latent.w.to(up)


def value_norm_and_asymmetry(value_map: ValueMap) -> tuple[float, float | None]:
    """`norm(H)` and `norm(H - H^T) / (2 norm(H))`, Frobenius, for a map without `extra`.

    Of low-rank maps H is not formed: `norm(H - H^T)^2 = 2 norm(H)^2 - 2 tr(H H)`, and the Gram matrices of the factors
    give both. The asymmetry of H = 0 does not exist.
    """
    assert value_map.extra is None, "asked for a plain map, whose factors are all there is"
    left, right, core = value_map.left, value_map.right, value_map.core
    if value_map.has_forced_zeros:
        square = ((left.T @ left) * (right @ right.T)).sum()
        twice_skew = (2 * (square - (core * core.T).sum())).clamp(min=0).sqrt()
        norm = square.clamp(min=0).sqrt().item()
    else:
        norm, twice_skew = torch.linalg.matrix_norm(core).item(), torch.linalg.matrix_norm(core - core.T)
    return (norm, twice_skew.item() / (2 * norm)) if norm else (0.0, None)


def bias_norm(weights: AttentionWeights, dtype: torch.dtype) -> float:
    """Length of `W_O b_V`, which attention adds to every token alike because its rows sum to one."""
    if weights.b_v is None:
        return 0.0
    summed = summed_over_groups(weights.w_o, weights.n_kv, dtype).flatten(1)
    return (summed @ weights.b_v.to(dtype).flatten()).norm().item()
