"""The published interventions, each as one small module per layer that changes one step of attention or of the block.

`A` softmax attention, `J` looks at all visible tokens equally (row by row: over the prefix in causal rows, never at padding),
`V` values, `O = A V`, `LC Y = J Y`, `HC Y = Y - LC Y`. Whether a rule is the identity where it starts is part of it. With
dropout inside fused attention, A stands for what dropout left of it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from jaxtyping import Float
from torch import Tensor, nn

from oversmooth.control import formulas
from oversmooth.control.attention_calls import Product, Visible, require_whole_sequences
from oversmooth.control.eigenbasis import Heads
from oversmooth.errors import BadValue, CannotControl

NEUTRENO_STRENGTH = {"text": 0.4, "audio": 0.4, "image": 0.6}


class FirstValues:
    """The values of a stack's first layer in the pass that is running."""

    def __init__(self) -> None:
        self.v: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"v": None}


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What a rule may need to know of the layer it is for."""

    heads: Heads
    kind: str = "text"
    depth: int = 1
    """How many layers run in the stack."""
    is_first: bool = False
    first: FirstValues = field(default_factory=FirstValues)


class Rule(nn.Module):
    """An intervention on one layer. Steps that it does not override are not even looked at."""

    title: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    """What can be set."""

    def __init__(self, facts: LayerFacts):
        super().__init__()

    def seen(self, visible: Visible) -> None:
        """Which tokens see which, in the attention call that is running."""

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


def _per_head(parameter: Float[Tensor, " head"], like: Tensor) -> Float[Tensor, "head 1 1"]:
    return parameter.to(like.dtype)[:, None, None]


# --- attention itself -----------------------------------------------------------------------------------------------


class AttnScale(Rule):
    """`A' = J + (1 + w)(A - J)` with w per head, 0 at the start: what differs from uniform attention is amplified."""

    title = "AttnScale"

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.weight = nn.Parameter(torch.zeros(facts.heads.n_heads))

    def product(self, product: Product) -> Tensor:
        output = product.output
        return formulas.attnscale(output, product.visible.mean(product.values), _per_head(self.weight, output))

    def probabilities(self, attention: Tensor, visible: Visible) -> Tensor:
        return formulas.attnscale(attention, visible.matrix(attention), _per_head(self.weight, attention))


class Centered(Rule):
    """`A' = A - J`: rows sum to zero, and what all tokens share is not passed on."""

    title = "Centered attention"

    def product(self, product: Product) -> Tensor:
        return formulas.centered(product.output, product.visible.mean(product.values))

    def probabilities(self, attention: Tensor, visible: Visible) -> Tensor:
        return formulas.centered(attention, visible.matrix(attention))


class GFSA(Rule):
    """`A' = w0 I + w1 A + wK (A + (K - 1)(A^2 - A))` with w0 = 0, w1 = 1 and wK = 0 per head at the start."""

    title = "GFSA"
    options = ("order",)

    def __init__(self, facts: LayerFacts, order: int = 4):
        super().__init__(facts)
        if order < 2:
            raise BadValue("order", order, "a whole number of at least 2")
        self.order = order
        self.identity = nn.Parameter(torch.zeros(facts.heads.n_heads))
        self.first = nn.Parameter(torch.ones(facts.heads.n_heads))
        self.high = nn.Parameter(torch.zeros(facts.heads.n_heads))

    def product(self, product: Product) -> Tensor:
        return self._filter(product.own_values(self.title), product.output, product.again(product.output))

    def probabilities(self, attention: Tensor, visible: Visible) -> Tensor:
        require_whole_sequences(self.title, visible)
        eye = torch.eye(visible.keys, dtype=attention.dtype, device=attention.device)
        return self._filter(eye, attention, attention @ attention)

    def _filter(self, zeroth: Tensor, once: Tensor, twice: Tensor) -> Tensor:
        w0, w1, high = (_per_head(weight, once) for weight in (self.identity, self.first, self.high))
        return formulas.gfsa(zeroth, once, twice, w0, w1, high, self.order)


# --- values of the first layer --------------------------------------------------------------------------------------


class UsesFirstValues(Rule):
    """Gives the first layer's values to those behind it. The first layer itself is unchanged."""

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.first, self.is_first = facts.first, facts.is_first

    def remembered(self, v: Tensor) -> Tensor:
        """The first layer's values, in place of which nothing stale may stand."""
        found = self.first.v
        if found is None or found.shape != v.shape:
            reason = "the first layer of its stack has not run on this input"
            raise CannotControl(
                self.title, "this forward pass", reason, "Run the whole model, layer by layer in order."
            )
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
    options = ("strength",)

    def __init__(self, facts: LayerFacts, strength: float | None = None):
        super().__init__(facts)
        self.strength = NEUTRENO_STRENGTH[facts.kind] if strength is None else strength
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
        return {**self.__dict__, "own": None}  # what belongs to one pass is nothing to copy


# --- the output of attention ----------------------------------------------------------------------------------------


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


# --- by name --------------------------------------------------------------------------------------------------------

RULES: Mapping[str, type[Rule]] = {
    "attnscale": AttnScale,
    "featscale": FeatScale,
    "neutreno": NeuTRENO,
    "contranorm": ContraNorm,
    "gfsa": GFSA,
    "centered": Centered,
    "layerscale": LayerScale,
    "residual_scaling": ResidualScaling,
    "value_residual": ValueResidual,
}
