"""The published interventions as formulas, each written once.

Most are linear in attention, so that one formula serves the probabilities A of a what-if and what fused attention
returns, `O = A V`, on a live model. `uniform` is the same with J in place of A: J itself, or the mean of the values that a
token may see. J goes row by row with its own length: over the prefix in causal rows, over the window in sliding ones.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

Attention = Float[Tensor, "head token token"]


def attnscale(mixed: Tensor, uniform: Tensor, w: Tensor) -> Tensor:
    """AttnScale, `J + (1 + w)(A - J)`: what differs from uniform attention is amplified; eigenvalues 1 and `(1 + w) l`."""
    return torch.addcmul(mixed - w * uniform, w, mixed)  # fewer passes over the output than A + w (A - J)


def centered(mixed: Tensor, uniform: Tensor) -> Tensor:
    """Centered attention, `A - J`: what all tokens share is not passed on; eigenvalues 0 and `l`."""
    return mixed - uniform


def gfsa(
    zeroth: Tensor, once: Tensor, twice: Tensor, w0: Tensor, w1: Tensor, w_k: Tensor, order: int | float
) -> Tensor:
    """GFSA, `w0 I + w1 A + wK (A + (K - 1)(A^2 - A))`, from I, A and A^2: the same polynomial of every eigenvalue."""
    return w0 * zeroth + w1 * once + w_k * (once + (order - 1) * (twice - once))


def featscale(y: Tensor, common: Tensor, t1: Tensor, t2: Tensor) -> Tensor:
    """FeatScale, `(1 + t1) LC Y + (1 + t2) HC Y`, with `LC Y = J Y` the `common` part and `HC Y = Y - LC Y`."""
    return torch.addcmul(y + (t1 - t2) * common, t2, y)


def tempered(attention: Tensor, temperature: int | float) -> Tensor:
    """TempScale, `softmax(scores / t)`, from `A = softmax(scores)`: powers `A^(1/t)`, their rows divided by their sums."""
    powers = (attention / attention.detach().amax(-1, keepdim=True)) ** (1 / temperature)  # the largest is one
    return powers / powers.sum(-1, keepdim=True)


def differential(mixed: Tensor, partner: Tensor, share: Tensor) -> Tensor:
    """Differential pairing, `A_1 - s A_2`: what both heads look at is taken off; rows sum to `1 - s`."""
    return mixed - share * partner


def partners(x: Tensor, axis: int) -> Tensor:
    """For each head the other one of its pair: heads 0 and 1, 2 and 3, ..."""
    return x.unflatten(axis, (-1, 2)).flip(axis + 1).flatten(axis, axis + 1)


def gate(mixed: Tensor, opening: Tensor | float) -> Tensor:
    """Gate after attention, `g A`; one number g multiplies every eigenvalue, the first one too."""
    return opening * mixed


def value_residual(own: Tensor, first: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Value residual, `a V_l + b V_1`: a source term from the first layer."""
    return a * own + b * first


def exclusive(mixed: Tensor, own: Tensor) -> Tensor:
    """Exclusive self-attention, `y - (y . v) v / |v|^2`: orthogonal to the token's own value; a zero v takes nothing off."""
    direction = torch.nn.functional.normalize(own, dim=-1, eps=torch.finfo(own.dtype).tiny)
    return mixed - (mixed * direction).sum(-1, keepdim=True) * direction


def layernorm_scaling(normed: Tensor, number: int | float) -> Tensor:
    """LayerNorm scaling, `norm(x) / sqrt(l)` in block l, counted from one."""
    return normed / math.sqrt(number)


def uniform_attention(attention: Attention) -> Attention:
    """J: every token looks equally at all tokens that it may see.

    What a mask forbids is zero in every head, and masks of sequences depend on the distance of two tokens alone (causal,
    sliding windows): a distance at which some head looks somewhere is allowed. So a probability that underflowed is not
    taken for a mask.
    """
    tokens = attention.shape[-1]
    steps = torch.arange(tokens, device=attention.device)
    distance = steps[:, None] - steps + tokens - 1
    is_seen = torch.zeros(2 * tokens - 1, dtype=torch.bool, device=attention.device)
    is_seen[distance[(attention != 0).any(0)]] = True
    looks = is_seen[distance].to(attention.dtype)
    return (looks / looks.sum(-1, keepdim=True).clamp(min=1)).expand_as(attention)
