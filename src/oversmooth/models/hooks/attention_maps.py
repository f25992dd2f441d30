"""Attention probabilities of a live model, layer by layer and sequence by sequence, never all at once.

Nothing is switched and nothing has to be restored. While the model runs, a torch function mode watches three functions:

    scaled_dot_product_attention    transformers' `sdpa`, timm's fused attention, torch
    softmax                         every `eager` implementation
    multi_head_attention_forward    nn.MultiheadAttention

It takes only the next call after a declared block's value projection has run, so that cross-attention and routers are
never mistaken for self-attention. The model computes what it always computes; of the fused kernel, queries and keys are
kept, and the probabilities of one sequence are computed from them when they are asked for. Where a family declares gains,
what multiplies the mixed heads on their way to the output projection is followed too (`following.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from oversmooth.errors import NoAttentionMaps
from oversmooth.models.declaration import Arch
from oversmooth.models.hooks.attention_functions import SOFTMAX, WATCHED, maps_of
from oversmooth.models.hooks.following import Following
from oversmooth.models.hooks.maps import AttentionMaps, Written
from oversmooth.models.resolve import BlockNames
from oversmooth.models.stores.module import ModuleStore

if TYPE_CHECKING:
    from oversmooth.models.source import Stack

EXPONENTIALS = (torch.exp, Tensor.exp)
QUOTIENTS = (torch.div, Tensor.div, Tensor.__truediv__)

Layer = tuple[str, int]
"""Label of the stack and position of the block in it."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """The layer whose attention comes next."""

    layer: Layer
    words: str
    heads: int | None
    has_gains: bool = False
    has_sink: bool = False


def awaited(label: str, position: int, block: BlockNames, heads: int | None, arch: Arch) -> Awaited:
    words = f"layer {block.index}" + (f" of {label}" if label else "")
    return Awaited((label, position), words, heads, bool(arch.gains), "sink" in arch.gains)


@contextmanager
def attention_watched(stacks: Sequence["Stack"], store: ModuleStore) -> Iterator[Callable[[Layer], AttentionMaps]]:
    """While the model runs, yields what gives the maps of the layer that has just run; each can be taken once."""
    blocks = [
        (block, awaited(stack.label, position, block, stack.heads(position), stack.arch))
        for stack in stacks
        for position, block in enumerate(stack.names.blocks)
    ]
    with blocks_watched(blocks, store) as take:
        yield take


@contextmanager
def blocks_watched(
    blocks: Sequence[tuple[BlockNames, Awaited]], store: ModuleStore
) -> Iterator[Callable[[Layer], AttentionMaps]]:
    """The same for blocks by their names."""
    mode = _Watch()
    handles = []
    try:
        for block, armed in blocks:
            owner = store.owner(block.value.weight)
            mode.watch_for(owner, block.value.weight.rpartition(".")[2], armed)
            handles.append(owner.register_forward_pre_hook(lambda module, args, armed=armed: mode.arm(armed)))
            if armed.has_gains:
                output = store.owner(block.output.weight)
                handles.append(
                    output.register_forward_pre_hook(lambda module, args, armed=armed: mode.arrive(armed, args[0]))
                )
            if armed.has_gains and "inner_norm" in block.norms:
                norm = store.norm(block.norms["inner_norm"])
                handles.append(norm.register_forward_hook(lambda module, args, out: mode.normed(args[0], out)))
        with mode:
            yield mode.take
    finally:
        for handle in handles:
            handle.remove()


def unwatched() -> AbstractContextManager[None]:
    """While work of our own goes on between two layers: nothing is watched, and every operation is faster for it."""
    return torch._C.DisableTorchFunction()


class _Watch(TorchFunctionMode):
    """Takes the first attention that is computed after it was armed."""

    def __init__(self) -> None:
        super().__init__()
        self._armed: Awaited | None = None
        self._taken: dict[Layer, AttentionMaps] = {}
        self._values: dict[int, Awaited] = {}
        self._gained: set[Layer] = set()
        self._held: list[Tensor] = []
        self._exponentials = WeakTensorKeyDictionary()
        self._following: Following | None = None
        self._before_norm: Tensor | None = None
        self._whole: tuple[Layer, Tensor] | None = None
        """The layer whose softmax ran last, and its result, from which a sink may be cut off."""

    def watch_for(self, owner: nn.Module, attribute: str, armed: Awaited) -> None:
        """Arms also where a value weight is used by a function while the module that holds it is never called."""
        if armed.has_gains:
            self._gained.add(armed.layer)
        weight = owner._parameters.get(attribute)
        if weight is not None:
            self._values[id(weight)] = armed
            self._held.append(weight)  # where weights come and go, no other tensor may get its id

    def arm(self, awaited: Awaited) -> None:
        self._taken.pop(awaited.layer, None)
        self._armed = awaited
        self._following = Following() if awaited.has_gains else None
        self._before_norm = self._whole = None

    def normed(self, read: Tensor, made: Tensor) -> None:
        """The norm on the mixed heads ran: what multiplied them before it is kept apart."""
        shadow = None if self._following is None else self._following.shadow(read)
        if self._following is not None and shadow is not None:
            self._before_norm = shadow
            self._following.begin(made)

    def arrive(self, awaited: Awaited, read: Tensor) -> None:
        """The mixed heads have reached the output projection."""
        following, self._following = self._following, None
        shadow = None if following is None else following.shadow(read)
        if following is None or shadow is None or awaited.layer not in self._taken:
            return
        inner = shadow.shape[-1]
        last = shadow.reshape(-1, *shadow.shape[-2:]) if shadow.ndim > 2 else shadow[None]
        before = last
        if self._before_norm is not None:
            before = self._before_norm.reshape(*last.shape[:-1], inner)
        after = None if self._before_norm is None else last
        written = Written(before, after, following.subtracted)
        self._taken[awaited.layer] = replace(self._taken[awaited.layer], written=written)

    def take(self, layer: Layer) -> AttentionMaps:
        if layer not in self._taken:
            is_awaited = self._armed is not None and self._armed.layer == layer
            words = self._armed.words if is_awaited and self._armed else f"layer {layer[1]} {layer[0]}".strip()
            advice = 'Load the model with attn_implementation="sdpa" or "eager": other kernels show no probabilities.'
            raise NoAttentionMaps(words, "attention computed by a kernel that cannot be watched", advice)
        found = self._taken.pop(layer)
        if layer in self._gained and found.written is None:
            advice = "Something between attention and its output projection is unknown: measure the model instead."
            raise NoAttentionMaps(
                found.layer, "mixed heads that could not be followed to the output projection", advice
            )
        return found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        for arg in args:
            if id(arg) in self._values:
                self.arm(self._values[id(arg)])
        if func not in WATCHED or (self._armed is None and self._following is None):
            return self._other(func, args, kwargs)
        output, of_sequence = WATCHED[func](func, args, kwargs, self._armed.heads if self._armed else None)
        if self._following is not None and func in SOFTMAX:
            self._following.expect(output)
            self._whole = (self._armed.layer, output) if self._armed is not None else self._whole
        elif self._following is not None:
            self._following.begin(output)
        self._take(of_sequence)
        return output

    def _take(self, of_sequence: Callable[[int], Tensor] | None) -> None:
        if of_sequence is not None and self._armed is not None:
            self._taken[self._armed.layer] = AttentionMaps(
                self._armed.words, of_sequence, has_sink=self._armed.has_sink
            )
            self._armed = None

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Anything else; a softmax written out as exponentials over their sum is attention too."""
        output = func(*args, **kwargs)
        if self._following is not None:
            self._following.step(func, args, kwargs, output)
            self._cut(func, args, output)
        if self._armed is not None and func in EXPONENTIALS:
            self._exponentials[output] = True
        elif self._armed is not None and func in QUOTIENTS and args[0] in self._exponentials:
            self._take(maps_of(output, self._armed.heads))
        return output

    def _cut(self, func: Any, args: tuple[Any, ...], output: Any) -> None:
        """A part of the probabilities is taken: the column of a sink is left behind."""
        if self._whole is None or func is not Tensor.__getitem__ or args[0] is not self._whole[1]:
            return
        layer, of_sequence = self._whole[0], maps_of(output, None)
        if layer in self._taken and of_sequence is not None:
            self._taken[layer] = replace(self._taken[layer], of_sequence=of_sequence)
