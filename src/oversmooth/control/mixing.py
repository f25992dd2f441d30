"""Changes of a given strength: weights whose maps lie between the old ones and the new."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.models.canonical import AttentionWeights


@torch.no_grad()
def mixed_weights(old: AttentionWeights, new: AttentionWeights, strength: float) -> AttentionWeights:
    """The weights whose maps are nearest to `(1 - s) H_h + s H'_h`; `s` is the strength, 0 the old ones, 1 the new.

    The mix of two heads has twice the rank that one can hold. What is kept of it are its largest singular values: by
    Eckart and Young nothing of that rank is nearer, in the sum over heads of squared Frobenius norms, where heads that
    read the same values are taken together.
    """
    value, output = [], []
    for w_v, w_o, share in ((old.w_v, old.w_o, 1 - strength), (new.w_v, new.w_o, strength)):
        value.append(w_v.double())
        output.append(share * _by_value_head(w_o.double(), old.n_kv))
    left = torch.linalg.qr(torch.cat(output, 2))
    right = torch.linalg.qr(torch.cat(value, 1).mT)
    core = torch.linalg.svd(left.R @ right.R.mT, full_matrices=False)
    kept = slice(old.d_head)
    half = core.S[:, kept].sqrt()
    columns = (left.Q @ core.U[..., kept]) * half[:, None]
    rows = half[..., None] * (core.Vh[:, kept] @ right.Q.mT)
    return replace(old, w_v=_filled(rows, old.w_v), w_o=_by_head(_filled(columns, output[0]), old))


def _by_value_head(
    w_o: Float[Tensor, "d_model head d_head"], n_kv: int
) -> Float[Tensor, "kv group_times_d_model d_head"]:
    """The output weights of all heads that read one value head, below each other."""
    return w_o.unflatten(1, (n_kv, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _by_head(
    columns: Float[Tensor, "kv group_times_d_model d_head"], like: AttentionWeights
) -> Float[Tensor, "d_model head d_head"]:
    group = like.n_heads // like.n_kv
    return columns.unflatten(1, (group, like.d_model)).permute(2, 0, 1, 3).flatten(1, 2).to(like.w_o.dtype)


def _filled(found: Tensor, like: Tensor) -> Tensor:
    """With zeros where a head is wider than the model, and its map has fewer singular values."""
    whole = torch.zeros(like.shape, dtype=found.dtype, device=found.device)
    whole[tuple(slice(size) for size in found.shape)] = found
    return whole.to(like.dtype)
