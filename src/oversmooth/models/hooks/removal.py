"""Runs a model without one of its parts, or without its skip connections."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from oversmooth.errors import CannotControl
from oversmooth.models.hooks.places import hooked, received
from oversmooth.models.source import Stack
from oversmooth.models.stores.module import ModuleStore

# --- without one part: what it would have added is not added, everything else, norms included, stays as it is ---

PARTS = ("attention", "feed-forward", "block")


def removed(stack: Stack, store: ModuleStore, position: int, part: str) -> AbstractContextManager[None]:
    """The model without one part of the block at `position`, while the context lasts; raises if that is impossible."""
    block = block_module(stack, store, position)
    take_out = {"attention": _without_attention, "feed-forward": _without_feed_forward, "block": _without_block}[part]
    return hooked(take_out(stack, store, position, block))


def block_module(stack: Stack, store: ModuleStore, position: int) -> nn.Module:
    """The module of a block; raises if the block is not a module that is called."""
    names = stack.names.blocks[position]
    paths = stack.arch.paths
    value_owner = store.owner(names.value.weight)
    if paths.before or paths.after or (isinstance(value_owner, nn.MultiheadAttention) and not names.norms):
        reason = "its blocks are not modules that take the stream and return it"
        raise CannotControl("ablate", f"block {names.index}", reason, "Only models of ordinary blocks can be ablated.")
    return store.module(names.path)


def _changed(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The output of a block with its hidden states changed."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def _with_stream(output: Any, h: Tensor) -> Any:
    return _changed(output, lambda old: h.reshape(old.shape))


def _zeros(module: nn.Module, args: Any, output: Any) -> Any:
    return _changed(output, torch.zeros_like)


def _without_attention(stack: Stack, store: ModuleStore, position: int, block: nn.Module) -> Iterator[Any]:
    names = stack.names.blocks[position]
    value_owner = store.owner(names.value.weight)
    if "attn_branch_norm" in names.norms and stack.arch.residual == "sandwich":
        yield store.norm(names.norms["attn_branch_norm"]).register_forward_hook(_zeros)
    elif isinstance(value_owner, nn.MultiheadAttention):
        yield value_owner.register_forward_hook(_zeros)
    else:
        yield store.owner(names.output.weight).register_forward_hook(_zeros)


def _without_block(stack: Stack, store: ModuleStore, position: int, block: nn.Module) -> Iterator[Any]:
    yield block.register_forward_hook(
        lambda module, args, kwargs, output: _with_stream(output, received(args, kwargs)), with_kwargs=True
    )


def _without_feed_forward(stack: Stack, store: ModuleStore, position: int, block: nn.Module) -> Iterator[Any]:
    names, residual = stack.names.blocks[position], stack.arch.residual
    if residual == "sandwich":
        yield store.norm(names.norms["ffn_branch_norm"]).register_forward_hook(_zeros)
        return
    held: dict[str, Tensor] = {}
    hooks = list(_between(stack, store, position, block, partial(held.__setitem__, "stream")))
    if not hooks:
        reason = "nothing shows the stream between attention and feed-forward"
        raise CannotControl("ablate", f"the feed-forward of block {names.index}", reason, "Leave it out.")
    yield from hooks
    if residual == "post":
        yield store.norm(names.norms["ffn_norm"]).register_forward_pre_hook(
            lambda module, args: (held["stream"].reshape(args[0].shape), *args[1:])
        )
    else:
        yield block.register_forward_hook(lambda module, args, output: _with_stream(output, held["stream"]))


def _between(
    stack: Stack, store: ModuleStore, position: int, block: nn.Module, hold: Callable[[Tensor], None]
) -> Iterator[Any]:
    """Hooks that hand over the stream between attention and feed-forward; none if no module receives it."""
    names, residual = stack.names.blocks[position], stack.arch.residual
    if residual == "post":
        before = "cross_norm" if "cross_norm" in names.norms else "attn_norm"
        yield store.norm(names.norms[before]).register_forward_hook(lambda module, args, output: hold(output))
    elif residual == "parallel":
        held: dict[str, Tensor] = {}
        yield block.register_forward_pre_hook(
            lambda module, args, kwargs: held.__setitem__("entered", received(args, kwargs)), with_kwargs=True
        )
        yield store.owner(names.output.weight).register_forward_hook(
            lambda module, args, output: hold(held["entered"] + output.reshape(held["entered"].shape))
        )
    elif residual == "pre" and "ffn_norm" in names.norms:
        yield store.norm(names.norms["ffn_norm"]).register_forward_pre_hook(lambda module, args: hold(args[0]))


class Replay:
    """The outputs of every block of one stack on one batch, so a run can skip the blocks before a part.

    Holds the stream between blocks, and between attention and feed-forward, for one batch: twice as much memory as
    transformers' `output_hidden_states`.
    """

    def __init__(self, stack: Stack, store: ModuleStore):
        self._stack, self._store = stack, store
        self._blocks = [block_module(stack, store, position) for position in range(len(stack.names.blocks))]
        self._given: list[Any] = []
        self._between: dict[int, Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While the whole model runs once."""
        self._given, self._between = [], {}

        def hooks() -> Iterator[Any]:
            for position, block in enumerate(self._blocks):
                hold = partial(self._between.__setitem__, position)
                yield from _between(self._stack, self._store, position, block, hold)
                yield block.register_forward_hook(lambda module, args, output: self._given.append(output))

        with hooked(hooks()):
            yield

    @property
    def is_usable(self) -> bool:
        """Whether every block ran once; blocks that run more than once are computed anew in every run."""
        return len(self._given) == len(self._blocks)

    def knows(self, position: int, part: str) -> bool:
        """Whether what the block gives without the part needs no computation."""
        return self.is_usable and (part == "block" or (part == "feed-forward" and position in self._between))

    @contextmanager
    def without(self, position: int, part: str) -> Iterator[None]:
        """While the model runs without a part, blocks before it give what they gave, and compute nothing."""
        with ExitStack() as stack:
            for block, output in zip(self._blocks[: position if self.is_usable else 0], self._given, strict=False):
                stack.enter_context(_answering(block, partial(lambda output, args, kwargs: output, output)))
            if self.knows(position, part):
                answer = partial(self._without_part, position, part)
                stack.enter_context(_answering(self._blocks[position], answer))
            else:
                stack.enter_context(removed(self._stack, self._store, position, part))
            yield

    def _without_part(self, position: int, part: str, args: Any, kwargs: Any) -> Any:
        """What the block gives without a part: its input, or the stream between attention and feed-forward."""
        h = received(args, kwargs) if part == "block" else self._between[position]
        if part != "block" and self._stack.arch.residual == "post":
            h = self._store.norm(self._stack.names.blocks[position].norms["ffn_norm"])(h)
        return _with_stream(self._given[position], h)


