"""Where features are seen: hooks that report the residual stream, the branches and the norms of every block.

    place         what it is
    embedding     what enters the first block
    attn_norm     output of the attention sub-block's norm (before attention, or after the sum in post-norm blocks)
    attn_branch   what attention adds, with its gain and branch norm
    attn_sum      the stream after attention was added
    cross_*       the same for a decoder's cross-attention
    ffn_*         the same for the feed-forward sub-block
    other_sum     the stream after blocks without softmax attention (hybrids only)
    final_norm    output of the norm after the last block

Sums are not modules, so they are seen where the next module receives them: the input of the next norm, or the output
of the block. In parallel blocks attention counts as added first. No tensor is kept beyond its block.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from oversmooth.models.resolve import inside
from oversmooth.models.source import Stack
from oversmooth.models.stores.module import ModuleStore

SUB_BLOCKS = ("attn", "cross", "ffn")
STREAM = ("embedding", "other_sum", "attn_sum", "cross_sum", "ffn_sum", "final_norm")
"""Places on the residual stream of every model; in post-norm blocks the norms are on it too (`on_stream`)."""
NORMS = ("attn_norm", "cross_norm", "ffn_norm")
BRANCHES = ("attn_branch", "cross_branch", "ffn_branch")
PLACES = (*STREAM, *NORMS, *BRANCHES)


def on_stream(name: str, residual: str) -> bool:
    """Whether a place lies on the residual stream, so that changes between such places add up over depth."""
    return name in STREAM or (residual == "post" and name in NORMS)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One place in one pass through a model."""

    stack: str
    depth: int
    """0 for the embedding, k + 1 in block k, as in the hidden states of transformers; in passes, not in weights."""
    name: str


Observe = Callable[[Place, Float[Tensor, "batch token d_model"]], None]


class ObserverFailed(Exception):
    """Carries an error of whoever looks on (its cause) through the model's forward pass, apart from the model's own."""

    def __init__(self, place: Place):
        self.place = place
        super().__init__(f"an observer failed at depth {place.depth}, {place.name}")


@contextmanager
def observed(
    stacks: Sequence[Stack], store: ModuleStore, observe: Observe, wants: Callable[[str, Stack], bool]
) -> Iterator[Callable[[], None]]:
    """Calls `observe` with the features at every wanted place while the model runs; yields what to call before a run.

    `wants(place name, stack)` avoids the work of places nobody asked for. Hooks are removed whatever happens.
    """
    handles: list[Any] = []
    taps = [_StackTap(stack, store, observe, wants) for stack in stacks]

    def restart() -> None:
        for tap in taps:
            tap.restart()

    try:
        for tap in taps:
            handles += tap.attach()
        yield restart
    finally:
        for handle in handles:
            handle.remove()


