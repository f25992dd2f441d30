"""Transformers as people write them, each with its blocks in the order in which they run.

`truth_of` reads what a block puts out by plain hooks on the block itself, without the library. The feed-forward of every
block adds a common vector of its own size, so a reading that misses a block or a sub-block is off by far more than rounding.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, D_HEAD, TOKENS, BATCH, VOCABULARY = 24, 4, 6, 7, 3, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Handwritten:
    """A model, one batch for it, and where its blocks are."""

    model: nn.Module
    batch: Any
    blocks: Sequence[nn.Module]
    final_norm: nn.Module | None = None
    keep: Tensor | None = None
    """Tokens that are no padding."""
    features: Callable[[Any], Tensor] = lambda output: output
    """From what a block gets or gives to `(batch, token, width)`."""
    received: Callable[[tuple[Any, ...], dict[str, Any]], Any] = lambda args, kwargs: args[0]
    """The stream among what a block is called with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Mean cosines by plain hooks."""

    before: tuple[float, ...]
    """What each call of a block reads, in the order of calls."""
    after: tuple[float, ...]
    """What it puts out."""
    final: float | None
    """What the final norm puts out."""


def mean_cosine(h: Tensor, keep: Tensor | None = None) -> float:
    """Mean over sequences of the mean cosine of two different kept tokens."""
    found = []
    for row, kept in zip(h.double(), [slice(None)] * len(h) if keep is None else keep, strict=True):
        unit = F.normalize(row[kept], dim=-1)
        n = len(unit)
        found.append(((unit @ unit.mT).sum() - n) / (n * (n - 1)))
    return float(torch.stack(found).mean())


def run(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def truth_of(case: Handwritten) -> Truth:
    before, after, final = [], [], []

    def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        received = case.received(args, kwargs)
        before.append(mean_cosine(case.features(received), _kept(case, received)))
        after.append(mean_cosine(case.features(output), _kept(case, received)))

    def normed(module: nn.Module, args: Any, output: Any) -> None:
        final.append(mean_cosine(case.features(output), _kept(case, output)))

    handles = [block.register_forward_hook(called, with_kwargs=True) for block in dict.fromkeys(case.blocks)]
    if case.final_norm is not None:
        handles.append(case.final_norm.register_forward_hook(normed))
    was_training = case.model.training
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            run(case.model.eval(), case.batch)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        case.model.train(was_training)
        for handle in handles:
            handle.remove()
    return Truth(before=tuple(before), after=tuple(after), final=final[-1] if final else None)


def _kept(case: Handwritten, received: Any) -> Tensor | None:
    """The tokens of this stack that count: padding belongs to the sequence that is as long as the mask."""
    is_masked = case.keep is not None and case.features(received).shape[1] == case.keep.shape[1]
    return case.keep if is_masked else None


# --- parts ---


class Attention(nn.Module):
    """Four projections; keys and values of another sequence where one is given."""

    def forward(self, x: Tensor, memory: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
        y = x if memory is None else memory
        q, k, v = (
            p(part).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2)
            for p, part in ((self.q, x), (self.k, y), (self.v, y))
        )
        return self.o(self.mixed(q, k, v, allowed).transpose(1, 2).flatten(2))

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


class ChosenKernel(Attention):
    """The backend of attention is chosen where it is called, as x-transformers does for flash attention."""

    def __init__(self, *backends: SDPBackend) -> None:
        super().__init__()
        self.backends = list(backends)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
        with sdpa_kernel(self.backends):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


class TorchAttention(nn.Module):
    """torch's own attention module, as most hand-written blocks call it."""

    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.mha(x, x, x, need_weights=False)[0]


