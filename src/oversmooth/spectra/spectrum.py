"""Eigenvalues of the value map of an attention layer, each in the smallest matrix that has them.

`H = W_V W_O` in the row convention of the paper is the transpose of `W_O W_V` here; the eigenvalues are the same. With
K value channels (`n_kv * d_head`) and width d, the nonzero eigenvalues of the d x d map are those of the K x K matrix
`W_V W_O`, and those of one head those of a `d_head x d_head` matrix. Wide layers go a Krylov route that finds the
extremes only. Everything is computed in float64, or in float32 where asked; never in half precision.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from oversmooth.models.canonical import AttentionWeights, summed_over_groups
from oversmooth.results import HeadSpectrum, Missing, Spectrum

DENSE_UP_TO = 2048
"""Largest matrix whose eigenvalues are all computed unless asked: about ten seconds in float64 on one core."""
KRYLOV_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
KRYLOV_WANTED = 4
"""Extreme eigenvalues sought per search: more than the one reported, so that a close rival is not missed."""
KRYLOV_SIZE = 40
"""Basis vectors kept between restarts."""
KRYLOV_RESTARTS = 300
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


@dataclass(frozen=True, kw_only=True)
class ValueMap:
    """The map M that a layer adds to what all tokens share, `x -> x + M x`, as a product `left @ right` plus `extra`.

    `extra` is present only for post-norm layers with the norm folded in, where M is not of low rank.
    """

    left: Float[Tensor, "d_model channel"]
    right: Float[Tensor, "channel d_model"]
    extra: Callable[[Float[Tensor, "d_model column"]], Float[Tensor, "d_model column"]] | None = None

    @property
    def size(self) -> int:
        return self.left.shape[0]

    @property
    def has_forced_zeros(self) -> bool:
        """Whether there are fewer channels than the width, so that some eigenvalues are exactly zero."""
        return self.extra is None and self.left.shape[1] < self.size

    @property
    def core_size(self) -> int:
        return self.left.shape[1] if self.has_forced_zeros else self.size

    def apply(self, x: Float[Tensor, "d_model column"]) -> Float[Tensor, "d_model column"]:
        product = self.left @ (self.right @ x)
        return product if self.extra is None else self.extra(x + product) - x

    @cached_property
    def core(self) -> Float[Tensor, "core core"]:
        """The smallest matrix with the same nonzero eigenvalues."""
        if self.has_forced_zeros:
            return self.right @ self.left
        product = self.left @ self.right
        if self.extra is None:
            return product
        eye = torch.eye(self.size, dtype=self.left.dtype, device=self.left.device)
        return self.extra(eye + product) - eye


def plain_map(weights: AttentionWeights, dtype: torch.dtype) -> ValueMap:
    """`M = W_O W_V`, with the output weights of heads that share values summed."""
    return ValueMap(
        left=summed_over_groups(weights.w_o, weights.n_kv, dtype).flatten(1), right=weights.w_v.to(dtype).flatten(0, 1)
    )


def folded_map(
    weights: AttentionWeights, dtype: torch.dtype, plain: ValueMap | None = None
) -> tuple[ValueMap, str] | None:
    """The map with the attention sub-block's own norm weights and gain folded in, at unit token scale, and in words.

    In the row convention: pre-norm and parallel `C G H g`, post-norm `(I + H g) C G - I`, a norm on the branch
    `... H C' G' g`; G is the norm's weight, C the centring of a LayerNorm, g the branch gain. `None` without norms.
    A `plain` map that is already there is taken instead of building it again.
    """
    before = weights.norms.get("attn_norm")
    branch = weights.norms.get("attn_branch_norm")
    if before is None and branch is None and weights.gain is None:
        return None
    plain = plain or plain_map(weights, dtype)
    left, right, words = plain.left, plain.right, []
    if before is not None and weights.residual != "post":
        right = right * before.weight.to(dtype)
        right = right - right.mean(1, keepdim=True) if before.kind == "layer" else right
        words.append("norm before attention")
    if branch is not None:
        left = left - left.mean(0) if branch.kind == "layer" else left
        left = branch.weight.to(dtype)[:, None] * left
        words.append("norm on the branch")
    if weights.gain is not None:
        left = weights.gain.to(dtype)[:, None] * left
        words.append("branch gain")
    if before is None or weights.residual != "post":
        return ValueMap(left=left, right=right), ", ".join(words)
    weight, is_centred = before.weight.to(dtype)[:, None], before.kind == "layer"

    def norm_after(x: Float[Tensor, "d_model column"]) -> Float[Tensor, "d_model column"]:
        return weight * (x - x.mean(0) if is_centred else x)

    return ValueMap(left=left, right=right, extra=norm_after), ", ".join([*words, "norm after the sum"])


# --- spectra --------------------------------------------------------------------------------------------------------


def spectrum(value_map: ValueMap, *, full: bool = False) -> Spectrum:
    """Spectrum of a map: every eigenvalue where its core is small or `full` is asked, otherwise certified extremes."""
    is_small = value_map.core_size <= DENSE_UP_TO or value_map.size <= KRYLOV_SIZE
    return _dense_spectrum(value_map) if full or is_small else _krylov_spectrum(value_map)


def _dense_spectrum(value_map: ValueMap) -> Spectrum:
    core = value_map.core
    values = torch.linalg.eigvals(core)
    values = values[values.real.argsort()]
    everything = torch.cat([values, values.new_zeros(1)]) if value_map.has_forced_zeros else values
    dominating = complex(everything[(1 + everything).abs().argmax()])
    condition, is_defective, missing = _conditioning(value_map, values, dominating)
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
    """Extremes by restarted Arnoldi (ARPACK) on the factored map; every eigenvalue where that does not converge."""
    from scipy.sparse.linalg import ArpackError

    try:
        searches = (("LM", 1.0), ("LM", 0.0), ("LR", 0.0), ("SR", 0.0))
        found = [pair for which, shift in searches for pair in _extremes(value_map, which, shift)]
    except ArpackError:
        return _dense_spectrum(value_map)
    if value_map.has_forced_zeros:
        found.append((0j, 0.0))
    # One search may meet a better candidate for another: each extreme is taken among everything that was found.
    dominating, largest = max(found, key=lambda pair: abs(1 + pair[0])), max(found, key=lambda pair: abs(pair[0]))
    leftmost, rightmost = min(found, key=lambda pair: pair[0].real), max(found, key=lambda pair: pair[0].real)
    why = "only the extremes were computed (Krylov route); ask for the full spectrum to have it"
    return Spectrum(
        size=value_map.size,
        rho_dc=abs(1 + dominating[0]),
        dominating=(dominating[0].real, abs(dominating[0].imag)),
        spectral_radius=abs(largest[0]),
        min_real=leftmost[0].real,
        max_real=rightmost[0].real,
        negative_share=None,
        route="krylov",
        residual=max(residual for _, residual in (dominating, largest, leftmost, rightmost)),
        condition=None,
        is_defective=None,
        eigenvalues=None,
        missing=tuple(
            Missing(field=name, reason=why) for name in ("negative_share", "condition", "is_defective", "eigenvalues")
        ),
    )


def _extremes(value_map: ValueMap, which: str, shift: float) -> list[tuple[complex, float]]:
    """Extreme eigenvalues, each with its residual; `LM`: modulus of `shift + lambda`, `LR`, `SR`: real part."""
    from scipy.sparse.linalg import LinearOperator, eigs

    size, dtype, device = value_map.size, value_map.left.dtype, value_map.left.device

    def product(vector):  # type: ignore[no-untyped-def]  # numpy in, numpy out, as scipy calls it
        x = torch.from_numpy(vector).to(device=device, dtype=dtype).reshape(size, 1)
        return (value_map.apply(x) + shift * x).flatten().cpu().numpy()

    # A generator of its own: the result depends on no global seed, and no structure of the weights is orthogonal to it.
    start = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=dtype).numpy()
    values, vectors = eigs(
        LinearOperator((size, size), matvec=product, dtype=start.dtype),
        k=KRYLOV_WANTED,
        which=which,
        ncv=KRYLOV_SIZE,
        v0=start,
        tol=KRYLOV_TOLERANCE[dtype],
        maxiter=KRYLOV_RESTARTS,
    )
    x = torch.from_numpy(vectors)
    image = torch.complex(*(value_map.apply(part.to(device, dtype)).cpu() for part in (x.real, x.imag)))
    mu = torch.from_numpy(values)
    error = torch.linalg.vector_norm(image + shift * x - mu * x, dim=0) / torch.linalg.vector_norm(x, dim=0)
    residual = error / mu.abs().clamp(min=torch.finfo(dtype).tiny)
    return [(complex(value) - shift, float(error)) for value, error in zip(values, residual, strict=True)]


def head_cores(weights: AttentionWeights, dtype: torch.dtype) -> Float[Tensor, "head core core"]:
    """Per head the `d_head x d_head` matrix `W_V^h W_O^h`, which has the nonzero eigenvalues of the head's own map.

    Where heads are wider than the model, the map itself: it is the smaller one then.
    """
    group = weights.n_heads // weights.n_kv
    cores = []
    for kv, w_v in enumerate(weights.w_v):  # one at a time: all heads in float64 would be the largest thing in memory
        w_v = w_v.to(dtype)
        w_o = weights.w_o[:, kv * group : (kv + 1) * group].to(dtype)
        if weights.d_head <= weights.d_model:
            cores.append((w_v @ w_o.flatten(1)).unflatten(1, (group, weights.d_head)).transpose(0, 1))
        else:
            cores.append(w_o.transpose(0, 1) @ w_v)
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


# --- size and symmetry ----------------------------------------------------------------------------------------------


def value_norm_and_asymmetry(value_map: ValueMap) -> tuple[float, float | None]:
    """`norm(H)` and `norm(H - H^T) / (2 norm(H))`, Frobenius, for a map without `extra`.

    Of low-rank maps H is not formed: `norm(H - H^T)^2 = 2 norm(H)^2 - 2 tr(H H)`, and the Gram matrices of the factors
    give both. The asymmetry of H = 0 does not exist.
    """
    assert value_map.extra is None, "asked for a plain map, whose factors are all there is"
    left, right, core = value_map.left, value_map.right, value_map.core
    if value_map.has_forced_zeros:
        square = ((left.T @ left) * (right @ right.T)).sum()
        twice_skew = (2 * (square - (core * core.T).sum())).clamp(min=0).sqrt()
        norm = square.clamp(min=0).sqrt().item()
    else:
        norm, twice_skew = torch.linalg.matrix_norm(core).item(), torch.linalg.matrix_norm(core - core.T)
    return (norm, twice_skew.item() / (2 * norm)) if norm else (0.0, None)


def bias_norm(weights: AttentionWeights, dtype: torch.dtype) -> float:
    """Length of `W_O b_V`, which attention adds to every token alike because its rows sum to one."""
    if weights.b_v is None:
        return 0.0
    summed = summed_over_groups(weights.w_o, weights.n_kv, dtype).flatten(1)
    return (summed @ weights.b_v.to(dtype).flatten()).norm().item()


# --- conditioning ---------------------------------------------------------------------------------------------------


def eigenvalue_condition(
    matrix: Float[Tensor, "size size"], value: complex | float | Complex[Tensor, ""], multiplicity: int = 1
) -> float | None:
    """Condition number `1 / |y^H x|` of an eigenvalue, y and x its left and right unit vectors; 1 is best.

    Of a repeated one: the norm of its spectral projector. `None` when it is not finite: the eigenvalue is defective.
    """
    vectors = _eigenvectors(matrix, complex(value), multiplicity)
    return None if vectors is None else _projector_norm(*vectors)


def _conditioning(
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
    factors = torch.linalg.lu_factor(shifted)
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
