"""Hooks that report the hidden states at every place of a running model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from oversmooth.errors import TokensChanged
from oversmooth.models.hooks.chain import Chain, StackChain, version_of
from oversmooth.models.hooks.places import (
    STREAM,
    SUB_BLOCKS,
    Observe,
    ObserverFailed,
    Place,
    all_received,
    all_returned,
    received,
    returned,
)
from oversmooth.models.identify import inside
from oversmooth.models.source import Stack
from oversmooth.models.stores.module import ModuleStore

# --- the hooks of one block: the stream, the branches and the norms of its sub-blocks, whatever its form ---

NAME_OF = {"attn": "attention", "cross": "cross-attention", "ffn": "the feed-forward"}


class BlockTap:
    """The hooks of one block. `x` is the current residual stream."""

    def __init__(self, tap: "StackTap", position: int):
        self.tap = tap
        self.arch = tap.stack.arch
        self.names = tap.stack.names.blocks[position]
        self.depths = [depth + 1 for depth in tap.stack.passes[position]]
        self.subs = [sub for sub in SUB_BLOCKS if sub != "cross" or "cross_norm" in self.names.norms]
        self.x: Tensor = torch.empty(0)
        self._version = 0
        """Of `x` when it was taken: a block that writes into it changes this."""
        self.input_at = self._output_at = 0
        """Where the stream is among all features that the block receives and returns."""
        self._received: list[Tensor] = []
        """All features that the first block received, until it shows which of them it adds to."""

    def attach(self) -> Iterator[Any]:
        if self.arch.paths.before or self.arch.paths.after:
            yield from self._attach_readers()
            return
        value_owner = self.tap.store.owner(self.names.value.weight)
        if isinstance(value_owner, nn.MultiheadAttention) and not self.names.norms:
            yield value_owner.register_forward_pre_hook(self._enter, with_kwargs=True)
            yield self._on_output(value_owner, partial(self._add, "attn"))  # onto the input of the module itself
            yield value_owner.register_forward_hook(lambda module, args, output: self._left())
            return
        block = self.tap.store.module(self.names.path)
        yield block.register_forward_pre_hook(self._enter, with_kwargs=True)
        yield from {
            "pre": self._attach_pre,
            "post": self._attach_post,
            "sandwich": self._attach_sandwich,
            "parallel": self._attach_parallel,
        }[self.arch.residual]()
        yield block.register_forward_hook(self._leave)

    def _norm(self, role: str) -> nn.Module | None:
        names = self.names.norms.get(role)
        return self.tap.store.norm(names) if names else None

    # --- what is the same for all blocks ---

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        features = [self.tap.batched(h) for h in all_received(args, kwargs) if h.ndim > 1]
        candidates = [
            h for h in features if h.shape[-1] == self.tap.d_model
        ] or features  # of streams side by side, one
        if self.tap.chain is not None and len(candidates) > 1:
            self._choose_input(self.tap.chain, candidates)
        x = self.tap.own(candidates[min(self.input_at, len(candidates) - 1)])
        tap, seen = self.tap, self.tap.depth
        tap.depth = next((depth for depth in self.depths if depth > seen), self.depths[0])
        if tap.depth == 1:
            tap.begin(self.names.path, x)
        elif tap.depth > seen + 1:
            tap.enter(self.names.path, x, over_other=True)
            tap.emit("other_sum", x, depth=tap.depth - 1)
        elif tap.enter(self.names.path, x):
            tap.emit("between", x, depth=tap.depth - 1)
        self._hold(x)

    def _choose_input(self, chain: StackChain, candidates: list[Tensor]) -> None:
        """Which of several features is the stream: what the block before gave; in the first block what it adds to."""
        if self.tap.depth == 0:
            self._received = candidates
            chain.unsure = self
        elif (place := chain.same_among(candidates)) is not None:
            self.input_at = place
            chain.inputs_at.append(place)

    def _hold(self, x: Tensor) -> None:
        self.x, self._version = x, version_of(x)

    def _x_beside(self, h: Tensor) -> Tensor:
        """The stream on the device of `h`: where blocks are on several, the block got a copy behind our hook."""
        return self.x.to(h.device)

    def _begin(self, h: Tensor) -> None:
        """Attention begins; what the block did before it, as in a macaron of two feed-forwards, is another part."""
        if h.shape == self.x.shape and not torch.equal(h, self._x_beside(h)):
            h = self.tap.own(h)
            self._added_in_chain("the part before attention", h)
            self.tap.emit("other_sum", h)
            self._hold(h)

    def _leave(self, module: nn.Module, args: object, output: Any) -> None:
        h = self._given(output)
        if self.arch.residual in ("pre", "parallel"):
            self.added(self.subs[-1], h)
        elif self.tap.chain is not None:
            where = f"the output of {self.names.path or 'the block'}"
            self.tap.chain.must_be(where, h, ours=self.arch.residual == "sandwich")
        self._left()

    def _left(self) -> None:
        self.x, self._received = torch.empty(0), []
        if self.tap.chain is not None:
            self.tap.chain.left(is_last=self.tap.depth == self.tap.last)

    def _given(self, output: Any) -> Tensor:
        """The stream among what the block returned: on the first pass, what its own modules and its input explain."""
        like = self.tap.batched(self.x) if self.arch.token_axis == 0 else self.x  # as the model passes it on
        candidates = [self._in_order(h) for h in all_returned(output, like)]
        if self.tap.chain is not None and len(candidates) > 1:
            adds, chain = self.arch.residual in ("pre", "parallel"), self.tap.chain
            self._output_at = (chain.sum_among if adds else chain.same_among)(candidates) or 0
        return candidates[min(self._output_at, len(candidates) - 1)]

    def _features(self, output: Any) -> Tensor:
        return self._in_order(returned(output, self.x))

    def _in_order(self, h: Tensor) -> Tensor:
        if h.ndim == 2 and h.numel() == self.x.numel():  # some blocks flatten (batch, token) for their feed-forward
            return h.reshape(self.x.shape)
        return self.tap.batched(h)

    def added(self, sub: str, h: Tensor) -> None:
        """The stream is `h` after the branch of `sub` was added."""
        if self.tap.chain is not None and version_of(self.x) != self._version:
            self.tap.chain.chain.writes_into_stream = True
        if self.tap.chain is not None and self._received and sub == "attn":
            self.tap.chain.adds_to(self._received, h)
            self._received = []
        h = self.tap.own(h)
        self._added_in_chain(NAME_OF[sub], h, is_attention=sub == "attn")
        if self.tap.wants(f"{sub}_branch"):
            self.tap.emit(f"{sub}_branch", h - self._x_beside(h))
        self.tap.emit(f"{sub}_sum", h)
        self._hold(h)

    def _added_in_chain(self, part: str, h: Tensor, *, is_attention: bool = False) -> None:
        if self.tap.chain is not None:
            names = (self.names.gain, self.names.output.bias)
            gain, bias = (self.tap.store.read(name) if is_attention and name else None for name in names)
            is_read = bool(self.arch.paths.before) and self.arch.residual == "pre"
            self.tap.chain.added(self.names.path, part, h, gain=gain, bias=bias, must=is_attention, is_read=is_read)

    # --- blocks that are no modules ---

    def _attach_readers(self) -> Iterator[Any]:
        """The stream is seen where modules receive it: before attention, after it, and behind the last block."""
        paths, block = self.arch.paths, self.names
        before = self.tap.store.module(inside(block.path, paths.before, block.index))
        yield before.register_forward_pre_hook(self._enter_behind, with_kwargs=True)
        if paths.after:
            after = self.tap.store.module(inside(block.path, paths.after, block.index))
            yield self.tap.on_received(after, self._sum_reached)
        norm = self._norm("attn_norm")
        if norm is not None and self.arch.residual == "post":
            yield self.tap.on_returned(norm, partial(self._normed, "attn"))
        if paths.end and block.position == len(self.tap.stack.names.blocks) - 1:
            yield self.tap.on_received(self.tap.store.module(paths.end), self.tap.ended)

    def _enter_behind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The stream before attention is also the stream after the block before."""
        self.tap.ended(self.tap.batched(received(args, kwargs)))
        self._enter(module, args, kwargs)
        self.tap.open = self

    def _sum_reached(self, h: Tensor) -> None:
        if self.tap.open is self and h.shape == self.x.shape:
            self.added("attn", h)

    # --- the four forms ---

    def _attach_pre(self) -> Iterator[Any]:
        for previous, sub in zip((None, *self.subs[:-1]), self.subs, strict=True):
            norm = self._norm(f"{sub}_norm")
            if norm is None:
                continue
            if previous:
                yield self._sum_at(norm, previous)
            elif self.arch.proof is not None:
                yield norm.register_forward_pre_hook(lambda module, args: self._begin(self._features(args[0])))
            yield self._on_output(norm, partial(self.tap.emit, f"{sub}_norm"))

    def _attach_post(self) -> Iterator[Any]:
        for sub in self.subs:
            norm = self._norm(f"{sub}_norm")
            assert norm is not None, "a post-norm block has a norm after every sum"
            yield self._sum_at(norm, sub)
            yield self._on_output(norm, partial(self._normed, sub))

    def _normed(self, sub: str, h: Tensor) -> None:
        if self.tap.chain is not None:
            where = f"the output of the norm behind {NAME_OF[sub]} in {self.names.path}"
            self.tap.chain.became(where, h)
        h = self.tap.own(h)
        self.tap.emit(f"{sub}_norm", h)
        self._hold(h)

    def _attach_sandwich(self) -> Iterator[Any]:
        for sub in self.subs:
            norm, branch_norm = self._norm(f"{sub}_norm"), self._norm(f"{sub}_branch_norm")
            assert branch_norm is not None, "a sandwich block has a norm on every branch"
            if norm is not None:
                yield self._on_output(norm, partial(self.tap.emit, f"{sub}_norm"))
            yield self._on_output(branch_norm, partial(self._add, sub))

    def _attach_parallel(self) -> Iterator[Any]:
        for sub in self.subs:
            norm = self._norm(f"{sub}_norm")
            if norm is not None:
                yield self._on_output(norm, partial(self.tap.emit, f"{sub}_norm"))
        # The feed-forward may run first in the block's code; the stream is the block's input either way.
        yield self._on_output(self.tap.store.owner(self.names.output.weight), partial(self._add, "attn"))

    def _sum_at(self, norm: nn.Module, sub: str) -> Any:
        """A norm that reads the stream after the branch of a sub-block was added."""
        return norm.register_forward_pre_hook(lambda module, args: self.added(sub, self._features(args[0])))

    def _on_output(self, module: nn.Module, act: Callable[[Tensor], None]) -> Any:
        return module.register_forward_hook(lambda module, args, output: act(self._features(output)))

    def _add(self, sub: str, branch: Tensor) -> None:
        self.added(sub, self._x_beside(branch) + branch)


