"""What infinitely many repetitions of one layer do at fixed attention: the theorem, with its bounds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Complex
from torch import Tensor

from oversmooth.measurement.metrics import effective_rank
from oversmooth.measurement.moments import Moments
from oversmooth.prediction.theory.operator import LayerOperator
from oversmooth.prediction.theory.radii import MAX_APPLICATIONS, ac_radii, dc_radius
from oversmooth.prediction.theory.radius import REAL, Radius
from oversmooth.prediction.theory.token_space import TokenSpace

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


def asymptotics(operator: LayerOperator, *, max_applications: int = MAX_APPLICATIONS) -> Asymptotics:
    """Both radii and what they decide. Arnoldi goes on only until the radii are apart by more than its error bound."""
    return asymptotics_each([operator], max_applications=max_applications)[0]


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
    phases = torch.polar(torch.ones_like(steps), steps) if is_pair else _real_phase(limit)
    turning = (phases[:, None, None] * limit).real
    keep = torch.ones(turning.shape[:2], dtype=torch.bool, device=limit.device)
    return effective_rank.on(Moments.of(turning, keep)).values.mean().item()


def _real_phase(z: Complex[Tensor, "token d_model"]) -> Complex[Tensor, " 1"]:
    """What makes an eigenvector of a real eigenvalue real: solvers return it times any phase."""
    largest = z.flatten()[z.abs().argmax()]
    return (largest.conj() / largest.abs())[None]


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
        moves = operator.shared(
            torch.eye(len(leak)).to(like)
        ).double()  # a row of features is moved by it from the right
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
