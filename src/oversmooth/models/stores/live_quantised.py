"""Weights of live models that are quantised in memory: torchao's tensors, and bitsandbytes' parameters, as plain floats."""

from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.errors import PackedWeights
from oversmooth.models.stores.quantised.bitsandbytes import OF_127


def plain(owner: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """The tensor itself, or what it stands for where its class quantises; in float32 then."""
    kind = type(tensor).__name__
    if kind == "Params4bit":
        return _four_bits(name, tensor)
    if kind == "Int8Params" and tensor.dtype == torch.int8:
        return _eight_bits(owner, name, tensor)
    return tensor.dequantize().float() if _has_own_floats(tensor) else tensor


def is_quantised(tensor: Tensor) -> bool:
    """Whether a live tensor stands for other numbers than it holds."""
    return type(tensor).__name__ in ("Params4bit", "Int8Params") or _has_own_floats(tensor)


def _has_own_floats(tensor: Tensor) -> bool:
    is_subclass = type(tensor) not in (Tensor, nn.Parameter) and not isinstance(
        tensor, nn.parameter.UninitializedParameter
    )
    return is_subclass and type(tensor).dequantize is not Tensor.dequantize  # torch's own is for its old dtypes


def _four_bits(name: str, tensor: Any) -> Tensor:
    if tensor.quant_state is None:  # not quantised yet: that happens when it is moved to its device
        return tensor.data
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(tensor.data, tensor.quant_state).float()


def _eight_bits(owner: nn.Module, name: str, tensor: Any) -> Tensor:
    scales = tensor.SCB if tensor.SCB is not None else getattr(getattr(owner, "state", None), "SCB", None)
    if scales is None:
        raise PackedWeights("the module", f"{name!r} holds 8-bit integers of bitsandbytes without their scales")
    return tensor.data * scales.view(-1, 1) * OF_127
