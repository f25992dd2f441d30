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
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

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


class _StackTap:
    """The passes of one stack during one run of the model."""

    def __init__(self, stack: Stack, store: ModuleStore, observe: Observe, wants: Callable[[str, Stack], bool]):
        self.stack = stack
        self.store = store
        self._observe = observe
        self._wants = wants
        self.depth = 0
        self.last = max(depth for passes in stack.passes for depth in passes) + 1

    def restart(self) -> None:
        self.depth = 0

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
        if self.stack.names.final_norm:
            owner = self.store.owner(self.stack.names.final_norm.weight)
            yield owner.register_forward_hook(
                lambda module, args, output: self.emit("final_norm", self.batch_first(output), self.last)
            )

    def batch_first(self, h: Tensor) -> Tensor:
        return h.transpose(0, 1) if self.stack.arch.token_axis == 0 and h.ndim == 3 else h


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
        return self.tap.store.owner(names.weight) if names else None

    # --- what is the same for all blocks ---

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        h = args[0] if args else kwargs.get("hidden_states", kwargs.get("query", kwargs.get("src")))
        assert isinstance(h, Tensor), "a block receives its hidden states first or by name"
        self.x = self.tap.batch_first(h)
        seen = self.tap.depth
        self.tap.depth = next((depth for depth in self.depths if depth > seen), self.depths[0])
        if self.tap.depth == 1:
            self.tap.emit("embedding", self.x, depth=0)
        elif self.tap.depth > seen + 1:
            self.tap.emit("other_sum", self.x, depth=self.tap.depth - 1)

    def _leave(self, module: nn.Module, args: object, output: Any) -> None:
        h = self._features(output)
        if self.arch.residual in ("pre", "parallel"):
            self._added(self.subs[-1], h)
        self.x = torch.empty(0)

    def _features(self, output: Any) -> Tensor:
        h = output[0] if isinstance(output, tuple) else output
        if h.ndim == 2:  # some blocks flatten (batch, token) for their feed-forward
            h = h.reshape(self.x.shape)
        return self.tap.batch_first(h)

    def _added(self, sub: str, h: Tensor) -> None:
        """The stream is `h` after the branch of `sub` was added."""
        self.tap.emit_difference(f"{sub}_branch", h, self.x)
        self.tap.emit(f"{sub}_sum", h)
        self.x = h

    # --- the four forms ---

    def _attach_pre(self) -> Iterator[Any]:
        for previous, sub in zip((None, *self.subs[:-1]), self.subs, strict=True):
            norm = self._norm(f"{sub}_norm")
            if norm is None:
                continue
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
