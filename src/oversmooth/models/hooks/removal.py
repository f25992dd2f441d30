"""Runs a model without one of its parts, or without its skip connections.

What a part would have added is not added; everything else stays as it is, norms included. `Replay` also spares the blocks
before the part: they give what they gave when the model was whole.

What a block adds to its stream is made smaller by the stream itself, so that the sum is the branch alone:
`X + (Y - X) = Y`. A gain on the branch (LayerScale) multiplies what is subtracted too, so it is divided by the gain before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from oversmooth.errors import CannotControl
from oversmooth.models.hooks.places import received
from oversmooth.models.source import Stack
from oversmooth.models.stores.module import ModuleStore

# --- A live model with one of its parts taken out: the attention of a block, its feed-forward ---

PARTS = ("attention", "feed-forward", "block")


@contextmanager
def removed(stack: Stack, store: ModuleStore, position: int, part: str) -> Iterator[None]:
    """The model without one part of the block at `position`, while the context lasts; raises where that cannot be done."""
    block = block_module(stack, store, position)
    take_out = {"attention": _without_attention, "feed-forward": _without_feed_forward, "block": _without_block}[part]
    handles: list[Any] = []
    try:
        for handle in take_out(stack, store, position, block):
            handles.append(handle)
        yield
    finally:
        for handle in handles:
            handle.remove()


def block_module(stack: Stack, store: ModuleStore, position: int) -> nn.Module:
    """The module of a block; raises where the block is none that is called."""
    names = stack.names.blocks[position]
    paths = stack.arch.paths
    value_owner = store.owner(names.value.weight)
    if paths.before or paths.after or (isinstance(value_owner, nn.MultiheadAttention) and not names.norms):
        reason = "its blocks are not modules that take the stream and return it"
        raise CannotControl("ablate", f"block {names.index}", reason, "Only models of ordinary blocks can be ablated.")
    return store.module(names.path)


def with_stream(output: Any, h: Tensor) -> Any:
    """The output of a block with other hidden states in it."""
    if isinstance(output, tuple):
        return (h.reshape(output[0].shape), *output[1:])
    return h.reshape(output.shape)


def _zeros(module: nn.Module, args: Any, output: Any) -> Any:
    return with_stream(output, torch.zeros_like(output[0] if isinstance(output, tuple) else output))


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
        lambda module, args, kwargs, output: with_stream(output, received(args, kwargs)), with_kwargs=True
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
        yield block.register_forward_hook(lambda module, args, output: with_stream(output, held["stream"]))


def _between(
    stack: Stack, store: ModuleStore, position: int, block: nn.Module, hold: Callable[[Tensor], None]
) -> Iterator[Any]:
    """Hooks that hand over the stream as it stands between attention and feed-forward; none where nothing shows it."""
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
    """What every block of one stack gave on one batch, so that a run need not compute the blocks before a part again.

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
        handles: list[Any] = []
        for position, block in enumerate(self._blocks):
            hold = partial(self._between.__setitem__, position)
            handles += _between(self._stack, self._store, position, block, hold)
            handles.append(block.register_forward_hook(lambda module, args, output: self._given.append(output)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

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
                stack.enter_context(_answering(block, partial(_given_output, output)))
            if self.knows(position, part):
                answer = self._entered if part == "block" else self._without_feed_forward
                stack.enter_context(_answering(self._blocks[position], partial(answer, position)))
            else:
                stack.enter_context(removed(self._stack, self._store, position, part))
            yield

    def _entered(self, position: int, args: Any, kwargs: Any) -> Any:
        return with_stream(self._given[position], received(args, kwargs))

    def _without_feed_forward(self, position: int, args: Any, kwargs: Any) -> Any:
        h = self._between[position]
        if self._stack.arch.residual == "post":
            h = self._store.norm(self._stack.names.blocks[position].norms["ffn_norm"])(h)
        return with_stream(self._given[position], h)


def _given_output(output: Any, args: Any, kwargs: Any) -> Any:
    return output


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


# --- forward passes of a real model with its skip connections taken out ---

Removed = Literal["attention", "block"]
"""The skip around attention only, or those around both sub-blocks."""


@contextmanager
def without_skips(stacks: Sequence[Stack], store: ModuleStore, removed: Removed) -> Iterator[None]:
    """The model runs without these skip connections inside, and as always afterwards."""
    handles: list[Any] = []
    try:
        for stack in stacks:
            for position in range(len(stack.names.blocks)):
                handles += _Block(stack, position, store).attach(removed)
        yield
    finally:
        for handle in handles:
            handle.remove()


def why_not(stacks: Sequence[Stack]) -> str | None:
    """Why the skips of a model cannot be taken out by hooks; `None` where they can."""
    for stack in stacks:
        block = stack.names.blocks[0]
        if stack.arch.residual not in ("pre", "post"):
            return f"its blocks are {stack.arch.residual}: attention has no skip connection of its own"
        if stack.arch.residual_gain or not {"attn_norm", "ffn_norm"} <= set(block.norms) or "cross_norm" in block.norms:
            return "its branches are scaled by a number of the config, or it has cross-attention or no norms"
    return None


class _Block:
    """The hooks of one block; `stream` is what the next sum adds to."""

    def __init__(self, stack: Stack, position: int, store: ModuleStore):
        names = stack.names.blocks[position]
        self.residual = stack.arch.residual
        self.block = store.module(names.path)
        value, output = store.owner(names.value.weight), store.owner(names.output.weight)
        self.writes = value if isinstance(value, nn.MultiheadAttention) else output
        self.norms = {role: store.owner(found.weight) for role, found in names.norms.items()}
        self.gain: Tensor | None = store.read(names.gain).detach() if names.gain else None
        self.stream = torch.empty(0)

    def attach(self, removed: Removed) -> list[Any]:
        handles = [
            self.block.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.writes.register_forward_hook(self._attention),
        ]
        if removed == "attention":
            return handles
        if self.residual == "post":
            handles.append(self.norms["attn_norm"].register_forward_hook(self._remember_output))
            handles.append(self.norms["ffn_norm"].register_forward_pre_hook(self._feed_forward_sum))
        else:
            handles.append(self.norms["ffn_norm"].register_forward_pre_hook(self._remember_input))
            handles.append(self.block.register_forward_hook(self._leave))
        return handles

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream = args[0] if args else kwargs.get("hidden_states", kwargs.get("src"))
        assert isinstance(stream, Tensor), "a block receives its hidden states first or by name"
        self.stream = stream

    def _attention(self, module: nn.Module, args: object, output: Any) -> Any:
        stream = self.stream if self.gain is None else self.stream / self.gain.to(self.stream)
        return _changed(output, lambda h: h - stream.reshape(h.shape))

    def _remember_output(self, module: nn.Module, args: object, output: Tensor) -> None:
        self.stream = output

    def _remember_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.stream = args[0]

    def _feed_forward_sum(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0] - self.stream.reshape(args[0].shape), *args[1:]

    def _leave(self, module: nn.Module, args: object, output: Any) -> Any:
        return _changed(output, lambda h: h - self.stream.reshape(h.shape))


def _changed(output: Any, change: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
