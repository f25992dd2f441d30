"""Rules about values, and about what attention made of them, head by head, before the output projection."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from oversmooth.control import formulas
from oversmooth.control.rules.rule import LayerFacts, Rule
from oversmooth.errors import CannotControl

NEUTRENO_STRENGTH = {"text": 0.4, "audio": 0.4, "image": 0.6}


class UsesFirstValues(Rule):
    """Gives the first layer's values to those behind it. The first layer itself is unchanged."""

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.first, self.is_first = facts.first, facts.is_first

    @classmethod
    def refusal(cls, facts: LayerFacts) -> str | None:
        own, first = facts.heads, facts.first_heads or facts.heads
        if (own.n_kv, own.d_head) == (first.n_kv, first.d_head):
            return None
        sizes = [f"{heads.n_kv} heads of width {heads.d_head}" for heads in (own, first)]
        return f"its values have {sizes[0]}, and those of the first layer {sizes[1]}"

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
    """`V_l <- a V_l + b V_1` behind the first layer, a and b learned; they start at `1 - first` and `first`.

    Half each is for training from scratch; at `first=0` it is the identity, which is where pretrained models begin.
    """

    title = "Value residual"
    options = ("first",)

    def __init__(self, facts: LayerFacts, first: float = 0.5):
        super().__init__(facts)
        if not self.is_first:
            self.own_weight = nn.Parameter(torch.tensor(1.0 - first))
            self.first_weight = nn.Parameter(torch.tensor(float(first)))

    def values(self, v: Tensor) -> Tensor:
        if self.is_first:
            self.first.v = v
            return v
        return formulas.value_residual(v, self.remembered(v), self.own_weight.to(v), self.first_weight.to(v))


class OwnValues(Rule):
    """Remembers each token's own values, for when they have been mixed."""

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.own: Tensor | None = None

    def values(self, v: Tensor) -> Tensor:
        self.own = v
        return v

    def own_per_head(self, o: Float[Tensor, "batch token head d_head"]) -> Float[Tensor, "batch token head d_head"]:
        """The value of each token in the head that read it."""
        return self._per_head(self._taken(o), o)

    def _taken(self, o: Tensor) -> Tensor:
        own, self.own = self.own, None
        assert own is not None, "values are computed before they are mixed"
        if own.shape[:2] != o.shape[:2]:
            reason = f"values are {tuple(own.shape)} and outputs {tuple(o.shape)}"
            raise CannotControl(self.title, "this forward pass", reason, "Run whole sequences with use_cache=False.")
        return own

    @staticmethod
    def _per_head(v: Tensor, o: Tensor) -> Tensor:
        return v.repeat_interleave(o.shape[2] // v.shape[2], 2)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "own": None}  # what belongs to one pass is nothing to copy


class NeuTRENO(UsesFirstValues, OwnValues):
    """`O = A V + c (V_0 - V)` in every layer behind the first, before the output projection; the identity at c = 0."""

    title = "NeuTRENO"
    options = ("strength",)

    def __init__(self, facts: LayerFacts, strength: float | None = None):
        super().__init__(facts)
        self.strength = NEUTRENO_STRENGTH[facts.kind] if strength is None else strength

    def values(self, v: Tensor) -> Tensor:
        if self.is_first:
            self.first.v = v
            return v
        return super().values(v)

    def mixed(self, o: Tensor) -> Tensor:
        if self.is_first:
            return o
        own = self._taken(o)
        return o + self._per_head(self.strength * (self.remembered(own) - own), o)


class Exclusive(OwnValues):
    """`z = y - (y . v) v / |v|^2` for every token and head, v its own value: only what others say is passed on.

    Exclusive self-attention, arXiv 2603.09078, of which we have read the abstract. Without parameters, never the identity.
    """

    title = "Exclusive self-attention"

    def mixed(self, o: Tensor) -> Tensor:
        return formulas.exclusive(o, self.own_per_head(o))


class Differential(Rule):
    """`A_1' = A_1 - s A_2` for each head of a pair that reads one value head, and the other way round.

    `s = sigmoid(l)`, l per head, -10 at the start, so that rows sum to `1 - s`. After the Differential Transformer V2,
    in which the second head has no output of its own; an ordinary model has one, and l of -infinity leaves it as it is.
    """

    title = "Differential pairing"
    options = ("start",)

    def __init__(self, facts: LayerFacts, start: float = -10.0):
        super().__init__(facts)
        self.weight = nn.Parameter(torch.full((facts.heads.n_heads,), float(start)))

    @classmethod
    def refusal(cls, facts: LayerFacts) -> str | None:
        group = facts.heads.n_heads // facts.heads.n_kv
        return None if group % 2 == 0 else f"its value heads are read by {group} heads each, which do not go in pairs"

    def mixed(self, o: Tensor) -> Tensor:
        share = self.weight.sigmoid().to(o.dtype)[:, None]
        return formulas.differential(o, formulas.partners(o, 2), share)


class Gate(Rule):
    """`O_h' = sigmoid(W_g x + b_g)_h O_h` for every token x and head h, W_g = 0 and b_g = 10 at the start: gain one.

    Gated attention as in arXiv 2505.06708, one gate per head.
    """

    title = "Gate after attention"
    options = ("bias",)

    def __init__(self, facts: LayerFacts, bias: float = 10.0):
        super().__init__(facts)
        self.weight = nn.Parameter(torch.zeros(facts.heads.n_heads, facts.heads.d_model))
        self.bias = nn.Parameter(torch.full((facts.heads.n_heads,), float(bias)))
        self.opening: Tensor | None = None

    def read(self, x: Tensor) -> None:
        self.opening = nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)).sigmoid()

    def mixed(self, o: Tensor) -> Tensor:
        opening, self.opening = self.opening, None
        assert opening is not None, "attention reads its input before it mixes"
        return formulas.gate(o, opening[..., None])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opening": None}  # what belongs to one pass is nothing to copy