# --- hooks that report hidden states during a forward pass ---


@contextmanager
def observed(
    stacks: Sequence[Stack],
    store: ModuleStore,
    observe: Observe,
    wants: Callable[[str, Stack], bool],
) -> Iterator["Restart"]:
    """Calls `observe` with the features at every place that `wants(place name, stack)`; yields what to call before a run."""
    taps = [StackTap(stack, store, observe, wants) for stack in stacks]

    def restart(chain: Chain | None = None, *, copies: bool | None = None) -> None:
        for tap in taps:
            tap.restart(chain, copies=copies)

    with ExitStack() as attached:
        for tap in taps:
            attached.callback(tap.detach)
            tap.handles += tap.attach()
        yield restart


@runtime_checkable
class Restart(Protocol):
    """Called before every run of the model; with a chain, the run is checked too."""

    def __call__(self, chain: Chain | None = None, *, copies: bool | None = None) -> None:
        """`copies`: from now on the held stream is a copy, for models that write into it."""


class StackTap:
    """The passes of one stack during one run of the model."""

    def __init__(self, stack: Stack, store: ModuleStore, observe: Observe, wants: Callable[[str, Stack], bool]):
        self.stack = stack
        self.store = store
        self._observe = observe
        self._wants = wants
        self.handles: list[Any] = []
        self.depth = 0
        self.open: BlockTap | None = None
        """The block whose end has not been seen, where blocks are no modules."""
        self._deepest = self.last = max(depth for passes in stack.passes for depth in passes) + 1
        self.chain: StackChain | None = None
        """The check of the run under way."""
        self.copies = False
        self._tokens = 0
        """Tokens in the stream, of all sequences."""
        self._norm_calls = self._norm_call = 0
        """How often the final norm ran on this pass, and which of its calls reads the end of the stream."""
        self._between: set[int] = set()
        """Depths of blocks whose input something else makes than the block before."""
        self._other_width: tuple[str, str] | None = None
        """What the first block reads and what attention reads, in words, where their widths differ."""

    def restart(self, chain: Chain | None = None, *, copies: bool | None = None) -> None:
        self.depth = self._norm_calls = 0
        self.open = None
        self.chain = None if chain is None else chain.stacks[self.stack.label]
        self.copies = self.copies if copies is None else copies
        if self.chain is not None and self._other_width is not None:
            self.chain.broken.append(self._other_width)

    def detach(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def own(self, h: Tensor) -> Tensor:
        """The features to keep: a copy if the blocks of this model write into the stream."""
        return h.clone() if self.copies else h

    def begin(self, block: str, x: Tensor) -> None:
        """The first block reads the stream."""
        if self.chain is not None:
            if x.shape[-1] != self.d_model:  # such as two streams side by side, of which attention reads one
                reads = f"the {x.shape[-1]} channels that {block} reads"
                self._other_width = reads, f"the {self.d_model} of its attention"
                self.chain.broken.append(self._other_width)
                self.detach()  # inputs that do not fit look the same: the model itself says so, further on
                return
            self.chain.began(f"the input of {block}", x)
        self.emit("embedding", x, depth=0)

    def enter(self, block: str, x: Tensor, *, over_other: bool = False) -> bool:
        """A later block reads the stream; whether something acts between it and the block before."""
        if self.chain is not None and self.chain.entered(block, x, over_other=over_other):
            self._between.add(self.depth)
        return self.depth in self._between

    def ended(self, h: Tensor) -> None:
        """The stream behind the block that is open."""
        block, self.open = self.open, None
        if block is not None and h.shape == block.x.shape:
            block.added("ffn", h)
        if self.chain is not None and self.depth:
            self.chain.left(is_last=self.depth == self.last)

    def wants(self, name: str) -> bool:
        return self._wants(name, self.stack)

    def emit(self, name: str, h: Tensor, depth: int | None = None) -> None:
        self._require_tokens(name, h)
        if not self.wants(name):
            return
        place = Place(self.stack.label, self.depth if depth is None else depth, name)
        try:
            self._observe(place, h)
        except Exception as error:
            raise ObserverFailed(place) from error

    def _require_tokens(self, name: str, h: Tensor) -> None:
        """Features of different tokens are not one stream."""
        if name == "embedding":
            self._tokens = h.shape[0] * h.shape[1]
        elif name in STREAM and h.shape[0] * h.shape[1] != self._tokens:
            where = f"block {self.depth - 1}" + (f" of {self.stack.label}" if self.stack.label else "")
            raise TokensChanged(where, self._tokens // h.shape[0], h.shape[1])

    def attach(self) -> Iterator[Any]:
        for position in range(len(self.stack.names.blocks)):
            yield from BlockTap(self, position).attach()
        yield from self._attach_ends()
        if self.stack.names.final_norm:
            owner = self.store.owner(self.stack.names.final_norm.weight)
            yield owner.register_forward_hook(self._final_norm)

    def _final_norm(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        h = self.batched(returned(output))
        if h.shape[0] * h.shape[1] != self._tokens or self.depth < self._deepest:
            return  # used once more, on a pooled token or for a head on an earlier block
        self._norm_calls += 1
        if self.chain is not None and args:
            if self.chain.is_earlier(self.batched(args[0])):
                return  # backbones norm what other blocks give, too
            self._norm_call = self._norm_calls
            self.chain.must_be("the input of the final norm", self.batched(args[0]))
            self.chain.became("the output of the final norm", h)
        if self._norm_calls == max(self._norm_call, 1):
            self.emit("final_norm", h, self.last)

    def _attach_ends(self) -> Iterator[Any]:
        """Of hybrids: the stream before the first block and after the last, where those have no softmax attention."""
        names = self.stack.names
        paths = {} if self.stack.arch.passes else names.paths_of_all(self.stack.arch.paths.block)
        have_attention = {block.index for block in names.blocks}
        first, last = 0, names.blocks_in_model - 1
        if paths and first not in have_attention:
            yield self.on_received(self.store.module(paths[first]), lambda h: self.emit("embedding", h, 0))
        if paths and last not in have_attention:
            self.last = last + 1
            yield self.on_returned(self.store.module(paths[last]), self._other_end)

    def on_received(self, module: nn.Module, act: Callable[[Tensor], None]) -> Any:
        return module.register_forward_pre_hook(
            lambda module, args, kwargs: act(self.batched(received(args, kwargs))), with_kwargs=True
        )

    def on_returned(self, module: nn.Module, act: Callable[[Tensor], None]) -> Any:
        return module.register_forward_hook(lambda module, args, output: act(self.batched(returned(output))))

    def _other_end(self, h: Tensor) -> None:
        """The last block of a hybrid, without softmax attention."""
        if self.chain is not None:
            self.chain.became("the output of the last block", h)
            self.chain.left(is_last=True)
        self.emit("other_sum", h, self.last)

    def batched(self, h: Tensor) -> Float[Tensor, "batch token d_model"]:
        """Features as sequences: grids row by row, packed tokens as one sequence."""
        if h.ndim == 2:
            return h[None]
        if h.ndim > 3:
            d_model = self.d_model
            return h.flatten(1, -2) if h.shape[-1] == d_model else h.flatten(2).mT
        return h.transpose(0, 1) if self.stack.arch.token_axis == 0 else h

    @cached_property
    def d_model(self) -> int:
        return self.stack.weights(0, self.store.read).d_model
