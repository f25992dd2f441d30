"""The Krylov solver: the extremes of a spectrum, and dominating eigenvalues.

The extremes that a spectrum is described by (largest `|1 + lambda|`, largest `|lambda|`, leftmost, rightmost) all lie on
the rim of the spectrum, and a Krylov space knows the rim first, whatever the shift. So one space serves all of them, and
it is never restarted: a few hundred vectors of the size of a layer's core take less memory than the core itself, and
every restart would forget what the other extremes need.

    grow      w = B v_j, orthogonalised twice against v_1..v_j, appended
    look      Ritz values theta with vectors y; residual |h_{m+1,m} y_m|; seldom, because it costs as much as many vectors
    certify   x = V y and norm(B x - theta x) / radius, computed anew in float64 for every eigenvalue that is reported

A map f, a shift c and a factor a stand for the operator `c + a f`; Krylov spaces do not see the shift, so the products
are taken with f alone, which avoids the cancellation of a large identity. Vectors live in the precision and on the
device of the start; the small projected matrix is float64 on the CPU.

Pseudocode, with a basis of at most m vectors of which k survive a restart:

    grow      w = f(v_j), orthogonalise against v_1..v_j, append      (one application of f)
    look      theta, y = eigenpair of the projected matrix with the largest |c + a theta|
              residual = |a| |b . y|, b the last row of the projected matrix
    restart   order the real Schur form by |c + a theta|, keep the leading k vectors, and go on growing
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

# --- extreme eigenvalues of a matrix from one Krylov space, each certified by its residual ---

SOUGHT = {torch.float64: 1e-9, torch.float32: 1e-6}
"""Residual at which the search ends, as the space knows it, as a share of the spectral radius."""
ACCEPTED = {torch.float64: 2e-9, torch.float32: 4e-6}
"""Largest residual of a reported eigenvalue, computed anew: more than sought by what rounding adds."""
RIVALS = 4
"""Ritz values that lead by each measure and have to be known well enough that none of them overtakes the first."""
LARGEST_SPACE = 640
"""Basis vectors after which the search is given up; random matrices of size 1024, a hard case, need about 250."""
FIRST_LOOK, LEAST_GROWTH, MOST_GROWTH = 40, 1.1, 1.6
"""Size of the space at the first look, and by which factors it may grow between two."""

Product = Callable[[Float[Tensor, "size column"]], Float[Tensor, "size column"]]


@dataclass(frozen=True, slots=True)
class Extremes:
    """The eigenvalues on the rim of a spectrum."""

    values: tuple[complex, ...]
    """By largest `|1 + lambda|`, by largest `|lambda|`, by largest and by smallest real part."""
    residual: float
    """Largest `norm(B x - lambda x) / radius` of them: each is exact for a matrix that close to B."""


def extremes(product: Product, start: Float[Tensor, " size"], check: Product | None = None) -> Extremes | None:
    """The extremes of a real matrix that can only be multiplied with; `None` where the space does not find them.

    `check` multiplies columns of float64 with the matrix that the residuals are for, where `product` is rounded more.
    A space that the matrix leaves to itself ends the search early: it holds every eigenvalue that the start can see.
    """
    space = _Space(product, start, check or product)
    before, wanted = (0, math.inf), FIRST_LOOK
    while True:
        while space.size < min(wanted, space.room) and not space.is_complete:
            space.grow()
        theta, vectors, errors = space.look()
        leading = [np.argsort(-score, kind="stable")[:RIVALS] for score in _scores(theta)]
        excess = 0.0 if space.is_complete else _excess(theta, errors, leading, SOUGHT[start.dtype])
        if excess <= 1:
            return space.certified(theta, vectors, [int(order[0]) for order in leading])
        if space.size == space.room:
            return None
        before, wanted = (space.size, excess), _next_look(before, (space.size, excess))


def _scores(theta: np.ndarray) -> tuple[np.ndarray, ...]:
    return np.abs(1 + theta), np.abs(theta), theta.real, -theta.real


def _excess(theta: np.ndarray, errors: np.ndarray, leading: list[np.ndarray], tolerance: float) -> float:
    """By which factor the first by every measure misses the tolerance, or one of its rivals the square root of it."""
    radius = np.abs(theta).max()
    firsts, rivals = errors[[order[0] for order in leading]], errors[np.concatenate(leading)]
    allowed = np.array([tolerance, tolerance**0.5]) * radius
    reached = np.array([firsts.max(), rivals.max()])
    return float(np.where(reached > 0, reached / np.maximum(allowed, np.finfo(float).tiny), 0.0).max())


def _next_look(before: tuple[int, float], now: tuple[int, float]) -> int:
    """Size at which the search will be over if residuals go on falling as they did between two looks."""
    (size_before, excess_before), (size, excess) = before, now
    least, most = int(size * LEAST_GROWTH) + 1, int(size * MOST_GROWTH)
    if not excess < excess_before < math.inf:
        return most
    per_vector = math.log(excess_before / excess) / (size - size_before)
    return min(max(size + math.ceil(math.log(excess) / per_vector), least), most)


class _Space:
    """An Arnoldi decomposition `B V = V H + v_next h`, rows of `basis` being the vectors."""

    def __init__(self, product: Product, start: Float[Tensor, " size"], check: Product):
        self._product, self._check = product, check
        self.room = min(LARGEST_SPACE, start.numel())
        self.basis = start.new_empty(self.room + 1, start.numel())
        self.basis[0] = start / torch.linalg.vector_norm(start)
        self.projected = np.zeros((self.room + 1, self.room))
        self.size, self.is_complete = 0, False
        self._largest = 0.0

    def grow(self) -> None:
        """One more vector; the space is complete when the matrix leads no further."""
        j = self.size
        w = self._product(self.basis[j][:, None])[:, 0]
        before, known = float(torch.linalg.vector_norm(w)), self.basis[: j + 1]
        h = torch.zeros(j + 1, dtype=w.dtype, device=w.device)
        for _ in range(2):  # once more, because the first leaves rounding of the size of what it removed
            part = torch.mv(known, w)
            w, h = torch.addmv(w, known.T, part, alpha=-1), h + part
        after = float(torch.linalg.vector_norm(w))
        self.projected[: j + 1, j] = h.double().cpu().numpy()
        self.size = j + 1
        self._largest = max(self._largest, before)
        rounding = 10 * torch.finfo(w.dtype).eps * self._largest
        if after <= rounding or self.size == w.numel():
            self.is_complete = True
            return
        self.projected[j + 1, j] = after
        self.basis[j + 1] = w / after

    def look(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ritz values, their vectors in the space, and the residual that the decomposition gives each."""
        m = self.size
        # By torch, because numpy has threads of its own: layers side by side, which have one each, would wait for them.
        found = torch.linalg.eig(torch.from_numpy(self.projected[:m, :m]))
        theta, vectors = found.eigenvalues.numpy(), found.eigenvectors.numpy()
        errors = np.zeros(m) if self.is_complete else abs(self.projected[m, m - 1]) * np.abs(vectors[-1])
        return theta, vectors, errors

    def certified(self, theta: np.ndarray, vectors: np.ndarray, chosen: list[int]) -> Extremes | None:
        """The chosen Ritz values with residuals computed anew; `None` where these do not keep what was promised."""
        y, mu = vectors[:, chosen], theta[chosen]
        parts = np.concatenate([y.real, y.imag], axis=1)
        columns = (self.basis[: self.size].T @ torch.from_numpy(parts).to(self.basis)).double()
        x, image = (_complex(found.cpu().numpy()) for found in (columns, self._check(columns)))
        error = float((np.linalg.norm(image - mu * x, axis=0) / np.linalg.norm(x, axis=0)).max())
        radius = float(np.abs(theta).max())
        residual = error / radius if radius else error
        is_accepted = residual <= ACCEPTED[self.basis.dtype]
        return Extremes(tuple(complex(value) for value in mu), residual) if is_accepted else None


