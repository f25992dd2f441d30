"""Codes: shadows of tensors that say, entry by entry, which row of which weight the entry is.

Operations that only move numbers are repeated on the shadow; what changes numbers ends it.
"""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from oversmooth.models.discovery.graph import number_of
from oversmooth.models.discovery.operations import COPIES, FACTORIES, KEEPS_VALUES, MOVES
from oversmooth.models.discovery.products import Product
from oversmooth.models.discovery.weights import SHIFT

if TYPE_CHECKING:
    from oversmooth.models.discovery.trace import Trace

NOTHING = -1.0
LARGEST_SHADOW = 2**24
"""Entries of a copied parameter or of an empty buffer up to which it gets a shadow."""

Codes = Float[Tensor, "*shape"]


def follow_codes(
    trace: "Trace", func: Any, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]
) -> None:
    """Gives what an operation made the shadow that it has, if it has one."""
    if op in FACTORIES:
        if made[0].numel() <= LARGEST_SHADOW:
            trace.set_codes(made[0], torch.full(made[0].shape, NOTHING, dtype=torch.float64))
        return
    if op in ("add", "add_"):
        if not _follow_bias(trace, args, made[0]):
            trace.drop_codes(made[0])  # what is added in place
        return
    is_same = op in ("mul", "div") and number_of(op, args, kwargs) == 1.0
    if is_same and (codes := trace.codes(args[0])) is not None:
        trace.set_codes(made[0], codes)
    if op not in MOVES:
        if func._schema.is_mutable:
            trace.drop_codes(made[0])
        return
    shadows = _shadows(trace, op, args)
    if not shadows:
        return

    def shadow(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        found = shadows.get(id(leaf))
        if found is not None and op == "as_strided":  # which counts entries of memory: lie there as the tensor does
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=torch.float64).copy_(found)
        return torch.full(leaf.shape, NOTHING, dtype=torch.float64) if found is None else found

    try:
        moved = _move(func, op, tree_map_only(Tensor, shadow, args), kwargs, made[0])
    except (RuntimeError, TypeError, NotImplementedError):
        return  # a move that has no meaning on the shadow's layout: the numbers count as changed
    for tensor, codes in zip(made, moved, strict=False):
        if codes.shape == tensor.shape:
            trace.set_codes(tensor, codes)


def _shadows(trace: "Trace", op: str, args: tuple[Any, ...]) -> dict[int, Codes]:
    """The shadows of an operation's arguments, by identity."""
    found: dict[int, Codes] = {}
    for leaf in tree_leaves(args):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            codes = trace.codes(leaf)
            if codes is None and op in COPIES and leaf.numel() <= LARGEST_SHADOW:
                codes = trace.parameter_codes(leaf)
            if codes is not None:
                found[id(leaf)] = codes
    return found


def _follow_bias(trace: "Trace", args: tuple[Any, ...], made: Tensor) -> bool:
    """A parameter added to the result of a product is a bias: the rows stay what they are."""
    if len(args) < 2 or not all(isinstance(arg, Tensor) for arg in args[:2]):
        return False
    for data, bias in (args[:2], args[1::-1]):
        codes = trace.codes(data)
        if codes is None or not (trace.is_parameter(bias) and bias.numel() <= LARGEST_SHADOW):
            continue
        bias_codes = trace.parameter_codes(bias)
        if bias_codes is None or codes.shape != made.shape or bias.numel() < 2:
            return False
        source = trace.sources[int(codes.flatten()[0] // SHIFT)] if codes.numel() and codes.min() >= 0 else None
        if isinstance(source, Product):
            source.add_bias(codes % SHIFT, bias_codes)
            trace.set_codes(made, codes)
            return True
        return False
    return False


def _move(func: Any, op: str, args: Any, kwargs: dict[str, Any], like: Tensor) -> list[Tensor]:
    """The move repeated on shadows, which may lie differently in memory."""
    if op in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
        return [args[0].reshape(like.shape)]
    if op in ("_to_copy", "clone", "contiguous"):
        return [args[0].clone()]
    if op == "where":  # the first argument is the mask
        args = sorted((arg for arg in args[1:] if isinstance(arg, Tensor)), key=lambda codes: -float(codes.max()))
    if op in KEEPS_VALUES:
        return [args[0].expand(like.shape)]
    if op == "constant_pad_nd":
        return [func(args[0], args[1], NOTHING)]
    if op == "im2col":  # it pads with zeros
        return [func(args[0] - NOTHING, *args[1:]) + NOTHING]
    moved = func(*args, **{name: value for name, value in kwargs.items() if name not in ("dtype", "device", "layout")})
    return [moved] if isinstance(moved, Tensor) else list(moved)
