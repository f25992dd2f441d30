"""A spectral radius with everything that is known about it."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from oversmooth.prediction.theory.arnoldi import Dominating

TIE = 1e-6
"""Moduli that differ by less, relatively, count as equal."""
REAL = 1e-6
"""Imaginary parts below this, relative to the modulus, count as zero."""
ROUNDING = {torch.float64: 1e-9, torch.float32: 3e-6}
"""Relative error that rounding leaves in an eigenvalue of a matrix of this precision."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Radius:
    """The largest modulus of an eigenvalue, with bounds and the eigenvalue that has it."""

    value: float
    eigenvalue: complex
    low: float
    high: float
    """Bounds of the radius: to first order from the residual where it converged, otherwise `high` from norms."""
    residual: float
    """Relative to the modulus; 0 where every eigenvalue was computed."""
    route: str
    """`dense`: every eigenvalue; `krylov`: restarted Arnoldi; `diagonals`: each token's block (causal attention)."""
    applications: int
    """Applications of the operator."""
    converged: bool
    dimension: int
    """Eigenvalues that have this modulus, as far as they are known."""
    vector: tuple[Float[Tensor, "token d_model"], Float[Tensor, "token d_model"]] | None = None
    """Real and imaginary part of the features in the dominating direction, where they were computed."""


def exact_radius(values: Complex[Tensor, " count"], dtype: torch.dtype, route: str = "dense") -> Radius:
    """The radius of a list of all eigenvalues of a matrix that was computed in `dtype`."""
    moduli = values.abs()
    best = values[moduli.argmax()]
    rho = best.abs().item()
    return Radius(
        value=rho,
        eigenvalue=complex(best),
        low=rho * (1 - ROUNDING[dtype]),
        high=rho * (1 + ROUNDING[dtype]),
        residual=0.0,
        route=route,
        applications=0,
        converged=True,
        dimension=int((moduli >= rho * (1 - TIE)).sum()),
    )


def krylov_radius(
    found: Dominating, upper: float, vector: tuple[Tensor, Tensor] | None = None, route: str = "krylov"
) -> Radius:
    """The radius that Arnoldi found; `upper` bounds it from above where the search ended early."""
    rho = abs(found.value)
    return Radius(
        value=rho,
        eigenvalue=found.value,
        low=max(rho - found.error, 0.0),
        high=rho + found.error if found.converged else max(upper, rho),
        residual=found.residual / max(rho, torch.finfo(torch.float64).tiny),
        route=route,
        applications=found.applications,
        converged=found.converged,
        dimension=found.near,
        vector=vector,
    )


def with_idle(radius: Radius, skip: float, count: int) -> Radius:
    """The radius with `count` further eigenvalues `skip`, those of features outside every value channel."""
    idle = abs(skip)
    if not count or radius.value > idle * (1 + TIE):
        return radius
    ties = radius.dimension if radius.value >= idle * (1 - TIE) else 0
    # Where the other eigenvalues are known to be smaller, the radius is exactly that of the idle features.
    high = max(idle, radius.high) if ties or not radius.converged else idle
    return replace(
        radius, value=idle, eigenvalue=complex(skip), low=idle, high=high, dimension=ties + count, vector=None
    )
