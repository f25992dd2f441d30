"""The hooks of one block: the stream, the branches and the norms of its sub-blocks, whatever its form."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from oversmooth.models.hooks.calls import received, returned
from oversmooth.models.hooks.places import SUB_BLOCKS
from oversmooth.models.resolve import inside

if TYPE_CHECKING:
    from oversmooth.models.hooks.observing import StackTap


class BlockTap:
    """The hooks of one block. `x` is the residual stream as it stands."""

    def __init__(self, tap: "StackTap", position: int):
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
        self.x = self.tap.batchreturned(received(args, kwargs))
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
            self.added(self.subs[-1], h)
        self.x = torch.empty(0)

    def _features(self, output: Any) -> Tensor:
        h = returned(output)
        if h.ndim == 2 and h.numel() == self.x.numel():  # some blocks flatten (batch, token) for their feed-forward
            return h.reshape(self.x.shape)
        return self.tap.batchreturned(h)

    def added(self, sub: str, h: Tensor) -> None:
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
                lambda module, args, kwargs: self._sum_reached(self.tap.batchreturned(received(args, kwargs))),
                with_kwargs=True,
            )
        norm = self._norm("attn_norm")
        if norm is not None and self.arch.residual == "post":
            yield norm.register_forward_hook(
                lambda module, args, output: self._normed("attn", self.tap.batchreturned(returned(output)))
            )
        if paths.end and block.position == len(self.tap.stack.names.blocks) - 1:
            end = self.tap.store.module(paths.end)
            yield end.register_forward_pre_hook(
                lambda module, args, kwargs: self.tap.ended(self.tap.batchreturned(received(args, kwargs))),
                with_kwargs=True,
            )

    def _enter_behind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The stream before attention is also the stream after the block before."""
        self.tap.ended(self.tap.batchreturned(received(args, kwargs)))
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
            if not previous and self.arch.proof is not None:
                yield norm.register_forward_pre_hook(lambda module, args: self._begin(self._features(args[0])))
            if previous:
                yield norm.register_forward_pre_hook(
                    lambda module, args, sub=previous: self.added(sub, self._features(args[0]))
                )
            yield self._emit_output(norm, f"{sub}_norm")

    def _attach_post(self) -> Iterator[Any]:
        for sub in self.subs:
            norm = self._norm(f"{sub}_norm")
            assert norm is not None, "a post-norm block has a norm after every sum"
            yield norm.register_forward_pre_hook(lambda module, args, sub=sub: self.added(sub, self._features(args[0])))
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
                lambda module, args, output, sub=sub: self.added(sub, self.x + self._features(output))
            )

    def _attach_parallel(self) -> Iterator[Any]:
        for sub in self.subs:
            norm = self._norm(f"{sub}_norm")
            if norm is not None:
                yield self._emit_output(norm, f"{sub}_norm")
        output_projection = self.tap.store.owner(self.names.output.weight)
        # The feed-forward may run first in the block's code; the stream is the block's input either way.
        yield output_projection.register_forward_hook(
            lambda module, args, output: self.added("attn", self.x + self._features(output))
        )

    def _emit_output(self, norm: nn.Module, name: str) -> Any:
        return norm.register_forward_hook(lambda module, args, output: self.tap.emit(name, self._features(output)))

    def _bare_attention(self, module: nn.Module, args: object, output: Any) -> None:
        """A bare attention module: what is added is its output, onto its own input."""
        self.added("attn", self.x + self._features(output))
