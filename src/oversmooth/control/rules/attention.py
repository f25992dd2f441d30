"""Rules that change attention itself."""

import torch
from torch import Tensor, nn

from oversmooth.control import formulas
from oversmooth.control.attention_calls import Product, Visible, require_whole_sequences
from oversmooth.control.rules.rule import LayerFacts, Rule, per_head
from oversmooth.errors import BadValue


class AttnScale(Rule):
    """`A' = J + (1 + w)(A - J)` with w per head, 0 at the start: what differs from uniform attention is amplified."""

    title = "AttnScale"

    def __init__(self, facts: LayerFacts):
        super().__init__(facts)
        self.weight = nn.Parameter(torch.zeros(facts.heads.n_heads))

    def product(self, product: Product) -> Tensor:
        output = product.output
        return formulas.attnscale(output, product.visible.mean(product.values), per_head(self.weight, output))

    def probabilities(self, attention: Tensor, visible: Visible) -> Tensor:
        return formulas.attnscale(attention, visible.matrix(attention), per_head(self.weight, attention))


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
        w0, w1, high = (per_head(weight, once) for weight in (self.identity, self.first, self.high))
        return formulas.gfsa(zeroth, once, twice, w0, w1, high, self.order)


class TempScale(Rule):
    """`A' = softmax(scores / t)` with `t <= 1`, fixed: attention looks at fewer tokens; the identity at t = 1.

    Several temperatures are several calls of `apply`, each for its layers.
    """

    title = "TempScale"
    options = ("temperature",)

    def __init__(self, facts: LayerFacts, temperature: float = 0.8):
        super().__init__(facts)
        if not 0 < temperature <= 1:
            raise BadValue("temperature", temperature, "greater than 0 and at most 1")
        self._temperature = temperature

    @property
    def temperature(self) -> float:
        return self._temperature

    def probabilities(self, attention: Tensor, visible: Visible) -> Tensor:
        return formulas.tempered(attention, self._temperature)
