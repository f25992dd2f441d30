"""`rho_ac` under causal attention, exactly, from the diagonals of the attention maps.

No token sees a later one, so T is block lower-triangular over tokens, with blocks `skip + sum_h a^h_tt H_h / scale`,
and its spectrum is that of the blocks. Token 1 sees only itself: its block is the DC block. So

    rho_ac = max over t >= 2 of rho(skip + sum_h a^h_tt H_h / scale).

Each block acts on one token, in the value channels where the layer can be reduced to them. Where all blocks together
are small, all their eigenvalues are computed. Otherwise a few Arnoldi steps on all tokens at once rank them, and the
leading ones are solved until none of the rest can exceed the best.
"""

from dataclasses import replace

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from oversmooth.prediction.theory.arnoldi import dominating, generic_start
from oversmooth.prediction.theory.operator import LayerOperator
from oversmooth.prediction.theory.radius import Radius, exact_radius, krylov_radius, with_idle

DENSE_WORK = 4e8
"""Tokens times block size cubed up to which every eigenvalue of every block is computed: about a second."""
DENSE_BLOCK = 512
"""Largest single block that is solved by all its eigenvalues."""
STEPS = 24
"""Arnoldi steps that rank the tokens."""
AT_ONCE = 5e7
"""Numbers in the bases of the tokens that are ranked together."""
SOLVED = 12
"""Tokens that are solved one by one at most."""


def causal_radius(operator: LayerOperator, *, tolerance: float, max_applications: int) -> Radius:
    """The spectral radius of the centred operator of a layer whose attention is causal."""
    blocks = _Blocks(operator)
    count, size = len(blocks.weights), blocks.size
    if count * size**3 <= DENSE_WORK:
        return blocks.with_idle(exact_radius(blocks.eigenvalues(range(count)), blocks.weights.dtype, "diagonals"))
    upper = blocks.ranked()
    best: Radius | None = None
    used = STEPS
    for token in upper.argsort(descending=True)[:SOLVED].tolist():
        if best is not None and upper[token].item() <= best.value * (1 + tolerance):
            break
        found = blocks.solve(token, tolerance, max_applications)
        used += found.applications
        is_better = best is None or found.value > best.value
        best = found if is_better else best
        upper[token] = found.high
    assert best is not None, "causal attention has at least two tokens"
    high = max(best.high, upper.max().item())
    is_certain = high <= best.value * (1 + tolerance) or high <= best.high
    best = replace(best, high=high, applications=used, converged=best.converged and is_certain)
    return blocks.with_idle(best)


class _Blocks:
    """The diagonal blocks of tokens 2 to n, acting on rows."""

    def __init__(self, operator: LayerOperator):
        self.operator = operator
        self.path = operator.path
        self.weights = operator.diagonals[1:]
        self.is_reduced = self.path.is_reducible
        self.size = self.path.channels if self.is_reduced else self.path.d_model
        self.factor = 1.0 / operator.scale
        self.shift = operator.skip if self.is_reduced else 0.0

    def step(self, x: Float[Tensor, "token size"], weights: Float[Tensor, "token head"]) -> Float[Tensor, "token size"]:
        """One product with every token's block: `theta`, where the eigenvalue of T is `shift + theta`."""
        path = self.path
        values = x if self.is_reduced else x @ path.value_rows.T
        values = values.unflatten(-1, (path.n_kv, path.d_head)).repeat_interleave(path.n_heads // path.n_kv, 1)
        mixed = (values * weights[..., None]).flatten(1)
        if self.is_reduced:
            return self.factor * (mixed @ path.core)
        return path.after(self.operator.skip * x + self.factor * (mixed @ path.output_rows))

    def eigenvalues(self, tokens: range | list[int]) -> Complex[Tensor, " count"]:
        """All eigenvalues of T in the blocks of these tokens."""
        eye = torch.eye(self.size, dtype=self.weights.dtype, device=self.weights.device)
        found = [
            torch.linalg.eigvals(self.step(eye, self.weights[token].expand(self.size, -1)).cpu().double())
            for token in tokens
        ]
        return self.shift + torch.cat(found)

    def with_idle(self, radius: Radius) -> Radius:
        return with_idle(radius, self.operator.skip, len(self.weights) * self.path.idle_features)

    def solve(self, token: int, tolerance: float, max_applications: int) -> Radius:
        if self.size <= DENSE_BLOCK:
            return exact_radius(self.eigenvalues([token]), self.weights.dtype, "diagonals")
        weights = self.weights[token : token + 1]
        found = dominating(
            lambda x: self.step(x[None], weights)[0],
            generic_start(self.size, like=weights),
            shift=self.shift,
            tolerance=tolerance,
            max_applications=max_applications,
        )
        bound = abs(self.operator.skip) + abs(self.factor) * (weights[0].abs() * self.path.head_norms).sum().item()
        return krylov_radius(found, bound * self.path.after_norm, route="diagonals")

    def ranked(self) -> Float[Tensor, " token"]:
        """An upper estimate of the radius of every block, in groups that fit into memory."""
        group = max(1, int(AT_ONCE / (STEPS * self.size)))
        return torch.cat([self._ranked(weights) for weights in self.weights.split(group)])

    def _ranked(self, w: Float[Tensor, "token head"]) -> Float[Tensor, " token"]:
        """Arnoldi without restart on all tokens at once: the radius of each block plus its first-order error bound."""
        count, steps = len(w), min(STEPS, self.size)
        basis = w.new_zeros(steps + 1, count, self.size)
        projected = torch.zeros(count, steps + 1, steps, dtype=torch.float64)
        basis[0] = torch.nn.functional.normalize(generic_start(self.size, like=w).expand(count, -1), dim=-1)
        for j in range(steps):
            x = self.step(basis[j], w)
            for _ in range(2):
                h = torch.einsum("jts,ts->tj", basis[: j + 1], x)
                x = x - torch.einsum("tj,jts->ts", h, basis[: j + 1])
                projected[:, : j + 1, j] += h.double().cpu()
            norm = torch.linalg.vector_norm(x, dim=-1)
            projected[:, j + 1, j] = norm.double().cpu()
            basis[j + 1] = x / norm.clamp(min=torch.finfo(w.dtype).tiny)[:, None]
        values, vectors = torch.linalg.eig(projected[:, :steps])
        best = (self.shift + values).abs().argmax(-1)
        row = torch.arange(count)
        y = vectors[row, :, best]
        lefts = torch.linalg.pinv(vectors)[row, best]  # rows of the inverse: left eigenvectors, condition = their norm
        residual = projected[:, steps, steps - 1].abs() * y[:, -1].abs()
        error = residual * torch.linalg.vector_norm(lefts, dim=-1) * torch.linalg.vector_norm(y, dim=-1)
        return (self.shift + values[row, best]).abs() + error
