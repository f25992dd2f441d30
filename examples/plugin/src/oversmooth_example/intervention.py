"""An intervention."""

import torch
from torch import Tensor, nn

from oversmooth.control.interventions import LayerFacts, Rule


class Dampen(Rule):
    """`O_h' = (1 - d_h) O_h`: every head's output made smaller by a share that is learned, 0 at the start."""

    title = "Dampen"
    options = ("start",)

    def __init__(self, facts: LayerFacts, start: float = 0.0):
        super().__init__(facts)
        self.share = nn.Parameter(torch.full((facts.heads.n_heads,), float(start)))

    def mixed(self, o: Tensor) -> Tensor:
        """Called with what attention made of the values, (batch, token, head, d_head), before the output projection."""
        return (1 - self.share.to(o.dtype))[:, None] * o
