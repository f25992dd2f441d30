"""What repeating one layer, one head or the whole stack leads to.

A head alone, with the skip connection, has the eigenvalues `skip + l_H l_A / scale` for every pair of an eigenvalue of
`H_h` and one of `A_h`. Those with `l_A = 1` belong to what all tokens share.

What all tokens share stays so under every layer, so its growth is that of the product of the `d x d` maps. What differs
between them grows as the product of the centred operators at the measured attention. A few isotropic probes follow both
products; QR after every layer keeps them from becoming parallel or from overflowing, and the triangular factors
multiply up to the growth.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from oversmooth.measurement.metrics import effective_rank
from oversmooth.measurement.moments import Moments
from oversmooth.prediction.operator import LayerOperator, ValuePath, centre
from oversmooth.prediction.radii import MAX_APPLICATIONS, REAL, Radius, TokenSpace, ac_radii, dc_radius
from oversmooth.spectra.krylov import generic_start

# --- what infinitely many repetitions of one layer do at fixed attention: the theorem, with its bounds ---

SOLVED_AT_ONCE = 1024
"""Channels up to which a linear system is solved in less time than hundreds of steps would take."""
SHARED_STEPS, SHARED_CLOSE = 2000, 1e-4
"""Steps in which the part of the limit that tokens share has to be found, to this relative accuracy."""
PHASES = 12
"""Phases of half a turn over which a conjugate pair is averaged; the other half differs by a sign only."""
Regime = Literal["smoothing", "sharpening", "neutral", "undecided"]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Asymptotics:
    """The limit of `T^k` for one layer and one sequence."""

    dc: Radius
    ac: Radius
    regime: Regime
    """Smoothing where rho_dc is larger, sharpening where rho_ac is, neutral where they are equal to the accuracy
    reached, undecided where the search for rho_ac ended before its bounds separated from rho_dc."""
    exponent: float | None
    """`log rho_ac - log rho_dc` per layer, negative smooths; `None` where one of them is zero."""
    dimension: int
    """Eigenvalues that share the largest modulus: 1 for a single real one, 2 for a conjugate pair."""
    limit_rank: float | None
    """Effective rank of the features in the limit: 1 where all tokens become equal or parallel up to sign; `None` where the
    limit depends on where it starts, or the dominating direction was not computed."""
    is_absolute: bool
    """Whether tokens become equal in absolute size too, not only relative to what they share: `rho_ac < 1`."""

    @property
    def half_life(self) -> float | None:
        """Layers after which `HFC/LFC` has halved or doubled; `None` where it stays as it is."""
        return math.log(2) / abs(self.exponent) if self.exponent and self.regime != "neutral" else None


def asymptotics_each(
    operators: Sequence[LayerOperator], space: TokenSpace | None = None, *, max_applications: int = MAX_APPLICATIONS
) -> list[Asymptotics]:
    """The same for operators that differ in skip connection and scale only: they share one Krylov space.

    `space` is that of the sequence's attention, where it is long.
    """
    shared = [dc_radius(operator) for operator in operators]
    against = [radius.value for radius in shared]
    varying = ac_radii(operators, against, space=space, max_applications=max_applications)
    return [_limit(*found) for found in zip(operators, shared, varying, strict=True)]


def _limit(operator: LayerOperator, dc: Radius, ac: Radius) -> Asymptotics:
    """What both radii decide."""
    regime = regime_of(dc, ac)
    leading = dc if dc.value >= ac.value else ac
    tied = dc.dimension + ac.dimension if regime == "neutral" else leading.dimension
    return Asymptotics(
        dc=dc,
        ac=replace(ac, vector=None),
        regime=regime,
        exponent=math.log(ac.value) - math.log(dc.value) if ac.value > 0 and dc.value > 0 else None,
        dimension=tied,
        limit_rank=_limit_rank(operator, regime, ac),
        is_absolute=regime == "smoothing" and ac.high < 1,
    )


def regime_of(dc: Radius, ac: Radius) -> Regime:
    """Which radius is larger, beyond the error bounds of both."""
    if ac.high < dc.low:
        return "smoothing"
    if not (ac.converged and dc.converged):
        return "undecided"  # a Ritz value can exceed the radius, so only the bound from norms could have decided
    if ac.low > dc.high:
        return "sharpening"
    return "neutral"


def _limit_rank(operator: LayerOperator, regime: Regime, ac: Radius) -> float | None:
    """1 where the limit is one vector for all tokens; otherwise from the dominating direction, where it is the only one.

    A real eigenvalue has one limit. A conjugate pair turns forever: after k repetitions the features are
    `cos(k phi) Re(Z) - sin(k phi) Im(Z)`, of which the effective rank is averaged over a turn.
    """
    if regime == "smoothing":
        return 1.0
    is_pair = abs(ac.eigenvalue.imag) > REAL * abs(ac.eigenvalue)
    if regime != "sharpening" or ac.vector is None or ac.dimension != (2 if is_pair else 1):
        return None
    limit = _with_shared_part(operator, ac.eigenvalue, torch.complex(*(part.double() for part in ac.vector)))
    if limit is None:
        return None
    steps = torch.arange(PHASES, dtype=torch.float64, device=limit.device) * (math.pi / PHASES)
    largest = limit.flatten()[limit.abs().argmax()]
    to_real = (largest.conj() / largest.abs())[None]  # solvers return a real eigenvector times any phase
    phases = torch.polar(torch.ones_like(steps), steps) if is_pair else to_real
    turning = (phases[:, None, None] * limit).real
    keep = torch.ones(turning.shape[:2], dtype=torch.bool, device=limit.device)
    return effective_rank.on(Moments.of(turning, keep)).values.mean().item()


def _with_shared_part(
    operator: LayerOperator, value: complex, varying: Complex[Tensor, "token d_model"]
) -> Complex[Tensor, "token d_model"] | None:
    """The eigenvector of T whose centred part is given: `Z = P Z + 1 w^T` with `value w = shared(w) + mean of T(P Z)`.

    Solved at once where the width allows it; otherwise by iteration, which converges because no eigenvalue of `shared` is as
    large as this one. `None` where that is slow.
    """
    varying = varying - varying.mean(0)
    like = operator.path.w_v
    leak = torch.complex(*(operator.apply(part.to(like)).mean(0).double() for part in (varying.real, varying.imag)))
    if len(leak) <= SOLVED_AT_ONCE:
        moves = operator.shared(torch.eye(len(leak)).to(like)).double()  # acts on rows of features from the right
        solved = torch.linalg.solve_ex((value * torch.eye(len(leak)).to(leak) - moves).T, leak)
        return None if solved.info.item() else varying + solved.result
    w = torch.zeros_like(leak)
    for _ in range(SHARED_STEPS):
        moved = torch.complex(*(operator.shared(part.to(like)).double() for part in (w.real, w.imag)))
        new = (moved + leak) / value
        if torch.linalg.vector_norm(new - w) <= SHARED_CLOSE * torch.linalg.vector_norm(new):
            return varying + new
        w = new
    return None


# --- single heads: the one-head theorem, Dobrushin's coefficient ---

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
        _theorem(operator.skip, values[head], varying[head], operator.facts.row_sums[head].item())
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
    if operator.facts.is_causal:
        return operator.facts.diagonals[1:].T.cpu().to(torch.complex128)
    found = torch.linalg.eigvals(operator.attention.cpu()).to(torch.complex128)
    sums = operator.facts.row_sums.cpu().double()
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


# --- the whole stack with changing attention and weights: how much AC and DC grow over its depth ---

PROBES, MANY = 4, 64
"""Probes of what differs between tokens, and of what they share where that is too wide to be followed as a whole."""
WHOLE_DC = 1024
"""Up to this width DC is followed by d_model probes, which makes its growth exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthGrowth:
    """Growth over a stack, as natural logarithms, for isotropic features."""

    layers: int
    log_dc: float
    log_ac: float
    leading_dc: float
    leading_ac: float
    """The same for the direction, among the probes, that grows most."""

    @property
    def exponent(self) -> float:
        """`(log growth_ac - log growth_dc) / layers`; negative smooths."""
        return (self.log_ac - self.log_dc) / self.layers


