"""A family: a Transformer with names of its own, and the declaration that leads oversmooth through them."""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from oversmooth.models.declaration import Arch, Paths


@dataclass
class RingConfig:
    """What a model of this family is, as transformers' configs say it."""

    num_attention_heads: int
    model_type: str = "ringformer"

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class Ring(nn.Module):
    """A pre-norm block."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.calm = nn.LayerNorm(width)
        self.ask, self.key, self.say, self.merge = (nn.Linear(width, width) for _ in range(4))
        self.rest = nn.LayerNorm(width)
        self.think = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        calm = self.calm(x)
        q, k, v = (
            part(calm).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.ask, self.key, self.say)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        return x + self.think(self.rest(x))


class RingFormer(nn.Module):
    """Takes features (batch, token, width)."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 3):
        super().__init__()
        self.config = RingConfig(heads)
        self.rings = nn.ModuleList(Ring(width, heads) for _ in range(layers))
        self.end = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for ring in self.rings:
            x = ring(x)
        return self.end(x)


RINGFORMER = Arch(
    name="ringformer",
    model_types=("ringformer",),
    paths=Paths(block="rings.{i}", v="say", o="merge", attn_norm="calm", ffn_norm="rest", final_norm="end"),
)


def tiny_ringformer() -> RingFormer:
    """With weights that are the same every time."""
    torch.manual_seed(0)
    return RingFormer().eval()
