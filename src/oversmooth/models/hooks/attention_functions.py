"""The functions that compute attention, called as always, and the probabilities of one sequence out of each call."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from jaxtyping import Float
from torch import Tensor

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)

Watched = tuple[Any, Callable[[int], Tensor] | None]


def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], heads: int | None) -> Watched:
    """Softmax over the keys of scores (batch, head, query, key); anything else is not attention."""
    output = func(*args, **kwargs)
    scores = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    is_over_keys = dim in (-1, scores.ndim - 1) and min(scores.shape[-2:]) > 0
    return output, maps_of(output, heads) if is_over_keys else None


def maps_of(probabilities: Tensor, heads: int | None) -> Callable[[int], Tensor] | None:
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
    q, k = q.detach().to(dtype), k.detach().to(dtype)
    if len(q) > len(k):
        k = k.repeat_interleave(len(q) // len(k), 0)
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


WATCHED: Mapping[Any, Callable[[Any, tuple[Any, ...], dict[str, Any], int | None], Watched]] = {
    F.scaled_dot_product_attention: _fused,
    F.multi_head_attention_forward: _multi_head,
    **dict.fromkeys(SOFTMAX, _softmax),
}
