"""The value map of an attention layer, plain and with its norms folded in, kept as the product of its factors.

`H = W_V W_O` in the row convention of the paper is the transpose of `W_O W_V` here; the eigenvalues are the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.models.canonical import AttentionWeights, summed_over_groups
from oversmooth.spectra.folding import (
    folded_heads,
    folded_latent,
    folded_output,
    folded_values,
    norm_after,
    norm_before,
    value_weights,
)

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
