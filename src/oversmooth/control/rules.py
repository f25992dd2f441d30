"""The published interventions, each as one small module per layer that changes one step of attention or of the block.

`A` softmax attention, `J` looks at all visible tokens equally (row by row: over the prefix in causal rows, never at padding),
`V` values, `O = A V`, `LC Y = J Y`, `HC Y = Y - LC Y`. Whether a rule is the identity where it starts is part of it. With
dropout inside fused attention, A stands for what dropout left of it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from jaxtyping import Float
from torch import Tensor, nn

from oversmooth.control.attention_calls import Product, Visible, require_whole_sequences
from oversmooth.control.eigenbasis import Heads
from oversmooth.errors import CannotControl, OutOfRange

NEUTRENO_STRENGTH = {"text": 0.4, "audio": 0.4, "image": 0.6}


class Rule(nn.Module):
    """An intervention on one layer. Steps that it does not override are not even looked at."""

    title: ClassVar[str]

    def __init__(self, heads: Heads):
        super().__init__()
        self.heads = heads
        self.visible: Visible | None = None

    def seen(self, visible: Visible) -> None:
        """Which tokens see which, in the attention call that is running."""
        self.visible = visible

    def values(self, v: Float[Tensor, "batch token kv d_head"]) -> Float[Tensor, "batch token kv d_head"]:
        return v

    def product(self, product: Product) -> Float[Tensor, "batch head query d_head"]:
        return product.output

    def probabilities(
        self, attention: Float[Tensor, "batch head query key"], visible: Visible
    ) -> Float[Tensor, "batch head query key"]:
        return attention

    def mixed(self, o: Float[Tensor, "batch token head d_head"]) -> Float[Tensor, "batch token head d_head"]:
        return o

    def projected(self, y: Float[Tensor, "batch token d_model"]) -> Float[Tensor, "batch token d_model"]:
        return y

    def mean_of_visible(self, x: Float[Tensor, "batch token d_model"]) -> Float[Tensor, "batch #token d_model"]:
        """`LC x`, over what this layer's attention has just seen."""
        visible, self.visible = self.visible, None
        assert visible is not None, "attention ran before its output is changed"
        require_whole_sequences(self.title, visible)
        return visible.of_tokens().mean(x[:, None])[:, 0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "visible": None}  # what one pass has seen is nothing to copy


def _per_head(parameter: Float[Tensor, "head"], like: Tensor) -> Float[Tensor, "head 1 1"]:
    return parameter.to(like.dtype)[:, None, None]


# --- attention itself -----------------------------------------------------------------------------------------------


class AttnScale(Rule):
    """`A' = J + (1 + w)(A - J)` with w per head, 0 at the start: what differs from uniform attention is amplified."""

    title = "AttnScale"

    def __init__(self, heads: Heads):
        super().__init__(heads)
        self.weight = nn.Parameter(torch.zeros(heads.n_heads))

    def product(self, product: Product) -> Tensor:
        return product.output + _per_head(self.weight, product.output) * (
            product.output - product.visible.mean(product.values)
        )

    def probabilities(self, attention: Tensor, visible: Visible) -> Tensor:
        return attention + _per_head(self.weight, attention) * (attention - visible.matrix(attention))


class Centered(Rule):
    """`A' = A - J`: rows sum to zero, and what all tokens share is not passed on."""

    title = "Centered attention"

    def product(self, product: Product) -> Tensor:
        return product.output - product.visible.mean(product.values)

    def probabilities(self, attention: Tensor, visible: Visible) -> Tensor:
        return attention - visible.matrix(attention)


class GFSA(Rule):
    """`A' = w0 I + w1 A + wK (A + (K - 1)(A^2 - A))` with w0 = 0, w1 = 1 and wK = 0 per head at the start."""

    title = "GFSA"

    def __init__(self, heads: Heads, order: int = 4):
        super().__init__(heads)
        if order < 2:
            raise OutOfRange("order", order, "a whole number of at least 2")
        self.order = order
        self.identity = nn.Parameter(torch.zeros(heads.n_heads))
        self.first = nn.Parameter(torch.ones(heads.n_heads))
        self.high = nn.Parameter(torch.zeros(heads.n_heads))

    def product(self, product: Product) -> Tensor:
        return self._filter(product.own_values(self.title), product.output, product.again(product.output))

    def probabilities(self, attention: Tensor, visible: Visible) -> Tensor:
        require_whole_sequences(self.title, visible)
        eye = torch.eye(visible.keys, dtype=attention.dtype, device=attention.device)
        return self._filter(eye, attention, attention @ attention)

    def _filter(self, zeroth: Tensor, once: Tensor, twice: Tensor) -> Tensor:
        w0, w1, high = (_per_head(weight, once) for weight in (self.identity, self.first, self.high))
        return w0 * zeroth + w1 * once + high * (once + (self.order - 1) * (twice - once))


# --- values of the first layer --------------------------------------------------------------------------------------


class FirstValues:
    """The values of a stack's first layer in the pass that is running."""

    def __init__(self) -> None:
        self.v: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"v": None}


