"""Eigenvalues of the value map of an attention layer, each in the smallest matrix that has them.

`H = W_V W_O` in the row convention of the paper is the transpose of `W_O W_V` here; the eigenvalues are the same. With
K value channels (`n_kv * d_head`) and width d, the nonzero eigenvalues of the d x d map are those of the K x K matrix
`W_V W_O`, and those of one head those of a `d_head x d_head` matrix. Wide layers go a Krylov route that finds the
extremes only. Everything is computed in float64, or in float32 where asked; never in half precision.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from oversmooth.models.architecture import AttentionWeights
from oversmooth.results import HeadSpectrum, Missing, Spectrum

DENSE_UP_TO = 2048
"""Largest matrix whose eigenvalues are all computed unless asked: about ten seconds in float64 on two cores."""
CLUSTER = 1e-5
"""Computed eigenvalues closer than this, relative to the norm, may belong to one defective eigenvalue."""
DEFECTIVE_CONDITION = 1e7
"""Condition of an eigenvalue, in float64, above which the matrix counts as not diagonalizable: 1 / sqrt(epsilon)."""
KRYLOV_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
KRYLOV_SIZE = 32
"""Basis vectors kept between restarts."""


@dataclass(frozen=True, slots=True, kw_only=True)
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

    def apply(self, x: Float[Tensor, "d_model column"]) -> Float[Tensor, "d_model column"]:
        product = self.left @ (self.right @ x)
        return product if self.extra is None else self.extra(x + product) - x

    def core(self) -> Float[Tensor, "core core"]:
        """The smallest matrix with the same nonzero eigenvalues."""
        if self.extra is None and self.left.shape[1] < self.size:
            return self.right @ self.left
        if self.extra is None:
            return self.left @ self.right
        eye = torch.eye(self.size, dtype=self.left.dtype, device=self.left.device)
        return self.extra(eye + self.left @ self.right) - eye


def plain_map(weights: AttentionWeights, dtype: torch.dtype) -> ValueMap:
    """`M = W_O W_V`, with the output weights of heads that share values summed."""
    return ValueMap(left=weights.w_o_shared.to(dtype).flatten(1), right=weights.w_v.to(dtype).flatten(0, 1))


def folded_map(weights: AttentionWeights, dtype: torch.dtype) -> tuple[ValueMap, str] | None:
    """The map with the attention sub-block's own norm weights and gain folded in, at unit token scale, and in words.

    In the row convention: pre-norm and parallel `C G H g`, post-norm `(I + H g) C G - I`, a norm on the branch
    `... H C' G' g`; G is the norm's weight, C the centring of a LayerNorm, g the branch gain. `None` without norms.
    """
    before = weights.norms.get("attn_norm")
    branch = weights.norms.get("attn_branch_norm")
    if before is None and branch is None and weights.gain is None:
        return None
    plain = plain_map(weights, dtype)
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
    core_size = value_map.size if value_map.extra else min(value_map.left.shape)
    if full or core_size <= DENSE_UP_TO:
        return _dense_spectrum(value_map)
    return _krylov_spectrum(value_map)


def _dense_spectrum(value_map: ValueMap) -> Spectrum:
    core = value_map.core()
    values = torch.linalg.eigvals(core)
    forced_zeros = value_map.size - len(values)
    everything = torch.cat([values, values.new_zeros(1)]) if forced_zeros else values
    dominating = everything[(1 + everything).abs().argmax()]
    condition = eigenvalue_condition(core, values[(values - dominating).abs().argmin()])
    is_defective = condition is None or has_defective_cluster(core, values)
    order = values.real.argsort()
    missing = ()
    if condition is None:
        reason = "the dominating eigenvalue is defective: its condition number is not finite"
        missing = (Missing(field="condition", reason=reason),)
    return Spectrum(
        size=value_map.size,
        rho_dc=(1 + dominating).abs().item(),
        dominating=_pair(dominating),
        spectral_radius=values.abs().max().item(),
        min_real=everything.real.min().item(),
        max_real=everything.real.max().item(),
        negative_share=(values.real < 0).sum().item() / value_map.size,
        route="dense",
        residual=None,
        condition=condition,
        is_defective=is_defective,
        eigenvalues=tuple(_pair(value) for value in values[order]),
        missing=(Missing(field="residual", reason="every eigenvalue was computed by a direct method"), *missing),
    )


def _krylov_spectrum(value_map: ValueMap) -> Spectrum:
    """Extremes by restarted Arnoldi (ARPACK) on the factored map; at most a few hundred products with it."""
    dominating, worst = _extreme(value_map, "LM", shift=1.0)
    rightmost, residual = _extreme(value_map, "LR")
    worst = max(worst, residual)
    leftmost, residual = _extreme(value_map, "SR")
    worst = max(worst, residual)
    largest, residual = _extreme(value_map, "LM")
    worst = max(worst, residual)
    # Fewer channels than the width force eigenvalues of exactly zero, which can be the extreme ones.
    has_zeros = value_map.extra is None and value_map.left.shape[1] < value_map.size
    if has_zeros and abs(1 + dominating) < 1:
        dominating = 0j
    why = "only the extremes were computed (Krylov route); ask for the full spectrum to have it"
    return Spectrum(
        size=value_map.size,
        rho_dc=abs(1 + dominating),
        dominating=(dominating.real, dominating.imag),
        spectral_radius=abs(largest),
        min_real=min(leftmost.real, 0.0) if has_zeros else leftmost.real,
        max_real=max(rightmost.real, 0.0) if has_zeros else rightmost.real,
        negative_share=None,
        route="krylov",
        residual=worst,
        condition=None,
        is_defective=None,
        eigenvalues=None,
        missing=tuple(
            Missing(field=name, reason=why) for name in ("negative_share", "condition", "is_defective", "eigenvalues")
        ),
    )


def _extreme(value_map: ValueMap, which: str, shift: float = 0.0) -> tuple[complex, float]:
    """One extreme eigenvalue by ARPACK and its residual; `LM`: modulus of `shift + lambda`, `LR`, `SR`: real part."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs

    size, dtype = value_map.size, value_map.left.dtype
    device = value_map.left.device

    def product(vector):  # type: ignore[no-untyped-def]  # numpy in, numpy out, as scipy calls it
        x = torch.from_numpy(vector).to(device=device, dtype=dtype).reshape(size, 1)
        return (value_map.apply(x) + shift * x).flatten().cpu().numpy()

    operator = LinearOperator((size, size), matvec=product, dtype=str(dtype).removeprefix("torch."))
    start = torch.ones(size, dtype=dtype).numpy()  # fixed, so that the result does not depend on a global seed
    start[::2] = -0.5
    try:
        values, vectors = eigs(
            operator, k=2, which=which, ncv=KRYLOV_SIZE, v0=start, tol=KRYLOV_TOLERANCE[dtype], maxiter=300
        )
    except ArpackNoConvergence as error:
        values, vectors = error.eigenvalues, error.eigenvectors
        if not len(values):
            return _extreme_dense(value_map, which, shift)
    key = {"LM": abs, "LR": lambda value: value.real, "SR": lambda value: -value.real}[which]
    best = max(range(len(values)), key=lambda k: key(values[k]))
    value, vector = complex(values[best]), torch.from_numpy(vectors[:, best])
    parts = torch.stack([vector.real, vector.imag], 1).to(device=device, dtype=dtype)
    image = value_map.apply(parts) + shift * parts
    error = torch.complex(image[:, 0], image[:, 1]).cpu() - value * vector
    scale = max(abs(value), torch.finfo(dtype).tiny)
    return value - shift, float(error.norm() / vector.norm()) / scale


