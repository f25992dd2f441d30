"""How far an eigenvalue moves when its matrix is perturbed a little, and whether it is defective."""

import math

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from oversmooth.results import Missing
from oversmooth.spectra.value_map import ValueMap

DEFECTIVE_CONDITION = 1e5
"""Smallest condition of an eigenvalue that can count as defective; simple ones of real layers stay below 1e4."""
LARGEST_BLOCK = 4
"""Largest Jordan block whose circle of eigenvalues is looked for; larger circles look like any other spectrum."""
MOST_SUSPECTS = 8
"""Most circles that are looked into, the tightest first."""

# Splitting. In floating point a Jordan block of order k shows up as k eigenvalues on a circle of radius about
# `norm * epsilon^(1/k)`, each with a condition number of about `epsilon^(1/k - 1)`: closing the gap between two of
# them takes a perturbation of `gap / (2 condition)`, which is rounding. A repeated eigenvalue that is not defective
# splits by `norm * epsilon` only, with modest condition. So circles are looked for first, which needs no eigenvectors,
# and where there is one the conditions decide.


def eigenvalue_condition(
    matrix: Float[Tensor, "size size"], value: complex | float | Complex[Tensor, ""], multiplicity: int = 1
) -> float | None:
    """Condition number `1 / |y^H x|` of an eigenvalue, y and x its left and right unit vectors; 1 is best.

    Of a repeated one: the norm of its spectral projector. `None` when it is not finite: the eigenvalue is defective.
    """
    vectors = _eigenvectors(matrix, complex(value), multiplicity)
    return None if vectors is None else _projector_norm(*vectors)


def conditioning(
    value_map: ValueMap, values: Complex[Tensor, " core"], dominating: complex
) -> tuple[float | None, bool | None, tuple[Missing, ...]]:
    """Condition of the dominating eigenvalue of the map itself, and whether the map is defective; with reasons."""
    core, missing = value_map.core, []
    scale = _spectral_norm(core)
    if value_map.has_forced_zeros and abs(dominating) <= _tight(core, scale):
        condition = _zero_condition(value_map)
    elif (vectors := _vectors_unless_defective(core, values, dominating, scale)) is None:
        condition = None
    elif value_map.has_forced_zeros:  # from eigenvectors of R L to those of L R
        right, left = vectors
        condition = _projector_norm(_product(value_map.left, right), _product(value_map.right.T, left))
    else:
        condition = _projector_norm(*vectors)
    if condition is None:
        reason = "the dominating eigenvalue is defective to working precision: its condition number is not finite"
        missing.append(Missing(field="condition", reason=reason))
    is_defective: bool | None = None
    if core.dtype == torch.float64:
        is_defective = condition is None or _is_defective(value_map, values, scale)
    else:
        missing.append(Missing(field="is_defective", reason="float32 is too coarse to tell; compute in float64"))
    return condition, is_defective, tuple(missing)


def _is_defective(value_map: ValueMap, values: Complex[Tensor, " core"], scale: float) -> bool:
    """Whether the map has a Jordan block of order up to `LARGEST_BLOCK` (note "Splitting")."""
    if scale == 0.0 and not value_map.has_forced_zeros:
        return False
    epsilon = torch.finfo(value_map.core.dtype).eps
    radii = [2 * scale * (30 * epsilon) ** (1 / order) for order in range(2, LARGEST_BLOCK + 1)]
    if value_map.has_forced_zeros:  # there the map decides, not the core
        if values.abs().min().item() <= radii[0] and _zero_condition(value_map) is None:
            return True
        values = values[values.abs() > radii[0]]
    if len(values) < 2:
        return False
    points = torch.view_as_real(values)
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")  # the other mode cancels
    nearest = distances.topk(min(LARGEST_BLOCK, len(values)), largest=False).values[:, 1:]
    tightness = (nearest / nearest.new_tensor(radii[: nearest.shape[1]])).amin(1)
    suspects = values[tightness.argsort()][: int((tightness <= 1).sum())]
    suspects = suspects[suspects.imag >= 0]  # one of each conjugate pair
    for _ in range(MOST_SUSPECTS):
        if not len(suspects):
            break
        if _vectors_unless_defective(value_map.core, values, complex(suspects[0]), scale) is None:
            return True
        suspects = suspects[(suspects - suspects[0]).abs() > radii[-1]]
    return False


