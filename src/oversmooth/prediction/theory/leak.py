"""The leak: how much of what all tokens share is turned into differences, where tokens write with different gains.

With `A_h 1 = r_h 1` and the gains g of the token that is written, of head h and channel c,

    T(1 w^T) = 1 w^T (I + H) + sum_h r_h ((g^h - mean g^h) o (w W_V^h / s)) W_O^h

The first term is what the averaged operator does; the second has no mean over tokens. Equal gains leave it zero, and DC
invariant. It is the only term that makes differences out of nothing: no matrix with it can smooth completely.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.prediction.theory.operator import LayerOperator, ValuePath


def leaked(
    path: ValuePath,
    operator: LayerOperator,
    gains: Float[Tensor, "token head channel"],
    w: Float[Tensor, " d_model"],
) -> Float[Tensor, "token d_model"]:
    """The part of `T(1 w^T)` that differs between tokens; `path` is that of the operator without its mean gains."""
    values = (path.value_rows @ w / operator.scale).unflatten(0, (path.n_kv, path.d_head))
    by_head = values.repeat_interleave(path.n_heads // path.n_kv, 0) * operator.row_sums[:, None]
    written = (gains - gains.mean(0)) * by_head
    return written.flatten(1) @ path.output_rows


def leak(
    path: ValuePath,
    operator: LayerOperator,
    gains: Float[Tensor, "token head channel"] | None,
    w: Float[Tensor, " d_model"],
) -> float | None:
    """`norm(leaked) / norm(T(1 w^T))`, in [0, 1]; 0 where tokens write with equal gains, `None` where T(1 w^T) is zero."""
    if gains is None:
        return 0.0
    varying = leaked(path, operator, gains, w)
    everything = torch.linalg.matrix_norm(varying + operator.shared(w)).item()
    return torch.linalg.matrix_norm(varying).item() / everything if everything else None
