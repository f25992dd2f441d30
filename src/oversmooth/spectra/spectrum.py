"""Eigenvalues of a value map and of its heads; conditions and defectiveness.

`H = W_V W_O` in the row convention of the paper is the transpose of `W_O W_V` here; the eigenvalues are the same. With
K value channels (`n_kv * d_head`) and width d, the nonzero eigenvalues of the d x d map are those of the K x K matrix
`W_V W_O`, and those of one head those of a `d_head x d_head` matrix. Wide layers go a Krylov route that finds the
extremes only. Everything is computed in float64, or in float32 where asked; never in half precision.
"""

import math

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from oversmooth.models.canonical import AttentionWeights
from oversmooth.results import HeadSpectrum, Missing, Spectrum
from oversmooth.spectra.krylov import Extremes, extremes
from oversmooth.spectra.value_map import HEADS_AT_ONCE, ValueMap

# --- how far an eigenvalue moves when its matrix is perturbed a little, and whether it is defective ---

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


# --- eigenvalues of the value map of an attention layer, each in the smallest matrix that has them ---

DENSE_UP_TO = 2048
"""Largest matrix whose eigenvalues are all computed unless asked: about ten seconds in float64 on one core."""
DENSE_WITHOUT_ASKING = 256
"""Up to this size, all eigenvalues cost no more than the extremes."""


def spectrum(value_map: ValueMap, *, full: bool = False, only_extremes: bool = False) -> Spectrum:
    """Spectrum of a map: every eigenvalue where its core is small or `full` is asked, otherwise certified extremes.

    `only_extremes` counts a core as small up to `DENSE_WITHOUT_ASKING` only.
    """
    is_small = value_map.core_size <= (DENSE_WITHOUT_ASKING if only_extremes else DENSE_UP_TO)
    return _dense_spectrum(value_map) if full or is_small else _krylov_spectrum(value_map)


def _dense_spectrum(value_map: ValueMap) -> Spectrum:
    core = value_map.core
    values = torch.linalg.eigvals(core)
    values = values[values.real.argsort()]
    everything = torch.cat([values, values.new_zeros(1)]) if value_map.has_forced_zeros else values
    dominating = complex(everything[(1 + everything).abs().argmax()])
    condition, is_defective, missing = conditioning(value_map, values, dominating)
    return Spectrum(
        size=value_map.size,
        rho_dc=abs(1 + dominating),
        dominating=(dominating.real, abs(dominating.imag)),
        spectral_radius=values.abs().max().item(),
        min_real=everything.real.min().item(),
        max_real=everything.real.max().item(),
        negative_share=_negative(values, core).sum().item() / value_map.size,
        route="dense",
        residual=None,
        condition=condition,
        is_defective=is_defective,
        eigenvalues=tuple(zip(values.real.tolist(), values.imag.tolist(), strict=True)),
        missing=(Missing(field="residual", reason="every eigenvalue was computed by a direct method"), *missing),
    )


def _krylov_spectrum(value_map: ValueMap) -> Spectrum:
    """Extremes from one Krylov space of the core; every eigenvalue where that does not find them.

    A core of float32 whose residuals are too large (one that is far from normal) is tried again in float64.
    """
    found = _extremes(value_map)
    if found is None and value_map.left.dtype == torch.float32:
        value_map = value_map.in_float64()
        found = _extremes(value_map)
    if found is None:
        return _dense_spectrum(value_map)
    values = (*found.values, *((0j,) if value_map.has_forced_zeros else ()))
    dominating = max(values, key=lambda value: abs(1 + value))
    why = "only the extremes were computed (Krylov route); ask for the full spectrum to have it"
    return Spectrum(
        size=value_map.size,
        rho_dc=abs(1 + dominating),
        dominating=(dominating.real, abs(dominating.imag)),
        spectral_radius=max(abs(value) for value in values),
        min_real=min(value.real for value in values),
        max_real=max(value.real for value in values),
        negative_share=None,
        route="krylov",
        residual=found.residual,
        condition=None,
        is_defective=None,
        eigenvalues=None,
        missing=tuple(
            Missing(field=name, reason=why) for name in ("negative_share", "condition", "is_defective", "eigenvalues")
        ),
    )


