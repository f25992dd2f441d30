"""What infinitely many repetitions of one layer do at fixed attention: the theorem, with its bounds."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Complex
from torch import Tensor

from oversmooth.prediction.theory.operator import LayerOperator
from oversmooth.prediction.theory.radii import MAX_APPLICATIONS, ac_radius, dc_radius
from oversmooth.prediction.theory.radius import Radius

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
    """Effective rank of the features in the limit: 1 where all tokens become equal or parallel up to sign."""
    is_absolute: bool
    """Whether tokens become equal in absolute size too, not only relative to what they share: `rho_ac < 1`."""

    @property
    def half_life(self) -> float | None:
        """Layers after which `HFC/LFC` has halved or doubled; `None` where it stays as it is."""
        return math.log(2) / abs(self.exponent) if self.exponent and self.regime != "neutral" else None


def asymptotics(operator: LayerOperator, *, max_applications: int = MAX_APPLICATIONS) -> Asymptotics:
    """Both radii and what they decide. Arnoldi goes on only until the radii are apart by more than its error bound."""
    dc = dc_radius(operator)
    ac = ac_radius(operator, against=dc.value, max_applications=max_applications)
    regime = regime_of(dc, ac)
    leading = dc if dc.value >= ac.value else ac
    tied = dc.dimension + ac.dimension if regime == "neutral" else leading.dimension
    return Asymptotics(
        dc=dc,
        ac=replace(ac, vector=None),
        regime=regime,
        exponent=math.log(ac.value) - math.log(dc.value) if ac.value > 0 and dc.value > 0 else None,
        dimension=tied,
        limit_rank=_limit_rank(regime, ac),
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


def _limit_rank(regime: Regime, ac: Radius) -> float | None:
    if regime == "smoothing":
        return 1.0
    if regime != "sharpening" or ac.vector is None:
        return None
    return effective_rank(torch.complex(*ac.vector))


def effective_rank(x: Complex[Tensor, "token d_model"]) -> float:
    """exp of the entropy of (singular values / their sum)."""
    s = torch.linalg.svdvals(x).double()
    return torch.special.entr(s / s.sum()).sum().exp().item()
