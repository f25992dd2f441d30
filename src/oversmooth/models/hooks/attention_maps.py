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
from torch import Tensor
from torch.overrides import TorchFunctionMode

from oversmooth.errors import NoAttentionMaps
from oversmooth.models.source import Stack
from oversmooth.models.stores.module import ModuleStore

ROW_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""How far the sum of a row may be from one; half precision rounds each entry, so there it is 1e-2."""
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)

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
            raise NoAttentionMaps(self.layer, f"{shape} (a sink or a cache)", "Give whole sequences, without a cache.")
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
                armed = ((stack.label, position), words)
                handles.append(owner.register_forward_pre_hook(lambda module, args, armed=armed: mode.arm(*armed)))
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
        self._armed: tuple[Layer, str] | None = None
        self._taken: dict[Layer, AttentionMaps] = {}

    def arm(self, layer: Layer, words: str) -> None:
        self._taken.pop(layer, None)
        self._armed = (layer, words)

    def take(self, layer: Layer) -> AttentionMaps:
        if layer not in self._taken:
            words = (
                self._armed[1] if self._armed and self._armed[0] == layer else f"layer {layer[1]} {layer[0]}".strip()
            )
            advice = 'Load the model with attn_implementation="sdpa" or "eager": other kernels show no probabilities.'
            raise NoAttentionMaps(words, "attention computed by a kernel that cannot be watched", advice)
        return self._taken.pop(layer)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._armed is None or func not in _WATCHED:
            return func(*args, **kwargs)
        output, of_sequence = _WATCHED[func](func, args, kwargs)
        if of_sequence is not None:
            layer, words = self._armed
            self._taken[layer] = AttentionMaps(words, of_sequence)
            self._armed = None
        return output


Watched = tuple[Any, Callable[[int], Tensor] | None]


def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watched:
    """Softmax over the keys of scores (batch, head, query, key); anything else is not attention."""
    output = func(*args, **kwargs)
    scores = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    is_attention = scores.ndim == 4 and dim in (-1, 3) and min(scores.shape[2:]) > 0
    return output, (lambda sequence: output[sequence].detach()) if is_attention else None


def _fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watched:
    """The fused kernel: keeps queries, keys and mask; the kernel itself runs as always."""
    output = func(*args, **kwargs)
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("dropout_p"):
        return output, lambda sequence: torch.full((1, 1, 1), math.nan)

    def of_sequence(sequence: int) -> Tensor:
        mask = given.get("attn_mask")
        return _probabilities(
            given["query"][sequence],
            given["key"][sequence],
            mask=None if mask is None else mask.expand(len(given["query"]), *mask.shape[-3:])[sequence],
            is_causal=bool(given.get("is_causal")),
            scale=given.get("scale"),
        )

    return output, of_sequence if given["query"].ndim == 4 else None


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


def _multi_head(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watched:
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


_WATCHED: Mapping[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Watched]] = {
    F.scaled_dot_product_attention: _fused,
    F.multi_head_attention_forward: _multi_head,
    **dict.fromkeys(SOFTMAX, _softmax),
}
