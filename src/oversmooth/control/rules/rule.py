"""What every intervention is: one small module per layer that changes one step of attention or of the block.

`A` softmax attention, `J` looks at all visible tokens equally (row by row: over the prefix in causal rows, never at padding),
`V` values, `O = A V`, `LC Y = J Y`, `HC Y = Y - LC Y`. Whether a rule is the identity where it starts is part of it. With
dropout inside fused attention, A stands for what dropout left of it.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from oversmooth.control.attention_calls import Product, Visible
from oversmooth.control.eigenbasis import Heads


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
    number: int = 1
    """Which block of the stack it is, counted from one."""
    is_first: bool = False
    first: FirstValues = field(default_factory=FirstValues)
    first_heads: Heads | None = None
    """Sizes of the stack's first layer, for rules that use its values."""


class Rule(nn.Module):
    """An intervention on one layer. Steps that it does not override are not even looked at."""

    title: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    """What can be set."""

    def __init__(self, facts: LayerFacts):
        super().__init__()

    @classmethod
    def refusal(cls, facts: LayerFacts) -> str | None:
        """Why the rule means nothing for a layer of such sizes; `None` where it does."""
        return None

    def seen(self, visible: Visible) -> None:
        """Which tokens see which, in the attention call that is running."""

    @property
    def temperature(self) -> float:
        """What the scores of attention are divided by."""
        return 1.0

    def read(self, x: Float[Tensor, "batch token d_model"]) -> None:
        """What the values are made from."""

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


def per_head(parameter: Float[Tensor, " head"], like: Tensor) -> Float[Tensor, "head 1 1"]:
    return parameter.to(like.dtype)[:, None, None]
