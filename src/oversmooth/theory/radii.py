"""Spectral radii of a layer: `rho_dc` of what tokens share, `rho_ac` of what differs between them, and their bounds.

Because the rows of attention sum to one number, T maps what all tokens share onto itself, and its spectrum is that of
`I + H` together with that of the centred operator: two problems, of which the first is small and exact.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from oversmooth.theory.arnoldi import Dominating, dominating
from oversmooth.theory.causal import causal_radius
from oversmooth.theory.operator import LayerOperator, centre
from oversmooth.theory.radius import TIE, Radius

DENSE_DC = 1024
"""Largest DC problem whose eigenvalues are all computed: about two seconds in float64 on two cores."""
DENSE_AC = 256
"""Largest AC problem (tokens times features) whose eigenvalues are all computed."""
COARSE, FINE = 1e-3, {torch.float32: 2e-6, torch.float64: 1e-10}
"""Residuals, relative to the modulus: the first is enough unless DC and AC are closer than its error bound."""
MAX_APPLICATIONS = 600


def dc_radius(operator: LayerOperator) -> Radius:
    """`rho_dc`: spectral radius of T on what all tokens share, `max |skip + lambda(H) / scale|`; exact up to `DENSE_DC`."""
    path, skip, factor = operator.path, operator.skip, 1.0 / operator.scale
    sums = operator.row_sums.round(decimals=5)  # softmax rows sum to one up to rounding
    value_map = path.dc_map(sums)
    size = min(value_map.left.shape) if path.after_weight is None else path.d_model
    if size > DENSE_DC:
        return _dc_krylov(operator, sums)
    if path.after_weight is None:
        values = skip + factor * _eigenvalues(path, value_map.core, sums)
        if path.has_idle_features:
            values = torch.cat([values, values.new_full((1,), skip)])
        return _all_known(values, idle=path.d_model - path.channels if path.has_idle_features else 0)
    eye = torch.eye(path.d_model, dtype=path.w_v.dtype, device=path.w_v.device)
    matrix = path.after(skip * eye + factor * (value_map.left @ value_map.right).T)
    return _all_known(torch.linalg.eigvals(matrix.double().cpu()))


def _eigenvalues(path, core, sums):  # type: ignore[no-untyped-def]
    """Eigenvalues of H at unit scale; those for softmax are computed once per layer and kept with it."""
    if not bool((sums == 1).all()):
        return torch.linalg.eigvals(core().double().cpu())
    kept = path.__dict__.get("_dc_eigenvalues")
    if kept is None:
        kept = path.__dict__["_dc_eigenvalues"] = torch.linalg.eigvals(core().double().cpu())
    return kept


def _all_known(values: Complex[Tensor, "count"], idle: int = 0, copies: int = 1) -> Radius:
    moduli = values.abs()
    best = values[moduli.argmax()]
    rho = best.abs().item()
    ties = int((moduli >= rho * (1 - TIE)).sum())
    return Radius(
        value=rho,
        eigenvalue=complex(best),
        low=rho,
        high=rho,
        residual=0.0,
        route="dense",
        applications=0,
        converged=True,
        dimension=ties + (idle - 1 if idle and abs(moduli[-1].item() - rho) <= TIE * rho else 0),
        vector=None,
    )
