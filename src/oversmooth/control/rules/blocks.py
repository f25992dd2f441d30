"""Rules about what a block makes of attention: its output, the residual sum, the branches and the norms before them."""

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from jaxtyping import Float
from torch import Tensor, nn

from oversmooth.control import formulas
from oversmooth.control.attention_calls import Visible, require_whole_sequences
from oversmooth.control.rules.rule import LayerFacts, Rule


class SeesTokens(Rule):
    """Remembers what this layer's attention has just seen, for a step that comes after it."""

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.visible: Visible | None = None

    def seen(self, visible: Visible) -> None:
        self.visible = visible

    def just_seen(self) -> Visible:
        visible, self.visible = self.visible, None
        assert visible is not None, "attention runs before its output is changed"
        require_whole_sequences(self.title, visible)
        return visible.of_tokens()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "visible": None}  # what belongs to one pass is nothing to copy


class FeatScale(SeesTokens):
    """`Y' = (1 + t1) LC Y + (1 + t2) HC Y` after the projection, t1 and t2 per channel, 0 at the start."""

    title = "FeatScale"

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.low, self.high = (nn.Parameter(torch.zeros(facts.heads.d_model)) for _ in range(2))

    def projected(self, y: Tensor) -> Tensor:
        return formulas.featscale(
            y, self.just_seen().mean(y[:, None])[:, 0], self.low.to(y.dtype), self.high.to(y.dtype)
        )


class ContraNorm(SeesTokens):
    """`X' = (1 + s) X - s softmax(Xn Xn^T) X`, Xn of unit rows, on the residual sum; the identity at s = 0."""

    title = "ContraNorm"
    options = ("scale",)

    def __init__(self, facts: LayerFacts, scale: float = 0.1):
        super().__init__(facts)
        self.scale = scale

    def summed(self, x: Float[Tensor, "batch token d_model"]) -> Float[Tensor, "batch token d_model"]:
        seen, rows = self.just_seen(), F.normalize(x, dim=-1)[:, None]
        nearby = F.scaled_dot_product_attention(
            rows, rows, x[:, None], attn_mask=seen.mask, is_causal=seen.is_causal, scale=1.0
        )
        return (1 + self.scale) * x - self.scale * nearby[:, 0]


# --- residual branches ----------------------------------------------------------------------------------------------


class BranchScale(Rule):
    """`X + g f(X)` on each residual branch; in a parallel block both are added at once, so there it is one branch."""

    def gain(self, branch: str) -> Tensor | float:
        raise AssertionError("each rule says by what it scales")

    def scaled(self, branch: str, y: Tensor) -> Tensor:
        gain = self.gain(branch)
        return y * (gain.to(y.dtype) if isinstance(gain, Tensor) else gain)


class LayerScale(BranchScale):
    """`X + g f(X)` with g per channel, 1e-5 at the start; the identity at `init=1`."""

    title = "LayerScale"
    options = ("init",)

    def __init__(self, facts: LayerFacts, init: float = 1e-5):
        super().__init__(facts)
        self.attn, self.ffn = (nn.Parameter(torch.full((facts.heads.d_model,), init)) for _ in range(2))

    def gain(self, branch: str) -> Tensor:
        return self.ffn if branch == "ffn" else self.attn


class ResidualScaling(BranchScale):
    """`X + f(X) / sqrt(L)` with L the number of layers; never the identity."""

    title = "Residual scaling"

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.factor = 1 / math.sqrt(facts.depth)

    def gain(self, branch: str) -> float:
        return self.factor


class LayerNormScaling(Rule):
    """`norm(x) / sqrt(l)` for the norms before the branches of block l, counted from one; the identity in the first.

    Meant for training from a plain initialisation, not from one that is scaled with depth already.
    """

    title = "LayerNorm scaling"

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.number = facts.number

    def normed(self, x: Tensor) -> Tensor:
        return formulas.layernorm_scaling(x, self.number)