def received(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a module was called with: the first features, or those that have a usual name."""
    usual = [kwargs[name] for name in ("hidden_states", "query", "src", "x") if name in kwargs]
    tensors = [value for value in (*args, *usual, *kwargs.values()) if isinstance(value, Tensor)]
    features = [value for value in tensors if value.is_floating_point()]
    assert features, "a block receives its hidden states"
    return features[0]


def _first(output: Any) -> Tensor:
    found = output[0] if isinstance(output, tuple | list) else output
    assert isinstance(found, Tensor)
    return found


class _StackTap:
    """The passes of one stack during one run of the model."""

    def __init__(self, stack: Stack, store: ModuleStore, observe: Observe, wants: Callable[[str, Stack], bool]):
        self.stack = stack
        self.store = store
        self._observe = observe
        self._wants = wants
        self.depth = 0
        self.open: _BlockTap | None = None
        """The block whose end has not been seen, where blocks are no modules."""
        self.last = max(depth for passes in stack.passes for depth in passes) + 1

    def restart(self) -> None:
        self.depth = 0
        self.open = None

    def ended(self, h: Tensor) -> None:
        """The stream behind the block that is open."""
        block, self.open = self.open, None
        if block is not None and h.shape == block.x.shape:
            block._added("ffn", h)

    def emit(self, name: str, h: Tensor, depth: int | None = None) -> None:
        if not self._wants(name, self.stack):
            return
        place = Place(self.stack.label, self.depth if depth is None else depth, name)
        try:
            self._observe(place, h)
        except Exception as error:
            raise ObserverFailed(place) from error

    def emit_difference(self, name: str, h: Tensor, before: Tensor) -> None:
        if self._wants(name, self.stack):
            self.emit(name, h - before)

    def attach(self) -> Iterator[Any]:
        for position in range(len(self.stack.names.blocks)):
            yield from _BlockTap(self, position).attach()
        yield from self._attach_ends()
        if self.stack.names.final_norm:
            owner = self.store.owner(self.stack.names.final_norm.weight)
            yield owner.register_forward_hook(
                lambda module, args, output: self.emit("final_norm", self.batch_first(output), self.last)
            )

    def _attach_ends(self) -> Iterator[Any]:
        """Of hybrids: the stream before the first block and after the last, where those have no softmax attention."""
        names = self.stack.names
        paths = {} if self.stack.arch.passes else names.paths_of_all(self.stack.arch.paths.block)
        have_attention = {block.index for block in names.blocks}
        first, last = 0, names.blocks_in_model - 1
        if paths and first not in have_attention:
            yield self.store.module(paths[first]).register_forward_pre_hook(
                lambda module, args, kwargs: self.emit("embedding", self.batch_first(received(args, kwargs)), 0),
                with_kwargs=True,
            )
        if paths and last not in have_attention:
            self.last = last + 1
            yield self.store.module(paths[last]).register_forward_hook(
                lambda module, args, output: self.emit("other_sum", self.batch_first(_first(output)), last + 1)
            )

    def batch_first(self, h: Tensor) -> Float[Tensor, "batch token d_model"]:
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


class _BlockTap:
    """The hooks of one block. `x` is the residual stream as it stands."""

    def __init__(self, tap: _StackTap, position: int):
        self.tap = tap
        self.arch = tap.stack.arch
        self.names = tap.stack.names.blocks[position]
        self.depths = [depth + 1 for depth in tap.stack.passes[position]]
        self.subs = [sub for sub in SUB_BLOCKS if sub != "cross" or "cross_norm" in self.names.norms]
        self.x: Tensor = torch.empty(0)

    def attach(self) -> Iterator[Any]:
        if self.arch.paths.before or self.arch.paths.after:
            yield from self._attach_readers()
            return
        block = self._block_module()
        yield block.register_forward_pre_hook(self._enter, with_kwargs=True)
        is_bare_attention = isinstance(block, nn.MultiheadAttention)
        if is_bare_attention:
            yield block.register_forward_hook(self._bare_attention)
            return
        yield from {
            "pre": self._attach_pre,
            "post": self._attach_post,
            "sandwich": self._attach_sandwich,
            "parallel": self._attach_parallel,
        }[self.arch.residual]()
        yield block.register_forward_hook(self._leave)

    def _block_module(self) -> nn.Module:
        value_owner = self.tap.store.owner(self.names.value.weight)
        bare = isinstance(value_owner, nn.MultiheadAttention) and not self.names.norms
        return value_owner if bare else self.tap.store.module(self.names.path)

    def _norm(self, role: str) -> nn.Module | None:
        names = self.names.norms.get(role)
        return self.tap.store.norm(names) if names else None

    # --- what is the same for all blocks ---

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.x = self.tap.batch_first(received(args, kwargs))
        seen = self.tap.depth
        self.tap.depth = next((depth for depth in self.depths if depth > seen), self.depths[0])
        if self.tap.depth == 1:
            self.tap.emit("embedding", self.x, depth=0)
        elif self.tap.depth > seen + 1:
            self.tap.emit("other_sum", self.x, depth=self.tap.depth - 1)

    def _begin(self, h: Tensor) -> None:
        """Attention begins; what the block did before it, as in a macaron of two feed-forwards, is another part."""
        if h.shape == self.x.shape and not torch.equal(h, self.x):
            self.tap.emit("other_sum", h)
        self.x = h

    def _leave(self, module: nn.Module, args: object, output: Any) -> None:
        h = self._features(output)
        if self.arch.residual in ("pre", "parallel"):
            self._added(self.subs[-1], h)
        self.x = torch.empty(0)

    def _features(self, output: Any) -> Tensor:
        h = _first(output)
        if h.ndim == 2 and h.numel() == self.x.numel():  # some blocks flatten (batch, token) for their feed-forward
            return h.reshape(self.x.shape)
        return self.tap.batch_first(h)

    def _added(self, sub: str, h: Tensor) -> None:
        """The stream is `h` after the branch of `sub` was added."""
        self.tap.emit_difference(f"{sub}_branch", h, self.x)
        self.tap.emit(f"{sub}_sum", h)
        self.x = h

    # --- blocks that are no modules ---

    def _attach_readers(self) -> Iterator[Any]:
        """The stream is seen where modules receive it: before attention, after it, and behind the last block."""
        paths, block = self.arch.paths, self.names
        if paths.before:
            before = self.tap.store.module(inside(block.path, paths.before, block.index))
            yield before.register_forward_pre_hook(self._enter_behind, with_kwargs=True)
        if paths.after:
            after = self.tap.store.module(inside(block.path, paths.after, block.index))
            yield after.register_forward_pre_hook(
                lambda module, args, kwargs: self._sum_reached(self.tap.batch_first(received(args, kwargs))),
                with_kwargs=True,
            )
        norm = self._norm("attn_norm")
        if norm is not None and self.arch.residual == "post":
            yield norm.register_forward_hook(
                lambda module, args, output: self._normed("attn", self.tap.batch_first(_first(output)))
            )
        if paths.end and block.position == len(self.tap.stack.names.blocks) - 1:
            end = self.tap.store.module(paths.end)
            yield end.register_forward_pre_hook(
                lambda module, args, kwargs: self.tap.ended(self.tap.batch_first(received(args, kwargs))),
                with_kwargs=True,
            )

    def _enter_behind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The stream before attention is also the stream after the block before."""
        self.tap.ended(self.tap.batch_first(received(args, kwargs)))
        self._enter(module, args, kwargs)
        self.tap.open = self

    def _sum_reached(self, h: Tensor) -> None:
        if self.tap.open is self and h.shape == self.x.shape:
            self._added("attn", h)

    # --- the four forms ---

    def _attach_pre(self) -> Iterator[Any]:
        for previous, sub in zip((None, *self.subs[:-1]), self.subs, strict=True):
            norm = self._norm(f"{sub}_norm")
            if norm is None:
                continue
            if not previous and self.arch.proof is not None:
                yield norm.register_forward_pre_hook(lambda module, args: self._begin(self._features(args[0])))
            if previous:
                yield norm.register_forward_pre_hook(
                    lambda module, args, sub=previous: self._added(sub, self._features(args[0]))
                )
            yield self._emit_output(norm, f"{sub}_norm")

    def _attach_post(self) -> Iterator[Any]:
        for sub in self.subs:
            norm = self._norm(f"{sub}_norm")
            assert norm is not None, "a post-norm block has a norm after every sum"
            yield norm.register_forward_pre_hook(
                lambda module, args, sub=sub: self._added(sub, self._features(args[0]))
            )
            yield norm.register_forward_hook(
                lambda module, args, output, sub=sub: self._normed(sub, self._features(output))
            )

    def _normed(self, sub: str, h: Tensor) -> None:
        self.tap.emit(f"{sub}_norm", h)
        self.x = h

    def _attach_sandwich(self) -> Iterator[Any]:
        for sub in self.subs:
            norm, branch_norm = self._norm(f"{sub}_norm"), self._norm(f"{sub}_branch_norm")
            assert branch_norm is not None, "a sandwich block has a norm on every branch"
            if norm is not None:
                yield self._emit_output(norm, f"{sub}_norm")
            yield branch_norm.register_forward_hook(
                lambda module, args, output, sub=sub: self._added(sub, self.x + self._features(output))
            )

    def _attach_parallel(self) -> Iterator[Any]:
        for sub in self.subs:
            norm = self._norm(f"{sub}_norm")
            if norm is not None:
                yield self._emit_output(norm, f"{sub}_norm")
        output_projection = self.tap.store.owner(self.names.output.weight)
        # The feed-forward may run first in the block's code; the stream is the block's input either way.
        yield output_projection.register_forward_hook(
            lambda module, args, output: self._added("attn", self.x + self._features(output))
        )

    def _emit_output(self, norm: nn.Module, name: str) -> Any:
        return norm.register_forward_hook(lambda module, args, output: self.tap.emit(name, self._features(output)))

    def _bare_attention(self, module: nn.Module, args: object, output: Any) -> None:
        """A bare attention module: what is added is its output, onto its own input."""
        self._added("attn", self.x + self._features(output))
