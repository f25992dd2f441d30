"""What chance gives: a value map next to maps of the same singular values and random orientation.

`rho_dc` grows with the size of the value path, whichever way it points: it lies above 1 in random layers too. So a number of
the weights stands beside its null, the maps `Q H` with Q a random orthogonal matrix of the model's width. `excess` is
`log(rho_dc / rho_dc of the null)`; `positivity` is `sum Re(lambda) / sum |lambda|`, 0 under the null, +1 for a map that only
smooths, -1 for one that only sharpens. Both say what the weights prefer, not what the features do.

By the single ring theorem the eigenvalues of `Q H` fill a disc of radius `r = norm(H) / sqrt(d)` (Frobenius): `rho_dc` is
about `1 + r`. Where H has a low stable rank this is too coarse, and rotations are drawn instead.
"""

import math

import torch

from oversmooth.results.inspection import Null, Spectrum
from oversmooth.spectra.value_map import ValueMap

STABLE_RANK = 6.0
"""Of H: above it the closed form lies within the spread of sampled rotations on the pretrained models that were compared."""
ROTATIONS = 4
SAMPLED_UP_TO = 1024
"""Largest core whose null is sampled: each rotation is one more eigenvalue problem of that size."""
SAMPLED_WITHOUT_ASKING = 256
"""The same where only extremes were asked for: up to here all eigenvalues cost no more than these."""
PROBES = 64
"""Random vectors by which the norm of a wide map is known to about two per cent."""
POWER_STEPS = 16


def null_of(value_map: ValueMap, spectrum: Spectrum, norm: float | None, *, seed: int) -> Null:
    """Excess and positivity of a plain map, each with the spread that chance gives.

    Without `norm(H)` only the extremes of the spectrum were asked for, and nothing may cost more than they did.
    """
    assert value_map.extra is None, "asked for a plain map, whose factors are all there is"
    is_rim_only = norm is None
    norm = _estimated_norm(value_map, seed) if norm is None else norm
    if norm == 0.0 or spectrum.rho_dc == 0.0:
        why = "H is zero" if norm == 0.0 else "rho_dc is 0"
        return Null(why_no_excess=why, why_no_positivity=why)
    positivity, spread, why = _positivity(value_map, spectrum, norm)
    radius = norm / math.sqrt(value_map.size)
    expected, error, how = math.log1p(radius), radius / (1 + radius) / math.sqrt(value_map.core_size), "closed form"
    if norm**2 < STABLE_RANK * _largest_singular_value(value_map) ** 2:
        if value_map.core_size > (SAMPLED_WITHOUT_ASKING if is_rim_only else SAMPLED_UP_TO):
            reason = f"H has a stable rank below {STABLE_RANK:g}, and drawing rotations costs more than the spectrum"
            return Null(why_no_excess=reason, positivity=positivity, positivity_spread=spread, why_no_positivity=why)
        expected, error = _sampled(value_map, seed)
        how = f"{ROTATIONS} rotations"
    return Null(
        rho_dc=math.exp(expected),
        excess=math.log(spectrum.rho_dc) - expected,
        excess_spread=error,
        how=how,
        positivity=positivity,
        positivity_spread=spread,
        why_no_positivity=why,
    )


def _positivity(value_map: ValueMap, spectrum: Spectrum, norm: float) -> tuple[float | None, float | None, str]:
    """With its standard deviation under the null, where `E[tr(Q H)^2] = norm(H)^2 / d`; or why there is none."""
    if spectrum.eigenvalues is None:
        return None, None, "only the extremes of the spectrum are known"
    total = sum(math.hypot(re, im) for re, im in spectrum.eigenvalues)
    if total == 0.0:
        return None, None, "all eigenvalues are 0"
    return sum(re for re, _ in spectrum.eigenvalues) / total, norm / math.sqrt(value_map.size) / total, ""


def _estimated_norm(value_map: ValueMap, seed: int) -> float:
    """`norm(H)`, Frobenius, from what H does to random vectors: `E |H x|^2 = norm(H)^2`."""
    drawn = torch.randn(value_map.size, PROBES, generator=torch.Generator().manual_seed(seed))
    return math.sqrt(value_map.apply(drawn.to(value_map.left)).square().sum().item() / PROBES)


def _largest_singular_value(value_map: ValueMap) -> float:
    """By power iteration, so a little too small."""
    left, right = value_map.left, value_map.right
    x = torch.randn(value_map.size, 1, generator=torch.Generator().manual_seed(0)).to(left)
    for _ in range(POWER_STEPS):
        x = right.T @ (left.T @ (left @ (right @ (x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)))))
    return math.sqrt(x.norm().item())


def _sampled(value_map: ValueMap, seed: int) -> tuple[float, float]:
    """Mean and standard deviation of `log rho_dc` over random rotations.

    `Q W_O = F B` with F a random orthonormal frame and B the singular values and right vectors of `W_O`: no rotation of the
    model's width is formed, and what `W_O` never writes, which LAPACK would stumble over, is left out.
    """
    generator = torch.Generator().manual_seed(seed)
    _, sizes, vectors = torch.linalg.svd(value_map.left.double().cpu(), full_matrices=False)
    rank = int((sizes > value_map.size * torch.finfo(torch.float64).eps * sizes[0]).sum())
    read = (sizes[:rank, None] * vectors[:rank]) @ value_map.right.double().cpu()
    found = []
    for _ in range(ROTATIONS):
        frame, r = torch.linalg.qr(torch.randn(value_map.size, rank, dtype=torch.float64, generator=generator))
        core = read @ (frame * r.diagonal().sign())  # without the signs the frame is not uniform
        # Below full rank some eigenvalues of the map are exactly 0: rho_dc is at least 1.
        found.append(math.log(max((1 + torch.linalg.eigvals(core)).abs().max().item(), 1.0)))
    values = torch.tensor(found, dtype=torch.float64)
    return values.mean().item(), values.std().item()