def _complex(parts: np.ndarray) -> np.ndarray:
    """Columns of real parts, and behind them those of imaginary parts, as complex columns."""
    real, imaginary = np.hsplit(parts, 2)
    return real + 1j * imaginary


# --- the dominating eigenvalue of a linear map that can only be applied: restarted Arnoldi ---

BASIS = 24
"""Largest number of basis vectors: beyond it, orthogonalising a vector costs more than a product with the map."""
KEPT = 8
"""Basis vectors that survive a restart."""
LOOK_EVERY = 4
"""Steps between two looks at the residual."""

Map = Callable[[Float[Tensor, " size"]], Float[Tensor, " size"]]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class DominantEigenvalue:
    """The eigenvalue of `c + a f` with the largest modulus, as far as the Krylov space knows it."""

    value: complex
    residual: float
    """`norm((c + a f) x - value x) / norm(x)`: the value is exact for an operator that differs by no more than this."""
    condition: float
    """Condition number of the eigenvalue in the Krylov space: to first order the error is at most this times the
    residual."""
    vector: tuple[Float[Tensor, " size"], Float[Tensor, " size"]]
    """Real and imaginary part of the eigenvector."""
    applications: int
    converged: bool
    near: int
    """Eigenvalues in the Krylov space whose modulus is the largest to the accuracy reached, this one included."""

    @property
    def error(self) -> float:
        """First-order bound of the error of the value."""
        return self.condition * self.residual