class Depth:
    """Follows one sequence through the layers of a stack, in the order in which they are given."""

    def __init__(self, tokens: int, d_model: int, like: Tensor, probes: int = PROBES):
        probes = min(probes, (tokens - 1) * d_model)
        self._ac = _Product(centre(generic_start(probes, tokens, d_model, like=like)).flatten(1))
        whole = d_model <= WHOLE_DC
        eye = torch.eye(d_model, dtype=like.dtype, device=like.device)
        self._dc = _Product(eye if whole else generic_start(MANY, d_model, like=like))
        self._shape = (-1, tokens, d_model)
        self.layers = 0

    def pass_through(self, operator: LayerOperator) -> None:
        """One more layer."""
        device = operator.path.w_v.device  # that of the layer, which need not be that of the layer before
        self._ac.apply(lambda x: operator.centred(x.view(self._shape)).flatten(1), device)
        self._dc.apply(operator.shared, device)
        self.layers += 1

    def growth(self) -> DepthGrowth | None:
        """The growth so far; `None` where nothing of a part is left."""
        found = [self._dc.log_growth(), self._ac.log_growth()]
        if not self.layers or not all(math.isfinite(value) for pair in found for value in pair):
            return None
        (log_dc, leading_dc), (log_ac, leading_ac) = found
        return DepthGrowth(
            layers=self.layers, log_dc=log_dc, log_ac=log_ac, leading_dc=leading_dc, leading_ac=leading_ac
        )


class _Product:
    """A growing product of maps, seen from a block of orthonormal rows."""

    def __init__(self, start: Float[Tensor, "probe size"]):
        self._rows = torch.linalg.qr(start.T).Q.T
        self._factor = torch.eye(len(self._rows), dtype=torch.float64)
        self._log_scale = 0.0

    def apply(self, f, device: torch.device) -> None:  # type: ignore[no-untyped-def]  # rows in, rows out
        q, r = torch.linalg.qr(f(self._rows.to(device)).T)
        self._rows = q.T
        factor = r.double().cpu() @ self._factor
        size = torch.linalg.matrix_norm(factor).item()
        self._log_scale += math.log(size) if size > 0 else -math.inf
        self._factor = factor / size if size > 0 else factor

    def log_growth(self) -> tuple[float, float]:
        """`log(norm_F / sqrt(probes))`, what isotropic features grow by, and the largest growth among the probes."""
        typical = torch.linalg.matrix_norm(self._factor).item() / math.sqrt(len(self._factor))
        leading = torch.linalg.matrix_norm(self._factor, ord=2).item()
        if typical <= 0 or not math.isfinite(self._log_scale):
            return -math.inf, -math.inf
        return self._log_scale + math.log(typical), self._log_scale + math.log(leading)