class UsesFirstValues(Rule):
    """Gives the first layer's values to those behind it. The first layer itself is unchanged."""

    def __init__(self, heads: Heads, first: FirstValues, is_first: bool):
        super().__init__(heads)
        self.first, self.is_first = first, is_first

    def remembered(self, v: Tensor) -> Tensor:
        """The first layer's values, in place of which nothing stale may stand."""
        found = self.first.v
        if found is None or found.shape != v.shape:
            reason = "the first layer of its stack has not run on this input"
            raise CannotControl(self.title, "this forward pass", reason, "Run the whole model, layer by layer in order.")
        if torch.is_grad_enabled() and v.requires_grad and not found.requires_grad:
            reason = "the values of the first layer have lost their gradient (reentrant checkpointing)"
            raise CannotControl(self.title, "this forward pass", reason, "Checkpoint with use_reentrant=False.")
        return found


class ValueResidual(UsesFirstValues):
    """`V_l <- (V_0 + V_l) / 2` in every layer behind the first; never the identity."""

    title = "Value residual"

    def values(self, v: Tensor) -> Tensor:
        if self.is_first:
            self.first.v = v
            return v
        return (self.remembered(v) + v) / 2


class NeuTRENO(UsesFirstValues):
    """`O = A V + c (V_0 - V)` in every layer behind the first, before the output projection; the identity at c = 0."""

    title = "NeuTRENO"

    def __init__(self, heads: Heads, first: FirstValues, is_first: bool, strength: float):
        super().__init__(heads, first, is_first)
        self.strength = strength
        self.own: Tensor | None = None

    def values(self, v: Tensor) -> Tensor:
        if self.is_first:
            self.first.v = v
        else:
            self.own = v
        return v

    def mixed(self, o: Tensor) -> Tensor:
        if self.is_first:
            return o
        own, self.own = self.own, None
        assert own is not None, "values are computed before they are mixed"
        if own.shape[:2] != o.shape[:2]:
            reason = f"values are {tuple(own.shape)} and outputs {tuple(o.shape)}"
            raise CannotControl(self.title, "this forward pass", reason, "Run whole sequences with use_cache=False.")
        pull = self.strength * (self.remembered(own) - own)
        return o + pull.repeat_interleave(o.shape[2] // pull.shape[2], 2)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "own": None}


# --- the output of attention ----------------------------------------------------------------------------------------


class FeatScale(Rule):
    """`Y' = (1 + t1) LC Y + (1 + t2) HC Y` after the projection, t1 and t2 per channel, 0 at the start."""

    title = "FeatScale"

    def __init__(self, heads: Heads):
        super().__init__(heads)
        self.low, self.high = nn.Parameter(torch.zeros(heads.d_model)), nn.Parameter(torch.zeros(heads.d_model))

    def projected(self, y: Tensor) -> Tensor:
        low, high = self.low.to(y.dtype), self.high.to(y.dtype)
        return y + high * y + (low - high) * self.mean_of_visible(y)


class ContraNorm(Rule):
    """`X' = (1 + s) X - s softmax(Xn Xn^T) X`, Xn of unit rows, on the residual sum; the identity at s = 0."""

    title = "ContraNorm"

    def __init__(self, heads: Heads, scale: float = 0.1):
        super().__init__(heads)
        self.scale = scale

    def summed(self, x: Float[Tensor, "batch token d_model"]) -> Float[Tensor, "batch token d_model"]:
        visible, self.visible = self.visible, None
        assert visible is not None, "attention ran before the sum"
        require_whole_sequences(self.title, visible)
        seen, rows = visible.of_tokens(), F.normalize(x, dim=-1)[:, None]
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

    def __init__(self, heads: Heads, init: float = 1e-5):
        super().__init__(heads)
        self.attn, self.ffn = (nn.Parameter(torch.full((heads.d_model,), init)) for _ in range(2))

    def gain(self, branch: str) -> Tensor:
        return self.ffn if branch == "ffn" else self.attn


class ResidualScaling(BranchScale):
    """`X + f(X) / sqrt(L)` with L the number of layers; never the identity."""

    title = "Residual scaling"

    def __init__(self, heads: Heads, layers: int):
        super().__init__(heads)
        self.factor = 1 / math.sqrt(layers)

    def gain(self, branch: str) -> float:
        return self.factor


# --- by name --------------------------------------------------------------------------------------------------------

Facts = Mapping[str, Any]
"""What a rule may need to know of its layer: `first`, `is_first`, `layers`, `kind`."""
RULES: Mapping[str, Callable[..., Rule]] = {
    "attnscale": lambda heads, facts, **options: AttnScale(heads, **options),
    "featscale": lambda heads, facts, **options: FeatScale(heads, **options),
    "neutreno": lambda heads, facts, strength=None: NeuTRENO(
        heads, facts["first"], facts["is_first"], NEUTRENO_STRENGTH[facts["kind"]] if strength is None else strength
    ),
    "contranorm": lambda heads, facts, **options: ContraNorm(heads, **options),
    "gfsa": lambda heads, facts, **options: GFSA(heads, **options),
    "centered": lambda heads, facts, **options: Centered(heads, **options),
    "layerscale": lambda heads, facts, **options: LayerScale(heads, **options),
    "residual_scaling": lambda heads, facts, **options: ResidualScaling(heads, facts["layers"], **options),
    "value_residual": lambda heads, facts, **options: ValueResidual(heads, facts["first"], facts["is_first"], **options),
}
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "neutreno": ("strength",),
    "contranorm": ("scale",),
    "gfsa": ("order",),
    "layerscale": ("init",),
}
"""What can be set; where a rule is not here, nothing."""