def _vectors_unless_defective(
    matrix: Tensor, values: Complex[Tensor, " other"], value: complex, scale: float
) -> tuple[Tensor, Tensor] | None:
    """Right and left eigenvectors of one of the eigenvalues; `None` where it belongs to a Jordan block."""
    epsilon = torch.finfo(matrix.dtype).eps
    distances = (values - value).abs()
    is_same = distances <= _tight(matrix, scale)
    vectors = _eigenvectors(matrix, value, int(is_same.sum()))
    condition = None if vectors is None else _projector_norm(*vectors)
    if condition is None:
        return None
    gap = distances[~is_same].min().item() if not is_same.all() else math.inf
    rounding = 10 * len(matrix) * epsilon * scale
    return None if condition > DEFECTIVE_CONDITION and gap / (2 * condition) <= rounding else vectors


def _product(matrix: Tensor, vectors: Tensor) -> Tensor:
    """A real matrix times real or complex vectors, without a complex copy of the matrix."""
    if not vectors.is_complex():
        return matrix @ vectors
    return torch.complex(matrix @ vectors.real, matrix @ vectors.imag)


def _tight(matrix: Tensor, scale: float) -> float:
    """Computed eigenvalues this close are one repeated eigenvalue: between rounding and its square root."""
    return scale * torch.finfo(matrix.dtype).eps ** 0.7


def _eigenvectors(matrix: Tensor, value: complex, multiplicity: int) -> tuple[Tensor, Tensor] | None:
    """Bases of the right and left eigenvectors by inverse iteration, in real arithmetic where the eigenvalue is real.

    `None` where there are fewer eigenvectors than the multiplicity says.
    """
    norm, epsilon = torch.linalg.matrix_norm(matrix).item(), torch.finfo(matrix.dtype).eps
    mu = value if value.imag else value.real
    shifted = matrix.to(torch.promote_types(matrix.dtype, torch.complex64 if value.imag else torch.float32), copy=True)
    start = torch.randn(len(matrix), multiplicity, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    right = left = torch.linalg.qr(start.to(shifted)).Q
    if norm == 0.0:
        return right, left
    # A few epsilons beside the eigenvalue keep the factorisation regular and cost no accuracy in the vectors.
    shifted.diagonal().sub_(mu + 10 * epsilon * norm)
    factors = torch.linalg.lu_factor_ex(shifted)[:2]
    pivots = factors[0].diagonal()
    # Rounding may have swallowed the shift; the smallest pivot that it should have left takes its place.
    pivots[pivots == 0] = epsilon * norm
    for _ in range(2):
        right = torch.linalg.qr(torch.linalg.lu_solve(*factors, right)).Q
        left = torch.linalg.qr(torch.linalg.lu_solve(*factors, left, adjoint=True)).Q
    residual = torch.linalg.matrix_norm(_product(matrix, right) - mu * right).item()
    return (right, left) if residual <= math.sqrt(epsilon) * norm else None


def _projector_norm(right: Tensor, left: Tensor) -> float | None:
    """Norm of the projector on the span of `right` along the complement of `left`; `None` beyond 1 / sqrt(epsilon)."""
    overlap = torch.linalg.svdvals(torch.linalg.qr(left).Q.mH @ torch.linalg.qr(right).Q)[-1].item()
    # A cosine exceeds one only by rounding.
    return max(1.0 / overlap, 1.0) if overlap > math.sqrt(torch.finfo(right.dtype).eps) else None


def _zero_condition(value_map: ValueMap) -> float | None:
    """Condition of the eigenvalue zero that a low-rank map has: how far its range stays from its kernel.

    `None` where they meet: zero is defective then, even if the core is not (`e_1 e_2^T` has the core 0).
    """
    q_left, r_left = torch.linalg.qr(value_map.left)
    q_right, r_right = torch.linalg.qr(value_map.right.T)
    u, sizes, vh = torch.linalg.svd(r_left @ r_right.T)
    rank = int((sizes > value_map.size * torch.finfo(sizes.dtype).eps * sizes[0]).sum()) if sizes[0] else 0
    return _projector_norm(q_left @ u[:, :rank], q_right @ vh[:rank].T) if rank else 1.0


def _spectral_norm(matrix: Float[Tensor, "size size"]) -> float:
    """Largest singular value to a few per cent, by power iteration."""
    x = torch.randn(len(matrix), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(matrix)
    for _ in range(20):
        x = matrix.T @ (matrix @ (x / x.norm().clamp(min=torch.finfo(matrix.dtype).tiny)))
    return x.norm().sqrt().item()
