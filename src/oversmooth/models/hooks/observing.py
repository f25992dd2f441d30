"""Looking on while a model runs: hooks that report the features at every place somebody asked for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from jaxtyping import Float
from torch import Tensor

from oversmooth.models.hooks.block_tap import BlockTap
from oversmooth.models.hooks.calls import received, returned
from oversmooth.models.hooks.places import Observe, ObserverFailed, Place
from oversmooth.models.source import Stack
from oversmooth.models.stores.module import ModuleStore


@contextmanager
def observed(
    stacks: Sequence[Stack], store: ModuleStore, observe: Observe, wants: Callable[[str, Stack], bool]
) -> Iterator[Callable[[], None]]:
    """Calls `observe` with the features at every wanted place while the model runs; yields what to call before a run.

    `wants(place name, stack)` avoids the work of places nobody asked for. Hooks are removed whatever happens.
    """
    handles: list[Any] = []
    taps = [StackTap(stack, store, observe, wants) for stack in stacks]

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


class StackTap:
    """The passes of one stack during one run of the model."""

    def __init__(self, stack: Stack, store: ModuleStore, observe: Observe, wants: Callable[[str, Stack], bool]):
        self.stack = stack
        self.store = store
        self._observe = observe
        self._wants = wants
        self.depth = 0
        self.open: BlockTap | None = None
        """The block whose end has not been seen, where blocks are no modules."""
        self.last = max(depth for passes in stack.passes for depth in passes) + 1

    def restart(self) -> None:
        self.depth = 0
        self.open = None

    def ended(self, h: Tensor) -> None:
        """The stream behind the block that is open."""
        block, self.open = self.open, None
        if block is not None and h.shape == block.x.shape:
            block.added("ffn", h)

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
            yield from BlockTap(self, position).attach()
        yield from self._attach_ends()
        if self.stack.names.final_norm:
            owner = self.store.owner(self.stack.names.final_norm.weight)
            yield owner.register_forward_hook(
                lambda module, args, output: self.emit("final_norm", self.batchreturned(output), self.last)
            )

    def _attach_ends(self) -> Iterator[Any]:
        """Of hybrids: the stream before the first block and after the last, where those have no softmax attention."""
        names = self.stack.names
        paths = {} if self.stack.arch.passes else names.paths_of_all(self.stack.arch.paths.block)
        have_attention = {block.index for block in names.blocks}
        first, last = 0, names.blocks_in_model - 1
        if paths and first not in have_attention:
            yield self.store.module(paths[first]).register_forward_pre_hook(
                lambda module, args, kwargs: self.emit("embedding", self.batchreturned(received(args, kwargs)), 0),
                with_kwargs=True,
            )
        if paths and last not in have_attention:
            self.last = last + 1
            yield self.store.module(paths[last]).register_forward_hook(
                lambda module, args, output: self.emit("other_sum", self.batchreturned(returned(output)), last + 1)
            )

    def batchreturned(self, h: Tensor) -> Float[Tensor, "batch token d_model"]:
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
