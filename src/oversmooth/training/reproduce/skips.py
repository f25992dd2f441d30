"""Forward passes of a real model with its skip connections taken out, which no ordinary weights express.

What a block adds to its stream is made smaller by the stream itself, so that the sum is the branch alone:
`X + (Y - X) = Y`. A gain on the branch (LayerScale) multiplies what is subtracted too, so it is divided by the gain before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from oversmooth.models.source import Stack
from oversmooth.models.stores.module import ModuleStore

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