def _extreme_dense(value_map: ValueMap, which: str, shift: float) -> tuple[complex, float]:
    """The same from all eigenvalues, where Krylov does not converge: slow, but never a wrong number."""
    values = torch.linalg.eigvals(value_map.core()) + shift
    key = {"LM": values.abs(), "LR": values.real, "SR": -values.real}[which]
    return complex(values[key.argmax()]) - shift, 0.0


def head_cores(weights: AttentionWeights, dtype: torch.dtype) -> Float[Tensor, "head d_head d_head"]:
    """Per head the `d_head x d_head` matrix `W_V^h W_O^h`, which has the nonzero eigenvalues of the head's own map."""
    w_v = weights.w_v.to(dtype).repeat_interleave(weights.n_heads // weights.n_kv, 0)
    return w_v @ weights.w_o.to(dtype).transpose(0, 1)


def head_spectra(weights: AttentionWeights, dtype: torch.dtype) -> tuple[HeadSpectrum, ...]:
    """The eigenvalues of every head's own map."""
    values = torch.linalg.eigvals(head_cores(weights, dtype))
    group = weights.n_heads // weights.n_kv
    has_zeros = weights.d_head < weights.d_model
    return tuple(_head_spectrum(head, head // group, values[head], has_zeros) for head in range(weights.n_heads))


def _head_spectrum(head: int, kv_head: int, values: Complex[Tensor, "d_head"], has_zeros: bool) -> HeadSpectrum:
    ordered = values[values.real.argsort()]
    rho = (1 + values).abs().max().item()
    return HeadSpectrum(
        head=head,
        kv_head=kv_head,
        rho_dc=max(rho, 1.0) if has_zeros else rho,
        spectral_radius=values.abs().max().item(),
        min_real=ordered.real[0].item(),
        max_real=ordered.real[-1].item(),
        negative_share=(values.real < 0).double().mean().item(),
        eigenvalues=tuple(_pair(value) for value in ordered),
    )


def _pair(value: Complex[Tensor, ""]) -> tuple[float, float]:
    return value.real.item(), value.imag.item()


# --- size, symmetry, conditioning -----------------------------------------------------------------------------------


def value_norm_and_asymmetry(value_map: ValueMap) -> tuple[float, float | None]:
    """`norm(H)` and `norm(H - H^T) / (2 norm(H))`, Frobenius, without forming H: its factors' Gram matrices suffice.

    `norm(H - H^T)^2 = 2 norm(H)^2 - 2 tr(H H)`. The asymmetry of H = 0 does not exist.
    """
    left, right = value_map.left, value_map.right
    if left.shape[1] < left.shape[0]:
        core = right @ left
        square = ((left.T @ left) * (right @ right.T)).sum()
        trace = (core * core.T).sum()
    else:
        product = left @ right
        square, trace = product.square().sum(), (product * product.T).sum()
    norm = square.clamp(min=0).sqrt().item()
    if norm == 0.0:
        return 0.0, None
    return norm, ((2 * (square - trace)).clamp(min=0).sqrt() / (2 * norm)).item()


def bias_norm(weights: AttentionWeights, dtype: torch.dtype) -> float:
    """Length of `W_O b_V`, which attention adds to every token alike because its rows sum to one."""
    if weights.b_v is None:
        return 0.0
    return (weights.w_o_shared.to(dtype).flatten(1) @ weights.b_v.to(dtype).flatten()).norm().item()


def eigenvalue_condition(matrix: Float[Tensor, "size size"], value: Complex[Tensor, ""]) -> float | None:
    """Condition number `1 / |y^H x|` of an eigenvalue, y and x its left and right unit vectors; 1 is best.

    Two steps of inverse iteration with one factorisation. `None` when it is not finite: the eigenvalue is defective.
    """
    size = matrix.shape[0]
    if size == 1:
        return 1.0
    norm = torch.linalg.matrix_norm(matrix).item()
    if norm == 0.0:
        return 1.0
    epsilon = torch.finfo(matrix.dtype).eps
    eye = torch.eye(size, dtype=value.dtype, device=matrix.device)
    # A shift of a few epsilons keeps the factorisation regular and costs no accuracy in the vectors.
    factors = torch.linalg.lu_factor(matrix.to(value.dtype) - (value + 10 * epsilon * norm) * eye)
    start = torch.linspace(1.0, 2.0, size, dtype=matrix.dtype, device=matrix.device).to(value.dtype)[:, None]
    right, left = start, start
    for _ in range(2):
        right = torch.linalg.lu_solve(*factors, right)
        left = torch.linalg.lu_solve(*factors, left, adjoint=True)
        right, left = right / right.norm(), left / left.norm()
    cosine = (left.conj() * right).sum().abs().item()
    is_finite = math.isfinite(cosine) and cosine > 1.0 / DEFECTIVE_CONDITION
    return 1.0 / cosine if is_finite else None


def has_defective_cluster(matrix: Float[Tensor, "size size"], values: Complex[Tensor, "size"]) -> bool:
    """Whether nearly equal eigenvalues share too few eigenvectors, so that the matrix is not diagonalizable.

    A defective eigenvalue always splits into a cluster of computed ones, so where all are well apart no eigenvector is
    needed; otherwise the condition of every eigenvalue in a cluster decides.
    """
    scale = torch.linalg.matrix_norm(matrix).item()
    if scale == 0.0 or len(values) < 2:
        return False
    order = values.real.argsort()
    sorted_values = values[order]
    gaps = torch.full(values.shape, math.inf, dtype=matrix.dtype)
    for step in range(1, min(4, len(values))):  # conjugate pairs interleave equal real parts
        distance = (sorted_values[step:] - sorted_values[:-step]).abs()
        gaps[step:] = torch.minimum(gaps[step:], distance)
        gaps[:-step] = torch.minimum(gaps[:-step], distance)
    if not bool((gaps < CLUSTER * scale).any()):
        return False
    vectors = torch.linalg.eig(matrix).eigenvectors
    smallest = torch.linalg.svdvals(vectors)[-1].item()
    return smallest < 1.0 / DEFECTIVE_CONDITION
