"""The whole stack with changing attention and weights: how much AC and DC grow over its depth.

What all tokens share stays so under every layer, so its growth is that of the product of the `d x d` maps. What differs
between them grows as the product of the centred operators at the measured attention. A few isotropic probes follow both
products; QR after every layer keeps them from becoming parallel or from overflowing, and the triangular factors
multiply up to the growth.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.prediction.theory.arnoldi import generic_start
from oversmooth.prediction.theory.operator import LayerOperator, centre

PROBES, MANY = 4, 64
"""Probes of what differs between tokens, and of what they share where that is too wide to be followed as a whole."""
WHOLE_DC = 1024
"""Up to this width DC is followed by d_model probes, which makes its growth exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthGrowth:
    """Growth over a stack, as natural logarithms, for isotropic features."""

    layers: int
    log_dc: float
    log_ac: float
    leading_dc: float
    leading_ac: float
    """The same for the direction, among the probes, that grows most."""

    @property
    def exponent(self) -> float:
        """`(log growth_ac - log growth_dc) / layers`; negative smooths."""
        return (self.log_ac - self.log_dc) / self.layers


class Depth:
    """Follows one sequence through the layers of a stack, in the order in which they are given."""

    def __init__(self, tokens: int, d_model: int, like: Tensor, probes: int = PROBES):
        probes = min(probes, (tokens - 1) * d_model)
        self._ac = _Product(centre(generic_start(probes, tokens, d_model, like=like)).flatten(1))
        whole = d_model <= WHOLE_DC
        self._dc = _Product(
            torch.eye(d_model, dtype=like.dtype, device=like.device)
            if whole
            else generic_start(MANY, d_model, like=like)
        )
        self._shape = (-1, tokens, d_model)
        self.layers = 0

    def pass_through(self, operator: LayerOperator) -> None:
        """One more layer."""
        self._ac.apply(lambda x: operator.centred(x.view(self._shape)).flatten(1))
        self._dc.apply(operator.shared)
        self.layers += 1

    def growth(self) -> DepthGrowth | None:
        """The growth so far; `None` where nothing of a part is left."""
        found = [self._dc.log_growth(), self._ac.log_growth()]
        if not self.layers or not all(math.isfinite(value) for pair in found for value in pair):
            return None
        (log_dc, leading_dc), (log_ac, leading_ac) = found
        return DepthGrowth(
            layers=self.layers, log_dc=log_dc, log_ac=log_ac, leading_dc=leading_dc, leading_ac=leading_ac
        )


class _Product:
    """A growing product of maps, seen from a block of orthonormal rows."""

    def __init__(self, start: Float[Tensor, "probe size"]):
        self._rows = torch.linalg.qr(start.T).Q.T
        self._factor = torch.eye(len(self._rows), dtype=torch.float64)
        self._log_scale = 0.0

    def apply(self, f) -> None:  # type: ignore[no-untyped-def]  # rows in, rows out
        q, r = torch.linalg.qr(f(self._rows).T)
        self._rows = q.T
        factor = r.double().cpu() @ self._factor
        size = torch.linalg.matrix_norm(factor).item()
        self._log_scale += math.log(size) if size > 0 else -math.inf
        self._factor = factor / size if size > 0 else factor

    def log_growth(self) -> tuple[float, float]:
        """`log(norm_F / sqrt(probes))`, what isotropic features grow by, and the largest growth among the probes."""
        typical = torch.linalg.matrix_norm(self._factor).item() / math.sqrt(len(self._factor))
        leading = torch.linalg.matrix_norm(self._factor, ord=2).item()
        if typical <= 0 or not math.isfinite(self._log_scale):
            return -math.inf, -math.inf
        return self._log_scale + math.log(typical), self._log_scale + math.log(leading)
