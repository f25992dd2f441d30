"""Attention probabilities of a live model, layer by layer and sequence by sequence, never all at once.

Nothing is switched and nothing has to be restored. While the model runs, a torch function mode watches three functions:

    scaled_dot_product_attention    transformers' `sdpa`, timm's fused attention, torch
    softmax                         every `eager` implementation
    multi_head_attention_forward    nn.MultiheadAttention

It takes only the next call after a declared block's value projection has run, so that cross-attention and routers are
never mistaken for self-attention. The model computes what it always computes; of the fused kernel, queries and keys are
kept, and the probabilities of one sequence are computed from them when they are asked for.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from oversmooth.errors import NoAttentionMaps
from oversmooth.models.source import Stack
from oversmooth.models.stores.module import ModuleStore

ROW_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""How far the sum of a row may be from one; half precision rounds each entry, so there it is 1e-2."""
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
EXPONENTIALS = (torch.exp, Tensor.exp)
QUOTIENTS = (torch.div, Tensor.div, Tensor.__truediv__)

Layer = tuple[str, int]
"""Label of the stack and position of the block in it."""


@dataclass(frozen=True, eq=False, slots=True)
class AttentionMaps:
    """The attention of one layer for one batch, computed for one sequence at a time."""

    layer: str
    """Which layer it is, in words."""
    of_sequence: Callable[[int], Float[Tensor, "head token key"]]

    def of(
        self, sequence: int, keep: Bool[Tensor, " token"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "head kept kept"]:
        """Probabilities between the kept tokens of one sequence; raises `NoAttentionMaps` unless rows sum to one."""
        found = self.of_sequence(sequence)
        if found.shape[1:] != (len(keep), len(keep)):
            shape = f"attention of {found.shape[1]} queries to {found.shape[2]} keys for {len(keep)} tokens"
            advice = (
                "Give whole sequences, without a cache. Windowed attention is inspected and measured, not predicted."
            )
            raise NoAttentionMaps(self.layer, f"{shape} (windows, a sink or a cache)", advice)
        tolerance = ROW_TOLERANCE.get(found.dtype, 1e-2)
        kept = (found if bool(keep.all()) else found[:, keep][:, :, keep]).to(dtype)
        worst = (kept.sum(-1) - 1).abs().max().item()
        if not worst <= tolerance:  # also where it is NaN
            reason = f"rows that do not sum to one over the tokens that count (off by {worst:.2g})"
            raise NoAttentionMaps(
                self.layer, reason, "Sinks, dropout and padding that is not masked break the theory: it needs row sums."
            )
        return kept / kept.sum(-1, keepdim=True)


@contextmanager
def attention_watched(stacks: Sequence[Stack], store: ModuleStore) -> Iterator[Callable[[Layer], AttentionMaps]]:
    """While the model runs, yields what gives the maps of the layer that has just run; each can be taken once."""
    mode = _Watch()
    handles = []
    try:
        for stack in stacks:
            for position, block in enumerate(stack.names.blocks):
                words = f"layer {block.index}" + (f" of {stack.label}" if stack.label else "")
                owner = store.owner(block.value.weight)
                armed = Awaited((stack.label, position), words, stack.heads(position))
                mode.watch_for(owner, block.value.weight.rpartition(".")[2], armed)
                handles.append(owner.register_forward_pre_hook(lambda module, args, armed=armed: mode.arm(armed)))
        with mode:
            yield mode.take
    finally:
        for handle in handles:
            handle.remove()


def unwatched() -> AbstractContextManager[None]:
    """While work of our own goes on between two layers: nothing is watched, and every operation is faster for it."""
    return torch._C.DisableTorchFunction()


@dataclass(frozen=True, slots=True)
class Awaited:
    """The layer whose attention comes next."""

    layer: Layer
    words: str
    heads: int | None


class _Watch(TorchFunctionMode):
    """Takes the first attention that is computed after it was armed."""

    def __init__(self) -> None:
        super().__init__()
        self._armed: Awaited | None = None
        self._taken: dict[Layer, AttentionMaps] = {}
        self._values: dict[int, Awaited] = {}
        self._held: list[Tensor] = []
        self._exponentials = WeakTensorKeyDictionary()

    def watch_for(self, owner: nn.Module, attribute: str, armed: Awaited) -> None:
        """Arms also where a value weight is used by a function while the module that holds it is never called."""
        weight = owner._parameters.get(attribute)
        if weight is not None:
            self._values[id(weight)] = armed
            self._held.append(weight)  # where weights come and go, no other tensor may get its id

    def arm(self, awaited: Awaited) -> None:
        self._taken.pop(awaited.layer, None)
        self._armed = awaited

    def take(self, layer: Layer) -> AttentionMaps:
        if layer not in self._taken:
            is_awaited = self._armed is not None and self._armed.layer == layer
            words = self._armed.words if is_awaited and self._armed else f"layer {layer[1]} {layer[0]}".strip()
            advice = 'Load the model with attn_implementation="sdpa" or "eager": other kernels show no probabilities.'
            raise NoAttentionMaps(words, "attention computed by a kernel that cannot be watched", advice)
        return self._taken.pop(layer)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        for arg in args:
            if id(arg) in self._values:
                self.arm(self._values[id(arg)])
        if self._armed is None or func not in _WATCHED:
            return self._other(func, args, kwargs)
        output, of_sequence = _WATCHED[func](func, args, kwargs, self._armed.heads)
        self._take(of_sequence)
        return output

    def _take(self, of_sequence: Callable[[int], Tensor] | None) -> None:
        if of_sequence is not None and self._armed is not None:
            self._taken[self._armed.layer] = AttentionMaps(self._armed.words, of_sequence)
            self._armed = None

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Anything else; a softmax written out as exponentials over their sum is attention too."""
        output = func(*args, **kwargs)
        if self._armed is not None and func in EXPONENTIALS:
            self._exponentials[output] = True
        elif self._armed is not None and func in QUOTIENTS and args[0] in self._exponentials:
            self._take(_maps(output, self._armed.heads))
        return output


Watched = tuple[Any, Callable[[int], Tensor] | None]


def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], heads: int | None) -> Watched:
    """Softmax over the keys of scores (batch, head, query, key); anything else is not attention."""
    output = func(*args, **kwargs)
    scores = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    is_over_keys = dim in (-1, scores.ndim - 1) and min(scores.shape[-2:]) > 0
    return output, _maps(output, heads) if is_over_keys else None


def _maps(probabilities: Tensor, heads: int | None) -> Callable[[int], Tensor] | None:
    """Probabilities of (batch, head, query, key), or of (batch x head, query, key) with a known number of heads."""
    if probabilities.ndim == 3 and heads and len(probabilities) % heads == 0:
        probabilities = probabilities.unflatten(0, (-1, heads))
    return (lambda sequence: probabilities[sequence].detach()) if probabilities.ndim == 4 else None


def _fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], heads: int | None) -> Watched:
    """The fused kernel: keeps queries, keys and mask; the kernel itself runs as always."""
    output = func(*args, **kwargs)
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("dropout_p"):
        return output, lambda sequence: torch.full((1, 1, 1), math.nan)
    query, key, mask = given["query"], given["key"], given.get("attn_mask")
    if query.ndim == 3:  # one sequence without a batch, or heads merged into it
        if heads is None or len(query) % heads:
            return output, None
        query, key = (part.unflatten(0, (-1, heads)) for part in (query, key))
        mask = mask.unflatten(0, (-1, heads)) if mask is not None and len(mask) == len(output) else mask

    def of_sequence(sequence: int) -> Tensor:
        return _probabilities(
            query[sequence],
            key[sequence],
            mask=None if mask is None else mask.expand(len(query), *mask.shape[-3:])[sequence],
            is_causal=bool(given.get("is_causal")),
            scale=given.get("scale"),
        )

    return output, of_sequence if query.ndim == 4 else None


def _probabilities(
    q: Float[Tensor, "head query d_head"],
    k: Float[Tensor, "kv key d_head"],
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Float[Tensor, "head query key"]:
    """`softmax(q k^T scale + mask)` in float32 or better; a mask of booleans says what is seen."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k = q.detach().to(dtype), k.detach().to(dtype).repeat_interleave(len(q) // len(k), 0)
    scores = q @ k.mT * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.to(scores)
    return scores.softmax(-1)


def _multi_head(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], heads: int | None) -> Watched:
    """nn.MultiheadAttention: asks for the weights of every head, and returns what the caller asked for."""
    call = inspect.signature(func).bind(*args, **kwargs)
    call.apply_defaults()
    wanted, averaged = call.arguments["need_weights"], call.arguments["average_attn_weights"]
    is_batched = call.arguments["query"].ndim == 3
    call.arguments |= {"need_weights": True, "average_attn_weights": False}
    output, weights = func(*call.args, **call.kwargs)
    by_sequence = weights if is_batched else weights[None]
    shown = (weights.mean(-3) if averaged else weights) if wanted else None
    return (output, shown), lambda sequence: by_sequence[sequence].detach()


_WATCHED: Mapping[Any, Callable[[Any, tuple[Any, ...], dict[str, Any], int | None], Watched]] = {
    F.scaled_dot_product_attention: _fused,
    F.multi_head_attention_forward: _multi_head,
    **dict.fromkeys(SOFTMAX, _softmax),
}