@dataclass(frozen=True, slots=True, kw_only=True)
class EigenvalueRequest:
    """One operator `shift + factor f` whose dominating eigenvalue is wanted, and how well."""

    shift: float = 0.0
    factor: float = 1.0
    against: float | None = None

    def moduli(self, theta: np.ndarray) -> np.ndarray:
        return np.abs(self.shift + self.factor * theta)


def dominating(
    f: Map,
    start: Float[Tensor, " size"],
    *,
    shift: float = 0.0,
    factor: float = 1.0,
    tolerance: float = 1e-3,
    against: float | None = None,
    finest: float = 1e-6,
    max_applications: int = 600,
) -> DominantEigenvalue:
    """The eigenvalue with the largest `|shift + factor theta|` over eigenvalues theta of f.

    `tolerance` is the residual that ends the search, relative to the modulus; with `against`, the search goes on to
    `finest` unless the modulus is apart from that number by more than its error bound. The answer of a search that ran
    out of applications is not `converged`. An invariant space smaller than the basis ends the search exactly.
    """
    wanted = [EigenvalueRequest(shift=shift, factor=factor, against=against)]
    options = {"tolerance": tolerance, "finest": finest, "max_applications": max_applications}
    return dominating_each(f, start, wanted, **options)[0]  # type: ignore[arg-type]


def dominating_each(
    f: Map,
    start: Float[Tensor, " size"],
    wanted: Sequence[EigenvalueRequest],
    *,
    tolerance: float = 1e-3,
    finest: float = 1e-6,
    max_applications: int = 600,
) -> list[DominantEigenvalue]:
    """The same for several operators that only shift and scale one map: all are read from one Krylov space."""
    krylov = _Krylov(f, start, wanted)
    pending, answers = list(range(len(wanted))), {}
    while pending:
        for _ in range(LOOK_EVERY):
            if krylov.is_complete or krylov.size == krylov.room or krylov.applications >= max_applications:
                break
            krylov.grow()
        is_over = krylov.is_complete or krylov.applications >= max_applications
        for index in tuple(pending):
            found = krylov.look(wanted[index])
            condition = partial(krylov.condition, found)
            against = wanted[index].against
            is_enough = is_converged(found.residual, abs(found.value), condition, against, tolerance, finest)
            if is_enough or is_over:
                answers[index] = krylov.answer(found, is_enough or krylov.is_complete)
                pending.remove(index)
        if pending and krylov.size == krylov.room:
            krylov.restart([wanted[index] for index in pending])
    return [answers[index] for index in range(len(wanted))]


def is_converged(
    residual: float,
    modulus: float,
    condition: Callable[[], float],
    against: float | None,
    tolerance: float,
    finest: float,
) -> bool:
    """Whether a residual ends a search: small, and small enough to tell the modulus from `against`."""
    modulus = max(modulus, _TINY)
    if residual > tolerance * modulus:
        return False
    if against is None or residual <= finest * modulus:
        return True
    return abs(modulus - against) > 2 * condition() * residual


_TINY = 1e-300


def generic_start(*shape: int, like: Tensor) -> Tensor:
    """A start with a part in every direction, always the same, so that a result depends on no global seed."""
    start = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return start.to(like)


@dataclass(frozen=True, slots=True)
class _Pair:
    value: complex
    residual: float
    y: np.ndarray
    near: int


