"""Eigenvalues of the map that acts: the token scale of a pre-norm layer, followed while the model trains.

Before attention a pre-norm layer divides token i by its scale s_i, so that a channel of the eigenbasis form evolves as
`y' = (I + l A D^-1) y`, `D = diag(s)`. For `l` in `[-min s, 0)` it sharpens whatever A is (docs/theory.md, section 7);
where s is small, the plain interval [-1, 0] reaches far beyond that. Here the interval is multiplied by `s_low`: a low
quantile of the token scales of a batch over the largest weight of the norm, averaged over the batches of training. It is
a buffer, so that a checkpoint holds it. In eval mode, and where a block is computed again for its gradients, it stays.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from oversmooth.models.declaration import NormKind, norm_offset
from oversmooth.models.norms import epsilon_of, token_scales

QUANTILE = 0.02
"""Share of tokens whose scale may lie below the one that is followed."""
MOMENTUM = 0.05
"""Weight of the newest batch: the mean reaches back over about twenty."""
SCALES = ("plain", "measured")


class TokenScale(nn.Module):
    """`s_low`, one before it is measured; the first batch of training sets it and every later one moves it a little."""

    low: Tensor
    unit: Tensor
    seen: Tensor

    def __init__(self, kind: NormKind, largest_gain: float, keeps_eigenvalues: bool):
        super().__init__()
        self.kind, self.largest_gain, self.keeps_eigenvalues = kind, largest_gain, keeps_eigenvalues
        self.register_buffer("low", torch.ones(()))
        self.register_buffer("unit", torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def interval(self, low: float, high: float) -> tuple[float, float]:
        """The interval that holds the eigenvalues now."""
        factor = self.low.item()
        return low * factor, high * factor

    def relative(self, psi: Float[Tensor, " channel"]) -> Float[Tensor, " channel"]:
        """psi in units of the interval; from given weights it starts as an eigenvalue, which the first batch divides."""
        return psi / self.unit.to(psi).clone()

    def absolute(self, relative: Float[Tensor, " channel"]) -> Float[Tensor, " channel"]:
        return relative * self.low.to(relative).clone()  # a clone: the buffer moves on before gradients are taken

    @torch.no_grad()
    def watch(self, norm: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """The hook before the norm."""
        if not norm.training or _is_computed_again():
            return
        found = self._measured(norm, arguments[0]).to(self.low)
        is_first = self.seen == 0
        if self.keeps_eigenvalues:
            self.unit.copy_(torch.where(is_first, found, self.unit))
        self.low.copy_(torch.where(is_first, found, self.low + MOMENTUM * (found - self.low)))
        self.seen += 1

    def _measured(self, norm: nn.Module, x: Float[Tensor, "*token d_model"]) -> Float[Tensor, ""]:
        scales = token_scales(x.detach(), self.kind, epsilon_of(norm)).flatten()
        quantile = scales.kthvalue(1 + int(QUANTILE * (scales.numel() - 1))).values
        weight = getattr(norm, "weight", None)
        if weight is None:
            return quantile / self.largest_gain
        largest = (weight.detach().float() + norm_offset(self.kind)).abs().max()
        return quantile / (largest * self.largest_gain)


def _is_computed_again() -> bool:
    """Whether this pass runs inside a backward pass, as gradient checkpointing does: it must repeat the first one."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