def _extremes(value_map: ValueMap) -> Extremes | None:
    # Formed where that costs less than a few hundred products with its factors, each of which reads both.
    is_formed = value_map.core_size <= DENSE_UP_TO
    like = value_map.left
    # A generator of its own: the result depends on no global seed, and no structure of the weights is orthogonal to it.
    start = torch.randn(value_map.core_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(like)
    # Residuals are those of the factors: they show what rounding did to the core as well.
    product = value_map.core.__matmul__ if is_formed else value_map.core_product
    return extremes(product, start, check=value_map.core_product)


def head_cores(weights: AttentionWeights, dtype: torch.dtype) -> Float[Tensor, "head core core"]:
    """Per head the `d_head x d_head` matrix `W_V^h W_O^h`, which has the nonzero eigenvalues of the head's own map.

    Where heads are wider than the model, the map itself: it is the smaller one then.
    """
    if weights.latent is not None and weights.d_head <= weights.d_model:
        return _head_cores_from_latent(weights, weights.latent.w.to(dtype))
    group = weights.n_heads // weights.n_kv
    down = None if weights.latent is None else weights.latent.w.to(dtype)
    cores = []
    for kv, w_v in enumerate(weights.w_v):  # one at a time: all heads in float64 would be the largest thing in memory
        w_v = w_v.to(dtype) if down is None else w_v.to(dtype) @ down
        w_o = weights.w_o[:, kv * group : (kv + 1) * group].to(dtype)
        if weights.d_head <= weights.d_model:
            cores.append((w_v @ w_o.flatten(1)).unflatten(1, (group, weights.d_head)).transpose(0, 1))
        else:
            cores.append(w_o.transpose(0, 1) @ w_v)
    return torch.cat(cores)


def _head_cores_from_latent(
    weights: AttentionWeights, down: Float[Tensor, "latent d_model"]
) -> Float[Tensor, "head d_head d_head"]:
    """`W_U^h (W_D W_O^h)`: what a head writes is brought into the latent first, which is the narrow end."""
    w_v = weights.w_v.repeat_interleave(weights.n_heads // weights.n_kv, 0)
    cores = []
    for output, up in zip(weights.w_o.split(HEADS_AT_ONCE, 1), w_v.split(HEADS_AT_ONCE), strict=True):
        read = (down @ output.flatten(1).to(down.dtype)).unflatten(1, output.shape[1:])
        cores.append(up.to(down.dtype) @ read.transpose(0, 1))
    return torch.cat(cores)


def head_spectra(weights: AttentionWeights, dtype: torch.dtype) -> tuple[HeadSpectrum, ...]:
    """The eigenvalues of every head's own map."""
    cores = head_cores(weights, dtype)
    values = torch.linalg.eigvals(cores)
    values = values.gather(1, values.real.argsort(1))
    negative_share = _negative(values, cores).double().mean(1).tolist()
    radius, rho = values.abs().amax(1).tolist(), (1 + values).abs().amax(1)
    if weights.d_head < weights.d_model:  # the head's map has eigenvalues of exactly zero as well
        rho = rho.clamp(min=1.0)
    real, imaginary, rho = values.real.tolist(), values.imag.tolist(), rho.tolist()
    return tuple(
        HeadSpectrum(
            head=head,
            kv_head=head * weights.n_kv // weights.n_heads,
            rho_dc=rho[head],
            spectral_radius=radius[head],
            min_real=real[head][0],
            max_real=real[head][-1],
            negative_share=negative_share[head],
            eigenvalues=tuple(zip(real[head], imaginary[head], strict=True)),
        )
        for head in range(weights.n_heads)
    )


def _negative(values: Complex[Tensor, "... core"], core: Float[Tensor, "... core core"]) -> Bool[Tensor, "... core"]:
    """Which eigenvalues have a negative real part, beyond the rounding error of an eigenvalue that is zero."""
    rounding = core.shape[-1] * torch.finfo(core.dtype).eps * torch.linalg.matrix_norm(core)
    return values.real < -rounding[..., None]
