"""Extreme eigenvalues of a matrix from one Krylov space, each certified by its residual.

The extremes that a spectrum is described by (largest `|1 + lambda|`, largest `|lambda|`, leftmost, rightmost) all lie on
the rim of the spectrum, and a Krylov space knows the rim first, whatever the shift. So one space serves all of them, and
it is never restarted: a few hundred vectors of the size of a layer's core take less memory than the core itself, and
every restart would forget what the other extremes need.

    grow      w = B v_j, orthogonalised twice against v_1..v_j, appended
    look      Ritz values theta with vectors y; residual |h_{m+1,m} y_m|; seldom, because it costs as much as many vectors
    certify   x = V y and norm(B x - theta x) / radius, computed anew in float64 for every eigenvalue that is reported
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

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
