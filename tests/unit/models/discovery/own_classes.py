"""Transformers as people write them: one class per way to lay out a value path, none of them known to the library."""

import math

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn

WIDTH, HEADS, D_HEAD, VOCABULARY = 24, 4, 6, 50


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])).softmax(-1) @ v


class Separate(nn.Module):
    """Three projections, fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ByHand(Separate):
    """Softmax and products written out."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(by_hand(q, k, v).transpose(1, 2).flatten(2))


class Exponentials(Separate):
    """A softmax that is not called one, with heads merged into the batch."""

    def forward(self, x: Tensor) -> Tensor:
        batch = len(x)
        q, k, v = (p(x).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2).flatten(0, 1) for p in (self.q, self.k, self.v))
        weights = torch.exp(torch.bmm(q, k.mT) / math.sqrt(D_HEAD))
        mixed = torch.bmm(weights / weights.sum(-1, keepdim=True), v)
        return self.o(mixed.unflatten(0, (batch, HEADS)).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """One projection for queries, keys and values, in one of three orders of rows."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        sizes = {"stacked": (3, HEADS, D_HEAD), "grouped": (HEADS, 3, D_HEAD), "interleaved": (HEADS, D_HEAD, 3)}
        axis = {"stacked": 2, "grouped": 3, "interleaved": 4}[self.order]
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, sizes[self.order]).unbind(axis))
        return self.proj(by_hand(q, k, v).transpose(1, 2).flatten(2))


class Einsum(nn.Module):
    """Einsum everywhere, with bare parameters of three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(HEADS, WIDTH, D_HEAD) / 5) for _ in range(3))
        self.w_o = nn.Parameter(torch.randn(HEADS, D_HEAD, WIDTH) / 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hdc->bhtc", x, w) for w in (self.w_q, self.w_k, self.w_v))
        weights = torch.einsum("bhqc,bhkc->bhqk", q, k).softmax(-1)
        return torch.einsum("bhqk,bhkc,hcd->bqd", weights, v, self.w_o)


class EinsumWithLinears(Separate):
    """Einsum for attention, linear layers around it, heads never moved."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, D_HEAD)) for p in (self.q, self.k, self.v))
        weights = torch.einsum("bqhc,bkhc->bhqk", q, k).softmax(-1)
        return self.o(torch.einsum("bhqk,bkhc->bqhc", weights, v).flatten(2))


class SharedValues(nn.Module):
    """Grouped queries: two value heads for four query heads, by `repeat_interleave`."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, 2 * D_HEAD) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2)
        k, v = (p(x).unflatten(-1, (2, D_HEAD)).transpose(1, 2).repeat_interleave(2, 1) for p in (self.k, self.v))
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=causal)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Pointwise(Separate):
    """Convolutions with a window of one in place of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.o = nn.Conv1d(WIDTH, WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (p(x).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2) for p in (self.q, self.k))
        v = self.v(x.mT).unflatten(1, (HEADS, D_HEAD)).mT
        return self.o(by_hand(q, k, v).transpose(1, 2).flatten(2).mT).mT


class PlainRMS(nn.Module):
    """A norm of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale


class Block(nn.Module):
    """Pre-norm block around any attention."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = attention
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PostNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class LayerScaled(Block):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__(attention)
        self.gamma = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma * self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class OwnNorm(Block):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__(attention)
        self.norm1, self.norm2 = PlainRMS(), PlainRMS()


class Halved(Block):
    """A number on the branch."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Token ids in, features out."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.final = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.final(x)


class TokensFirst(Model):
    """`(token, batch, width)` inside."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.final(x)


class TokensFirstAttention(Separate):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Lists(nn.Module):
    """Attention and feed-forward in a list of lists, with the norm inside: blocks are no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.Sequential(nn.LayerNorm(WIDTH), Separate()),
                    nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()),
                ]
            )
            for _ in range(3)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for attention, feed_forward in self.layers:  # type: ignore[misc]
            x = x + attention(x)
            x = x + feed_forward(x)
        return self.norm(x)


class Named(nn.Module):
    """Blocks with names in place of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = Block(Separate()), Block(Separate())

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(self.lower(x))


OWN = {
    "separate q, k, v": lambda: Model([Block(Separate()) for _ in range(3)]),
    "softmax and matmul by hand": lambda: Model([Block(ByHand()) for _ in range(3)]),
    "exponentials by hand": lambda: Model([Block(Exponentials()) for _ in range(3)]),
    "fused, stacked": lambda: Model([Block(Fused("stacked")) for _ in range(3)]),
    "fused, grouped": lambda: Model([Block(Fused("grouped")) for _ in range(3)]),
    "fused, interleaved": lambda: Model([Block(Fused("interleaved")) for _ in range(3)]),
    "einsum with three axes": lambda: Model([Block(Einsum()) for _ in range(3)]),
    "einsum with linears": lambda: Model([Block(EinsumWithLinears()) for _ in range(3)]),
    "shared values": lambda: Model([Block(SharedValues()) for _ in range(3)]),
    "pointwise convolutions": lambda: Model([Block(Pointwise()) for _ in range(3)]),
    "post-norm": lambda: Model([PostNorm(Separate()) for _ in range(3)]),
    "layer scale": lambda: Model([LayerScaled(Fused("stacked")) for _ in range(3)]),
    "a norm of one's own": lambda: Model([OwnNorm(ByHand()) for _ in range(3)]),
    "a number on the branch": lambda: Model([Halved(Separate()) for _ in range(3)]),
    "token, batch, width": lambda: TokensFirst([Block(TokensFirstAttention()) for _ in range(3)]),
    "lists of lists": Lists,
    "named blocks": Named,
}


def own_model(case: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = OWN[case]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) / WIDTH**0.5)
    return model


def attention_of(model: nn.Module) -> list[nn.Module]:
    """The attention modules, each from features to features, for a check by brute force."""
    return [part for part in model.modules() if isinstance(part, Separate | Fused | Einsum | SharedValues)]