@contextmanager
def _answering(block: nn.Module, answer: Callable[[Any, Any], Any]) -> Iterator[None]:
    """A module that computes nothing of its own."""
    before: Mapping[str, Any] = {"forward": block.__dict__["forward"]} if "forward" in block.__dict__ else {}
    block.forward = lambda *args, **kwargs: answer(args, kwargs)
    try:
        yield
    finally:
        del block.__dict__["forward"]
        block.__dict__.update(before)


# --- without skip connections: the stream is subtracted from what a block adds to it, X + (Y - X) = Y ---

Removed = Literal["attention", "block"]
"""The skip around attention only, or those around both sub-blocks."""


def without_skips(stacks: Sequence[Stack], store: ModuleStore, removed: Removed) -> AbstractContextManager[None]:
    """The model runs without these skip connections inside, and as always afterwards."""
    places = ((stack, position) for stack in stacks for position in range(len(stack.names.blocks)))
    return hooked(handle for place in places for handle in _without_skip(*place, store, removed))


def why_not(stacks: Sequence[Stack]) -> str | None:
    """Why the skips of a model cannot be removed by hooks; `None` if they can."""
    for stack in stacks:
        block = stack.names.blocks[0]
        if stack.arch.residual not in ("pre", "post"):
            return f"its blocks are {stack.arch.residual}: attention has no skip connection of its own"
        if stack.arch.residual_gain or not {"attn_norm", "ffn_norm"} <= set(block.norms) or "cross_norm" in block.norms:
            return "its branches are scaled by a number of the config, or it has cross-attention or no norms"
    return None


def _without_skip(stack: Stack, position: int, store: ModuleStore, removed: Removed) -> Iterator[Any]:
    """The hooks of one block; `held` is the stream that the next sum adds to."""
    names, held = stack.names.blocks[position], {"stream": torch.empty(0)}
    block, value = store.module(names.path), store.owner(names.value.weight)
    gain = store.read(names.gain).detach() if names.gain else None
    hold = partial(held.__setitem__, "stream")

    def minus_stream(h: Tensor) -> Tensor:
        return h - held["stream"].reshape(h.shape)

    def attended(module: nn.Module, args: object, output: Any) -> Any:
        if gain is None:
            return _changed(output, minus_stream)
        # A gain on the branch (LayerScale) multiplies what is subtracted too, so it is divided by the gain before.
        return _changed(output, lambda h: h - (held["stream"] / gain.to(held["stream"])).reshape(h.shape))

    yield block.register_forward_pre_hook(lambda module, args, kwargs: hold(received(args, kwargs)), with_kwargs=True)
    writes = value if isinstance(value, nn.MultiheadAttention) else store.owner(names.output.weight)
    yield writes.register_forward_hook(attended)
    if removed == "attention":
        return
    attn_norm, ffn_norm = store.norm(names.norms["attn_norm"]), store.norm(names.norms["ffn_norm"])
    if stack.arch.residual == "post":
        yield attn_norm.register_forward_hook(lambda module, args, output: hold(output))
        yield ffn_norm.register_forward_pre_hook(lambda module, args: (minus_stream(args[0]), *args[1:]))
    else:
        yield ffn_norm.register_forward_pre_hook(lambda module, args: hold(args[0]))
        yield block.register_forward_hook(lambda module, args, output: _changed(output, minus_stream))
