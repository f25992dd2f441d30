"""Single heads: the one-head theorem, Dobrushin's coefficient, and certificates that hold for any attention.

A head alone, with the skip connection, has the eigenvalues `skip + l_H l_A / scale` for every pair of an eigenvalue of
`H_h` and one of `A_h`. Those with `l_A = 1` belong to what all tokens share.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from oversmooth.prediction.theory.operator import LayerOperator, ValuePath
from oversmooth.prediction.theory.radius import REAL

TOKENS_UP_TO = 512
"""Longest sequence whose attention eigenvalues and Dobrushin coefficients are computed: both cost tokens cubed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTheorem:
    """The one-head theorem for one head and one sequence."""

    rho_dc: float
    rho_ac: float
    value_eigenvalue: complex
    """`l_H` of the dominating pair, with norms and scale as in the operator."""
    attention_eigenvalue: complex
    """`l_A` of the dominating pair; the sum of a row (one) where the head smooths."""

    @property
    def is_smoothing(self) -> bool:
        return self.rho_dc > self.rho_ac


def head_theorems(operator: LayerOperator) -> list[HeadTheorem]:
    """Which pair of eigenvalues dominates in every head."""
    path = operator.path
    values = path.head_eigenvalues / operator.scale
    if path.d_head < path.d_model:  # eigenvalues that the shape forces to zero
        values = torch.cat([values, values.new_zeros(path.n_heads, 1)], 1)
    varying = varying_eigenvalues(operator)
    return [
        _theorem(operator.skip, values[head], varying[head], operator.row_sums[head].item())
        for head in range(path.n_heads)
    ]


def _theorem(
    skip: float, values: Complex[Tensor, " value"], varying: Complex[Tensor, " varying"], row_sum: float
) -> HeadTheorem:
    shared = (skip + values * row_sum).abs()
    pairs = (skip + values[:, None] * varying[None, :]).abs()
    best = int(pairs.argmax())
    row, column = divmod(best, pairs.shape[1])
    rho_dc, rho_ac = shared.max().item(), pairs.flatten()[best].item()
    if rho_dc >= rho_ac:
        pair = complex(values[shared.argmax()]), complex(row_sum)
    else:
        pair = complex(values[row]), complex(varying[column])
    return HeadTheorem(rho_dc=rho_dc, rho_ac=rho_ac, value_eigenvalue=pair[0], attention_eigenvalue=pair[1])


def varying_eigenvalues(operator: LayerOperator) -> Complex[Tensor, "head varying"]:
    """The eigenvalues of every `A_h` except the one of the all-ones vector: n - 1 per head."""
    if operator.is_causal:
        return operator.diagonals[1:].T.cpu().to(torch.complex128)
    found = torch.linalg.eigvals(operator.attention.cpu()).to(torch.complex128)
    sums = operator.row_sums.cpu().double()
    trivial = (found - sums[:, None]).abs().argmin(1)
    keep = torch.ones(found.shape, dtype=torch.bool)
    keep[torch.arange(len(found)), trivial] = False
    return found[keep].view(len(found), -1)


# --- for any attention ----------------------------------------------------------------------------------------------


def dobrushin(attention: Float[Tensor, "head token token"]) -> Float[Tensor, " head"]:
    """`tau(A) = max over i, k of 1 - sum_t min(a_it, a_kt)`: how little two rows can overlap; below 1 it contracts."""
    return torch.cdist(attention, attention, p=1).amax((1, 2)).clamp(max=2) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A guarantee for any attention with this Dobrushin coefficient or a smaller one, whatever the features."""

    regime: Literal["smoothing", "sharpening"]
    rate: float
    """Per layer, what differs between tokens relative to what they share changes by at most (smoothing) or at least
    (sharpening) this factor, measured by `max y - min y` of every channel in the eigenbasis."""


def certificate(eigenvalues: Complex[Tensor, " value"], tau: float) -> Certificate | None:
    """What the eigenvalues of a head guarantee; `None` where they have both signs, are zero, complex or below -1.

    For `l > 0`: osc(y') <= (1 + l tau) osc(y) while the common part grows by 1 + l. For `l` in [-1, 0):
    osc(y') >= (1 - |l| tau) osc(y) while the common part shrinks by 1 - |l|.
    """
    if bool((eigenvalues.imag.abs() > REAL * eigenvalues.abs()).any()):
        return None
    real = eigenvalues.real
    if bool((real > 0).all()):
        return Certificate(regime="smoothing", rate=((1 + real * tau) / (1 + real)).max().item())
    if bool(((real >= -1) & (real < 0)).all()):
        shrunk = (1 + real).clamp(min=torch.finfo(real.dtype).tiny)
        return Certificate(regime="sharpening", rate=((1 + real * tau) / shrunk).min().clamp(max=1e30).item())
    return None


def channel_eigenvalues(path: ValuePath, scale: float = 1.0, tolerance: float = 1e-4) -> Tensor | None:
    """`l_j` of every channel of a layer whose heads decouple (the parametrization `V diag(lambda) V^-1`), else `None`.

    Heads decouple where no head writes into the values of another; heads that share values must be diagonal in the
    same basis, with signs that agree. Then the one-head guarantee holds for the layer, exactly and for any attention.
    """
    if path.after_weight is not None:
        return None
    blocks = path.core.cpu().double().unflatten(0, (path.n_heads, path.d_head)).unflatten(-1, (path.n_kv, path.d_head))
    size = torch.linalg.vector_norm(blocks)
    heads = torch.arange(path.n_heads)
    own = blocks[heads, :, path.value_head]
    if torch.linalg.vector_norm(blocks).square() - own.square().sum() > (tolerance * size) ** 2:
        return None
    if path.n_heads == path.n_kv:
        return path.head_eigenvalues.flatten() / scale
    diagonal = own.diagonal(dim1=1, dim2=2)
    if own.square().sum() - diagonal.square().sum() > (tolerance * size) ** 2:
        return None
    grouped = diagonal.unflatten(0, (path.n_kv, -1))
    agrees = ((grouped >= 0).all(1) | (grouped <= 0).all(1)).all()
    return (grouped.sum(1).flatten() / scale).to(torch.complex128) if bool(agrees) else None