class _Krylov:
    """A Krylov decomposition `f V = V S + v_next b`, rows of `basis` being the vectors."""

    def __init__(self, f: Map, start: Float[Tensor, " size"], wanted: Sequence[EigenvalueRequest]):
        self._f = f
        self.room = min(BASIS + KEPT * (len(wanted) - 1), start.numel())
        self.basis = start.new_empty(self.room + 1, start.numel())
        self.basis[0] = start / torch.linalg.vector_norm(start)
        self.projected = np.zeros((self.room + 1, self.room))
        self.size = self.applications = 0
        self.is_complete = False
        self.grow()

    def grow(self) -> None:
        """One more basis vector; the space is complete when f leaves it."""
        j = self.size
        w = self._f(self.basis[j])
        before = float(torch.linalg.vector_norm(w))
        known = self.basis[: j + 1]
        h = torch.mv(known, w)
        w = torch.addmv(w, known.T, h, alpha=-1)
        after = float(torch.linalg.vector_norm(w))
        if after < 0.7 * before:  # cancellation: what is left is not orthogonal yet (Daniel, Gragg, Kaufman, Stewart)
            more = torch.mv(known, w)
            w, h = torch.addmv(w, known.T, more, alpha=-1), h + more
            after = float(torch.linalg.vector_norm(w))
        self.applications += 1
        self.projected[: j + 1, j] = h.double().cpu().numpy()
        self.size = j + 1
        epsilon = torch.finfo(w.dtype).eps
        if after <= 10 * epsilon * max(before, float(np.abs(self.projected).max())) or j + 1 == w.numel():
            self.is_complete = True
            return
        self.projected[j + 1, j] = after
        self.basis[j + 1] = w / after

    def look(self, wanted: EigenvalueRequest) -> _Pair:
        """The dominating pair of the projected matrix and the residual of the vector it stands for."""
        m = self.size
        theta, vectors = np.linalg.eig(self.projected[:m, :m])
        moduli = wanted.moduli(theta)
        best = int(moduli.argmax())
        y = vectors[:, best] / np.linalg.norm(vectors[:, best])
        residual = 0.0 if self.is_complete else abs(wanted.factor) * abs(self.projected[m, :m] @ y)
        near = int((moduli >= moduli[best] * (1 - 1e-6) - residual).sum())
        return _Pair(complex(wanted.shift + wanted.factor * theta[best]), float(residual), y, near)

    def restart(self, wanted: Sequence[EigenvalueRequest]) -> None:
        """Keeps the Schur vectors of the eigenvalues that lead for any operator, conjugate pairs together."""
        from scipy.linalg import schur

        m = self.size
        theta = np.linalg.eigvals(self.projected[:m, :m])
        thresholds = [_cut(np.sort(operator.moduli(theta))[::-1]) for operator in wanted]
        triangle, rotation, kept = schur(
            self.projected[:m, :m],
            output="real",
            sort=lambda real, imaginary: any(
                abs(operator.shift + operator.factor * complex(real, imaginary)) > threshold
                for operator, threshold in zip(wanted, thresholds, strict=True)
            ),
        )
        kept = min(max(kept, 1), m - 1)
        spike = self.projected[m, :m] @ rotation[:, :kept]
        mix = torch.from_numpy(rotation[:, :kept].T.copy()).to(self.basis)
        self.basis[:kept] = mix @ self.basis[:m]
        self.basis[kept] = self.basis[m].clone()
        self.projected[:] = 0.0
        self.projected[:kept, :kept] = triangle[:kept, :kept]
        self.projected[kept, :kept] = spike
        self.size = kept

    def condition(self, pair: _Pair) -> float:
        return _condition(self.projected[: self.size, : self.size], pair.y)

    def answer(self, pair: _Pair, converged: bool) -> DominantEigenvalue:
        m = self.size
        y = torch.from_numpy(np.stack([pair.y.real, pair.y.imag])).to(self.basis)
        real, imaginary = y @ self.basis[:m]
        return DominantEigenvalue(
            value=pair.value,
            residual=pair.residual,
            condition=self.condition(pair),
            vector=(real, imaginary),
            applications=self.applications,
            converged=converged and math.isfinite(abs(pair.value)),
            near=pair.near,
        )


def _cut(moduli: np.ndarray) -> float:
    """Where about `KEPT` leading moduli end: where neighbours are farthest apart, so that rounding moves none across."""
    m = len(moduli)
    gaps = moduli[: m - 1] - moduli[1:]
    low, high = min(KEPT, m) - KEPT // 2, min(KEPT + KEPT // 2, m - 2)
    cut = low + int(gaps[low:high].argmax()) if low < high else 0
    return float((moduli[cut] + moduli[cut + 1]) / 2)


def _condition(matrix: np.ndarray, right: np.ndarray) -> float:
    """`1 / |left^H right|` of the eigenvalue that the unit vector `right` belongs to."""
    from scipy.linalg import eig

    _, lefts, rights = eig(matrix, left=True)
    cosines = np.abs(lefts.conj().T @ right)
    overlap = np.abs(rights.conj().T @ right)
    return float(1.0 / max(cosines[int(overlap.argmax())], 1e-16))