class FeedForward(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Block(nn.Module):
    """Pre-norm."""

    def __init__(self, attention: Callable[[], nn.Module] = Attention) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.ff = attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.ff(self.n2(x))


class PostNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(x + self.attn(x))
        return self.n2(x + self.ff(x))


class Parallel(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.n1(x)) + self.ff(self.n1(x))


class ParallelOneNorm(Block):
    """Attention and feed-forward read one norm, which is called once."""

    def __init__(self) -> None:
        super().__init__()
        del self.n2

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        return x + self.ff(h) + self.attn(h)


class Sandwich(Block):
    def __init__(self) -> None:
        super().__init__()
        self.n3, self.n4 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.n3(self.attn(self.n1(x)))
        return x + self.n4(self.ff(self.n2(x)))


class StochasticDepth(Block):
    """Branches are dropped, sequence by sequence, while the model trains."""

    def drop(self, branch: Tensor) -> Tensor:
        if not self.training:
            return branch
        return branch * (torch.rand(len(branch), 1, 1) < 0.8) / 0.8

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.n1(x)))
        return x + self.drop(self.ff(self.n2(x)))


class LayerScale(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gamma1, self.gamma2 = (nn.Parameter(0.1 + torch.rand(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma1 * self.attn(self.n1(x))
        return x + self.gamma2 * self.ff(self.n2(x))


class GatedBranch(Block):
    """How much of a branch is added depends on the token."""

    def __init__(self) -> None:
        super().__init__()
        self.g1, self.g2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.sigmoid(self.g1(x)) * self.attn(self.n1(x))
        return x + torch.sigmoid(self.g2(x)) * self.ff(self.n2(x))


class GatedSkip(Block):
    """The skip connection itself has a number on it, learned per block (as highway networks and ReZero have)."""

    def __init__(self) -> None:
        super().__init__()
        self.keep1, self.keep2 = (nn.Parameter(torch.tensor(0.7)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.keep1 * x + (1 - self.keep1) * self.attn(self.n1(x))
        return self.keep2 * x + (1 - self.keep2) * self.ff(self.n2(x))


class Crossing(Block):
    """A decoder block: self-attention, cross-attention, feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.n3, self.cross = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        x = x + self.cross(self.n3(x), memory)
        return x + self.ff(self.n2(x))


class CrossingPostNorm(Crossing):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.n1(x + self.attn(x))
        x = self.n3(x + self.cross(x, memory))
        return self.n2(x + self.ff(x))


class TwoAttentions(Block):
    """Two self-attentions in one block, one after the other (as a temporal and a spatial one are)."""

    def __init__(self) -> None:
        super().__init__()
        self.n3, self.second = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        x = x + self.second(self.n3(x))
        return x + self.ff(self.n2(x))


class Macaron(Block):
    """Half a feed-forward before attention, half behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.n3, self.first = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.first(self.n3(x))
        x = x + self.attn(self.n1(x))
        return x + 0.5 * self.ff(self.n2(x))


class Subtracting(Block):
    """Branches are taken away from the stream."""

    def forward(self, x: Tensor) -> Tensor:
        x = x - self.attn(self.n1(x))
        return x - self.ff(self.n2(x))


class ScaledSum(Block):
    """The sum, not the branch, has a factor, as in many diffusion models."""

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.attn(self.n1(x))) * 0.5**0.5
        return (x + self.ff(self.n2(x))) * 0.5**0.5


class Interpolating(Block):
    """The skip connection is no sum."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.lerp(x, self.attn(self.n1(x)), 0.5)
        return torch.lerp(x, self.ff(self.n2(x)), 0.5)


class MaskFirst(Block):
    """The stream is the second of two tensors of one shape, by name."""

    def forward(self, mask: Tensor, state: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(state) + 0 * mask.mean()


class MemoryFirst(Crossing):
    def forward(self, memory: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, memory)


class OwnRegisters(Block):
    """Attention also sees tokens that the block puts in front and drops again."""

    def __init__(self) -> None:
        super().__init__()
        self.registers = nn.Parameter(torch.randn(1, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.registers.expand(len(x), -1, -1), x], 1)
        y = y + self.attn(self.n1(y))
        return (y + self.ff(self.n2(y)))[:, 2:]


class FeedForwardOnly(nn.Module):
    """A block without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.ff = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ff(self.n(x))


class ReturnsTuple(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        branch = self.attn(self.n1(x))
        x = x + branch
        return x + self.ff(self.n2(x)), branch


class ReturnsDict(Block):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        branch = self.attn(self.n1(x))
        x = x + branch
        return {"attention": branch, "hidden": x + self.ff(self.n2(x))}


class PassesDict(Block):
    """A state goes from block to block."""

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        x = state["hidden"]
        x = x + self.attn(self.n1(x))
        return {**state, "hidden": x + self.ff(self.n2(x))}


class SequenceFirst(Block):
    """`(token, batch, width)`, as torch's attention takes it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class Masked(Block):
    """Attention that does not see padding; `allowed` is true where a key may be seen."""

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.attn(self.n1(x), None, allowed[:, None, None, :])
        return x + self.ff(self.n2(x))


class Highway(Block):
    """How much of the stream is kept depends on the token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        x = gate * x + (1 - gate) * self.attn(self.n1(x))
        return x + self.ff(self.n2(x))


class Reversible(Block):
    """Two streams side by side; each sub-block reads one and adds to the other."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        first = first + self.attn(self.n1(second))
        second = second + self.ff(self.n2(first))
        return torch.cat([first, second], -1)


class LeakySkip(Block):
    """The skip connection has a constant factor."""

    def forward(self, x: Tensor) -> Tensor:
        x = 0.9 * x + self.attn(self.n1(x))
        return 0.9 * x + self.ff(self.n2(x))


class SkipFromNorm(Block):
    """What goes around attention is what the norm gave."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        x = h + self.attn(h)
        return x + self.ff(self.n2(x))


class Clamped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1.5, 1.5)


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.gelu(self.down(x)))


class AdaptedInside(Block):
    def __init__(self) -> None:
        super().__init__()
        self.adapter = Adapter()

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(super().forward(x))


class Experts(nn.Module):
    """Every token takes a weighted mean of feed-forwards; no single module gives it but this one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.router = nn.ModuleList(FeedForward() for _ in range(3)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum(weights[..., i : i + 1] * one(x) for i, one in enumerate(self.experts))  # type: ignore[return-value]


class OfExperts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.ff = Experts()  # type: ignore[assignment]


# --- models ---


class Model(nn.Module):
    """Blocks and a norm around them."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.step(block, x)
        return self.norm(x)


class OfTuples(Model):
    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)[0]


class OfDicts(Model):
    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)["hidden"]


class OfStates(Model):
    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return block({"hidden": x, "first": x})["hidden"]


class OfMasks(Model):
    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(mask=torch.randn_like(x), state=x)


class OfNumbers(Model):
    """Blocks are also given one number for each sequence, such as a time."""

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(torch.rand(len(x)), x)


class OfMasksOfAnotherWidth(Model):
    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(torch.randn(*x.shape[:2], WIDTH + 8), x)


class OfSequencesFirst(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Shared(nn.Module):
    """One block, three times (as ALBERT has it)."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = Block(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return self.norm(x)


class UShaped(nn.Module):
    """What the first blocks put out is put beside what the last ones read."""

    def __init__(self, *, concatenates: bool) -> None:
        super().__init__()
        self.concatenates = concatenates
        self.down, self.up = (nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.middle = Block()
        self.join = nn.ModuleList(nn.Linear(2 * WIDTH if concatenates else WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        x = self.middle(x)
        for block, join in zip(self.up, self.join, strict=True):
            skip = kept.pop()
            x = block(join(torch.cat([x, skip], -1)) if self.concatenates else x + join(skip))
        return self.norm(x)


class BetweenBlocks(Model):
    """Something is added to the stream between blocks, as per-layer embeddings are."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__(blocks)
        self.each = nn.ParameterList(0.5 * torch.randn(WIDTH) for _ in blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block, added in zip(self.blocks, self.each, strict=True):
            x = block(x + added)
        return self.norm(x)


class OneMoreBlock(Model):
    """A block without attention in front of all others, or behind them."""

    def __init__(self, blocks: Sequence[nn.Module], *, is_last: bool = True) -> None:
        super().__init__(blocks)
        self.extra, self.is_last = FeedForwardOnly(), is_last

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.is_last else self.extra(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(self.extra(x) if self.is_last else x)


class AddedAtTheEnd(Model):
    """A parameter is added behind the last block."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__(blocks)
        self.added = nn.Parameter(3 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x + self.added)


class EarlyExit(Model):
    """The last block runs, and what it gives is not used."""

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.norm(states[-2])


class DropsAToken(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)[:, 1:]
        for block in self.blocks[1:]:
            x = block(x)
        return self.norm(x)


class Rolled(Model):
    """Between blocks, every token moves one place on, in no module."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.roll(1, 1))
        return self.norm(x)


class MixedKinds(nn.Module):
    """Blocks with attention and blocks without, in one list."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() if kind == "a" else FeedForwardOnly() for kind in order)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class EncoderDecoder(nn.Module):
    def __init__(self, decoder: Callable[[], nn.Module] = Crossing) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(decoder() for _ in range(2))
        self.encoder_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        for block in self.encoder:
            source = block(source)
        memory = self.encoder_norm(source)
        for block in self.decoder:
            target = block(memory, target) if isinstance(block, MemoryFirst) else block(target, memory)
        return self.norm(target)


class TokenIds(nn.Module):
    """Ids in, logits out, with a mask under one of the names in use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(32, WIDTH))
        self.blocks = nn.ModuleList(Masked() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def logits(self, ids: Tensor, allowed: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))


class PadNamed(TokenIds):
    def forward(self, ids: Tensor, pad: Tensor) -> Tensor:
        return self.logits(ids, ~pad)


class SourceMaskNamed(TokenIds):
    def forward(self, src: Tensor, src_mask: Tensor) -> Tensor:
        return self.logits(src, src_mask > 0)


class KeyPaddingNamed(TokenIds):
    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        assert key_padding_mask is not None
        return self.logits(tokens, key_padding_mask == 0)


class MaskNamed(TokenIds):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.logits(x, torch.ones_like(x).bool() if mask is None else mask)


class AttentionMaskNamed(TokenIds):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.logits(input_ids, attention_mask.bool())


class Nested(nn.Module):
    """Blocks two levels down, beside each other."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.trunk = nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(block()) for _ in range(3))})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.trunk["layers"]:  # type: ignore[union-attr]
            x = block(x)
        return x


class InDict(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: block() for name in ("low", "middle", "high")})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


class OfTwoStreams(Model):
    def forward(self, x: Tensor) -> Tensor:
        first, second = through(self.blocks, torch.cat([x, x], -1)).chunk(2, -1)
        return self.norm((first + second) / 2)


class WithRegisters(Model):
    """Two tokens that no input has, in front from the first block on or behind from the second."""

    def __init__(self, blocks: Sequence[nn.Module], *, midway: bool) -> None:
        super().__init__(blocks)
        self.registers, self.midway = nn.Parameter(torch.randn(1, 2, WIDTH)), midway

    def forward(self, x: Tensor) -> Tensor:
        added = self.registers.expand(len(x), -1, -1)
        if not self.midway:
            return self.norm(through(self.blocks, torch.cat([added, x], 1))[:, 2:])
        x = self.blocks[0](x)
        return self.norm(through(self.blocks[1:], torch.cat([x, added], 1)))


class Adapted(Model):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__(blocks)
        self.adapters = nn.ModuleList(Adapter() for _ in blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            x = adapter(block(x))
        return self.norm(x)


class TwoStacks(nn.Module):
    """Two stacks beside each other, which change places after every block or do not."""

    def __init__(self, *, change_places: bool) -> None:
        super().__init__()
        self.left, self.right = (nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.norm, self.change_places = nn.LayerNorm(WIDTH), change_places

    def forward(self, x: Tensor) -> Tensor:
        y = x.flip(1)
        for left, right in zip(self.left, self.right, strict=True):
            x, y = left(x), right(y)
            x, y = (y, x) if self.change_places else (x, y)
        return self.norm(x + y)


class Checkpointed(Model):
    """Blocks that training runs a second time instead of keeping what they computed."""

    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


class StepVector(nn.Module):
    """One block, three times, with a vector for each."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm, self.steps = Block(), nn.LayerNorm(WIDTH), nn.Embedding(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for vector in self.steps.weight:
            x = self.block(x + vector)
        return self.norm(x)


class AnotherOrder(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(through([self.blocks[1], self.blocks[0], self.blocks[2]], x))


class Scaled(Model):
    def step(self, block: nn.Module, x: Tensor) -> Tensor:
        return 2.0 * block(x)


class MeanOfAll(Model):
    """Every block reads the mean of what all before it gave."""

    def forward(self, x: Tensor) -> Tensor:
        given = [x]
        for block in self.blocks:
            given.append(block(sum(given) / len(given)))
        return self.norm(given[-1])


class Probed(Model):
    """The final norm and a head read every block."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__(blocks)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        read = []
        for block in self.blocks:
            x = block(x)
            read.append(self.head(self.norm(x)))
        return torch.stack(read)


class BiasNamed(TokenIds):
    """The mask is what is added to the scores."""

    def forward(self, ids: Tensor, bias: Tensor) -> Tensor:
        return self.logits(ids, bias > -1)


def through(blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


# --- cases ---


def _inputs() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH)


def _with_common_vectors(model: nn.Module) -> nn.Module:
    """Every feed-forward adds a vector of its own that all tokens share; norms have weights of their own."""
    feed_forwards = [part for part in model.modules() if isinstance(part, FeedForward)]
    with torch.no_grad():
        for number, part in enumerate(feed_forwards):
            part[2].bias.copy_((0.3 + 0.25 * number) * torch.randn(WIDTH))  # type: ignore[union-attr, operator]
        for part in model.modules():
            if isinstance(part, nn.LayerNorm):
                part.weight.copy_(1 + 0.3 * torch.randn(WIDTH))
                part.bias.copy_(0.1 * torch.randn(WIDTH))
    return model


def _of_blocks(block: Callable[[], nn.Module], model: Callable[..., Model] = Model, **facts: Any) -> Handwritten:
    made = model([block() for _ in range(3)])
    _with_common_vectors(made)
    return Handwritten(model=made, batch=_inputs(), blocks=list(made.blocks), final_norm=made.norm, **facts)


def _shared() -> Handwritten:
    model = Shared()
    _with_common_vectors(model)
    return Handwritten(model=model, batch=_inputs(), blocks=[model.block], final_norm=model.norm)


def _shared_in_a_list() -> Handwritten:
    first, second = Block(), Block()
    model = Model([first, second, first, second])
    _with_common_vectors(model)
    return Handwritten(model=model, batch=_inputs(), blocks=[first, second], final_norm=model.norm)


def _u_shaped(*, concatenates: bool) -> Handwritten:
    model = UShaped(concatenates=concatenates)
    _with_common_vectors(model)
    blocks = [*model.down, model.middle, *model.up]
    return Handwritten(model=model, batch=_inputs(), blocks=blocks, final_norm=model.norm)


def _encoder_decoder(decoder: Callable[[], nn.Module], targets: int, **facts: Any) -> Handwritten:
    model = EncoderDecoder(decoder)
    _with_common_vectors(model)
    batch = {"source": _inputs(), "target": torch.randn(BATCH, targets, WIDTH)}
    return Handwritten(model=model, batch=batch, blocks=[*model.encoder, *model.decoder], **facts)


LENGTHS = (7, 4, 5)


def _padded(model: type[TokenIds], ids: str, mask: str, dtype: torch.dtype, *, marks_padding: bool) -> Handwritten:
    made = model()
    _with_common_vectors(made)
    keep = torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]
    given = (~keep if marks_padding else keep).to(dtype)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS))
    batch: Any = {ids: tokens, mask: given} if mask else (tokens, given)
    return Handwritten(model=made, batch=batch, blocks=list(made.blocks), final_norm=made.norm, keep=keep)


def _holding(container: Callable[[Callable[[], nn.Module]], nn.Module], block: type[Block]) -> Handwritten:
    model = container(partial(block, TorchAttention))
    _with_common_vectors(model)
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    return Handwritten(model=model, batch=_inputs(), blocks=blocks)


def _in_sequential(block: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(block() for _ in range(3)))


class TorchBlock(nn.Module):
    """The block of the issue: torch's attention called in the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.ff = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class TorchCrossing(TorchBlock):
    """A decoder block around two of torch's attention modules."""

    def __init__(self) -> None:
        super().__init__()
        self.n3, self.cross = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        h = self.n1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        x = x + self.cross(self.n3(x), memory, memory, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class TorchPostNorm(TorchBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(x + self.attn(x, x, x, need_weights=False)[0])
        return self.n2(x + self.ff(x))


def one_large_common_vector() -> Handwritten:
    """Three pre-norm blocks around torch's attention, of which the last adds one large vector to every token."""
    model = nn.Sequential(TorchBlock(), TorchBlock(), TorchBlock())
    with torch.no_grad():
        model[2].ff[2].bias.fill_(20.0)  # type: ignore[index, union-attr]
    return Handwritten(model=model, batch=_inputs(), blocks=list(model))


def _two_kinds() -> Handwritten:
    model = Model([PostNorm(), PostNorm(), Block(), Block()])
    _with_common_vectors(model)
    return Handwritten(model=model, batch=_inputs(), blocks=list(model.blocks), final_norm=model.norm)


def _mixed(order: str) -> Handwritten:
    model = MixedKinds(order)
    _with_common_vectors(model)
    return Handwritten(model=model, batch=_inputs(), blocks=list(model.blocks), final_norm=model.norm)


def _torch_block(block: Callable[[], nn.Module]) -> Handwritten:
    model = nn.Sequential(*(block() for _ in range(3)))
    _with_common_vectors(model)
    return Handwritten(model=model, batch=_inputs(), blocks=list(model))


def _torch_encoder(**options: Any) -> Handwritten:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=True, **options)
    norm = nn.LayerNorm(WIDTH) if options else None
    model = nn.TransformerEncoder(layer, 3, norm=norm, enable_nested_tensor=False)
    with torch.no_grad():
        for number, one in enumerate(model.layers):
            one.linear2.bias.copy_((0.3 + 0.25 * number) * torch.randn(WIDTH))  # type: ignore[union-attr, operator]
    return Handwritten(model=model, batch=_inputs(), blocks=list(model.layers), final_norm=norm)


def _torch_encoder_decoder() -> Handwritten:
    model = nn.Transformer(WIDTH, HEADS, 2, 2, 32, 0.0, batch_first=True)
    with torch.no_grad():
        for number, one in enumerate((*model.encoder.layers, *model.decoder.layers)):
            one.linear2.bias.copy_((0.3 + 0.25 * number) * torch.randn(WIDTH))  # type: ignore[union-attr, operator]
    batch = {"src": _inputs(), "tgt": torch.randn(BATCH, 5, WIDTH)}
    return Handwritten(model=model, batch=batch, blocks=[*model.encoder.layers, *model.decoder.layers])


def _two_stacks(*, change_places: bool) -> Handwritten:
    model = TwoStacks(change_places=change_places)
    _with_common_vectors(model)
    return Handwritten(model=model, batch=_inputs(), blocks=[*model.left, *model.right])


def _step_vector() -> Handwritten:
    model = StepVector()
    _with_common_vectors(model)
    return Handwritten(model=model, batch=_inputs(), blocks=[model.block], final_norm=model.norm)


def _bias_as_mask() -> Handwritten:
    case = _padded(BiasNamed, "ids", "bias", torch.float32, marks_padding=False)
    batch = {"ids": case.batch["ids"], "bias": torch.where(case.batch["bias"] > 0, 0.0, -1e9)}
    return replace(case, batch=batch)


CASES: dict[str, Callable[[], Handwritten]] = {
    "pre-norm": partial(_of_blocks, Block),
    "post-norm": partial(_of_blocks, PostNorm),
    "parallel": partial(_of_blocks, Parallel),
    "parallel, one norm": partial(_of_blocks, ParallelOneNorm),
    "sandwich": partial(_of_blocks, Sandwich),
    "cross-attention, two lengths": partial(_encoder_decoder, Crossing, 5),
    "cross-attention, one length": partial(_encoder_decoder, Crossing, TOKENS),
    "cross-attention, post-norm": partial(_encoder_decoder, CrossingPostNorm, 5),
    "cross-attention, torch's": partial(_encoder_decoder, TorchCrossing, TOKENS),
    "one block three times": _shared,
    "two blocks twice": _shared_in_a_list,
    "stochastic depth": partial(_of_blocks, StochasticDepth),
    "LayerScale": partial(_of_blocks, LayerScale),
    "gated branches": partial(_of_blocks, GatedBranch),
    "gated skips": partial(_of_blocks, GatedSkip),
    "U-shaped, added": partial(_u_shaped, concatenates=False),
    "U-shaped, concatenated": partial(_u_shaped, concatenates=True),
    "added between blocks": partial(_of_blocks, Block, BetweenBlocks),
    "blocks return tuples": partial(
        _of_blocks, ReturnsTuple, OfTuples, features=lambda h: h[0] if isinstance(h, tuple) else h
    ),
    "blocks return dicts": partial(
        _of_blocks, ReturnsDict, OfDicts, features=lambda h: h["hidden"] if isinstance(h, dict) else h
    ),
    "blocks pass a dict on": partial(
        _of_blocks, PassesDict, OfStates, features=lambda h: h["hidden"] if isinstance(h, dict) else h
    ),
    "sequence first": partial(_of_blocks, SequenceFirst, OfSequencesFirst, features=lambda h: h.transpose(0, 1)),
    "sdpa_kernel of flash attention": partial(
        _of_blocks, partial(Block, partial(ChosenKernel, SDPBackend.FLASH_ATTENTION))
    ),
    "sdpa_kernel of the plain one": partial(_of_blocks, partial(Block, partial(ChosenKernel, SDPBackend.MATH))),
    "sdpa_kernel of two": partial(
        _of_blocks, partial(Block, partial(ChosenKernel, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH))
    ),
    "two attentions": partial(_of_blocks, TwoAttentions),
    "macaron": partial(_of_blocks, Macaron),
    "subtracted branches": partial(_of_blocks, Subtracting),
    "sums with a factor": partial(_of_blocks, ScaledSum),
    "skips that are no sums": partial(_of_blocks, Interpolating),
    "registers of each block": partial(_of_blocks, OwnRegisters),
    "a mask before the stream": partial(_of_blocks, MaskFirst, OfMasks, received=lambda args, kwargs: kwargs["state"]),
    "wider features before the stream": partial(
        _of_blocks, MaskFirst, OfMasksOfAnotherWidth, received=lambda args, kwargs: args[-1]
    ),
    "one number per sequence before the stream": partial(
        _of_blocks, MaskFirst, OfNumbers, received=lambda args, kwargs: args[-1]
    ),
    "memory before the stream": partial(_encoder_decoder, MemoryFirst, TOKENS, received=lambda args, kwargs: args[-1]),
    "pre-norm blocks between post-norm blocks": _two_kinds,
    "a block without attention in the middle": partial(_mixed, "aama"),
    "a block without attention at the end": partial(_mixed, "aam"),
    "a block without attention at the start": partial(_mixed, "maa"),
    "one more block in front": partial(_of_blocks, Block, partial(OneMoreBlock, is_last=False)),
    "one more block behind": partial(_of_blocks, Block, OneMoreBlock),
    "added behind the last block": partial(_of_blocks, Block, AddedAtTheEnd),
    "the last block is not used": partial(_of_blocks, Block, EarlyExit),
    "a token dropped": partial(_of_blocks, Block, DropsAToken),
    "tokens rolled": partial(_of_blocks, Block, Rolled),
    "a mask named pad": partial(_padded, PadNamed, "ids", "pad", torch.bool, marks_padding=True),
    "a mask named src_mask": partial(_padded, SourceMaskNamed, "src", "src_mask", torch.long, marks_padding=False),
    "a mask named key_padding_mask": partial(
        _padded, KeyPaddingNamed, "tokens", "key_padding_mask", torch.float32, marks_padding=True
    ),
    "a mask named mask": partial(_padded, MaskNamed, "x", "mask", torch.bool, marks_padding=False),
    "a mask named attention_mask": partial(
        _padded, AttentionMaskNamed, "input_ids", "attention_mask", torch.long, marks_padding=False
    ),
    "a mask by position": partial(_padded, PadNamed, "", "", torch.bool, marks_padding=True),
    "one large common vector": one_large_common_vector,
    "torch's attention in pre-norm blocks, Sequential": partial(_torch_block, TorchBlock),
    "torch's attention in post-norm blocks, Sequential": partial(_torch_block, TorchPostNorm),
    "wrapped torch's attention, pre-norm, Sequential": partial(_holding, _in_sequential, Block),
    "wrapped torch's attention, post-norm, Sequential": partial(_holding, _in_sequential, PostNorm),
    "torch's attention, pre-norm, ModuleList": partial(_of_blocks, TorchBlock),
    "torch's attention, post-norm, ModuleList": partial(_of_blocks, TorchPostNorm),
    "torch's attention, pre-norm, ModuleDict": partial(_holding, InDict, Block),
    "torch's attention, post-norm, ModuleDict": partial(_holding, InDict, PostNorm),
    "torch's attention, pre-norm, nested": partial(_holding, Nested, Block),
    "torch's attention, post-norm, nested": partial(_holding, Nested, PostNorm),
    "torch's encoder, post-norm": _torch_encoder,
    "torch's encoder, pre-norm": partial(_torch_encoder, norm_first=True),
    "torch's encoder and decoder": _torch_encoder_decoder,
    "highway gates": partial(_of_blocks, Highway),
    "two streams side by side": partial(_of_blocks, Reversible, OfTwoStreams, features=lambda h: h[..., :WIDTH]),
    "skips with a constant factor": partial(_of_blocks, LeakySkip),
    "a skip from the norm": partial(_of_blocks, SkipFromNorm),
    "clamped streams": partial(_of_blocks, Clamped),
    "adapters inside blocks": partial(_of_blocks, AdaptedInside),
    "adapters between blocks": partial(_of_blocks, Block, Adapted),
    "experts": partial(_of_blocks, OfExperts),
    "registers in front": partial(_of_blocks, Block, partial(WithRegisters, midway=False)),
    "registers from the second block on": partial(_of_blocks, Block, partial(WithRegisters, midway=True)),
    "two stacks beside each other": partial(_two_stacks, change_places=False),
    "two stacks that change places": partial(_two_stacks, change_places=True),
    "checkpointed blocks": partial(_of_blocks, Block, Checkpointed),
    "one block with a vector for each pass": _step_vector,
    "blocks in another order than their list": partial(_of_blocks, Block, AnotherOrder),
    "scaled between blocks": partial(_of_blocks, Block, Scaled),
    "each block reads the mean of all before": partial(_of_blocks, Block, MeanOfAll),
    "a head on every block": partial(_of_blocks, Block, Probed),
    "a mask that is a bias": _bias_as_mask,
}


def handwritten(name: str) -> Handwritten:
    torch.manual_seed(0)
    return CASES[name]()
