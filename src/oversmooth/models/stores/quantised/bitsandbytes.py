"""bitsandbytes: NF4 and FP4 with one largest value per block (itself quantised or not), and 8 bits with one per row."""

import json
import math
from typing import Any

import torch
from torch import Tensor

from oversmooth.models.stores.quantised.packing import PackedWeight, Packing, Settings

STATES = {kind: f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
PARTS = (".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", *STATES.values())
OF_127 = 7.874015718698502e-3
"""1 / 127, as the library rounds it."""


def bitsandbytes(settings: Settings) -> tuple[Packing, ...]:
    """Both kinds at once: which one a weight has is seen from the tensors beside it."""
    if settings.get("load_in_8bit") not in (None, True, False):
        raise settings.unreadable("load_in_8bit", settings.get("load_in_8bit"), "true or false")
    four = Packing(words="bitsandbytes, 4 bits", marker=".weight.absmax", parts=PARTS, dequantise=_four_bits)
    eight = Packing(words="bitsandbytes, 8 bits", marker=".SCB", parts=(".weight_format",), dequantise=_eight_bits)
    return four, eight


def _eight_bits(packed: PackedWeight) -> Tensor:
    codes = packed.part(".weight", torch.int8)
    if codes.ndim != 2:
        raise packed.broken(".weight", "a matrix", f"the shape {tuple(codes.shape)}")
    if packed.has(".weight_format") and (found := packed.part(".weight_format").flatten().tolist()) != [0]:
        raise packed.broken(".weight_format", "0, for rows one after the other", f"{found}, an order of a GPU kernel")
    largest = packed.part(".SCB", torch.float32, shape=(codes.shape[0],), why="one number per row of the weight")
    return codes * largest[:, None] * OF_127


def _four_bits(packed: PackedWeight) -> Tensor:
    state = _state(packed)
    block, shape = state["blocksize"], tuple(state["shape"])
    count = math.prod(shape)
    codes = packed.part(".weight").contiguous().view(torch.uint8).flatten()
    if len(codes) != math.ceil(count / 2):
        raise packed.broken(".weight", f"{count} numbers of 4 bits, as its state says", f"{len(codes)} bytes")
    table = packed.part(".weight.quant_map", torch.float32, shape=(16,), why="a table of sixteen numbers")
    values = torch.stack((table[(codes >> 4).int()], table[(codes & 15).int()]), 1).flatten()[:count]
    return _times_blocks(values, _largest(packed, state, math.ceil(count / block)), block).reshape(shape)


def _largest(packed: PackedWeight, state: dict[str, Any], blocks: int) -> Tensor:
    """The largest value of each block; with double quantisation it is itself an 8-bit code plus an offset."""
    why = f"one number for each of {blocks} blocks"
    if not packed.has(".weight.nested_absmax"):
        return packed.part(".weight.absmax", torch.float32, shape=(blocks,), why=why)
    codes = packed.part(".weight.absmax", torch.uint8, shape=(blocks,), why=why)
    size = state["nested_blocksize"]
    why = f"one number per block of {size}"
    nested = packed.part(".weight.nested_absmax", torch.float32, shape=(math.ceil(blocks / size),), why=why)
    table = packed.part(".weight.nested_quant_map", torch.float32, shape=(256,), why="a table of 256 numbers")
    return _times_blocks(table[codes.int()], nested, size) + torch.tensor(float(state["nested_offset"]))


def _times_blocks(values: Tensor, largest: Tensor, block: int) -> Tensor:
    return values.mul_(largest.repeat_interleave(block)[: len(values)])


def _state(packed: PackedWeight) -> dict[str, Any]:
    """What the library keeps beside the tensors as JSON in bytes: sizes, and the offset of nested values."""
    ending = next((ending for ending in STATES.values() if packed.has(ending)), None)
    if ending is None:
        raise packed.broken(".weight.quant_state", f"a state of {' or '.join(STATES)}", "none")
    found = bytes(packed.part(ending, torch.uint8).tolist())
    try:
        state = json.loads(found)
        whole = [state["blocksize"], *state["shape"], state.get("nested_blocksize", 1)]
        is_sound = all(type(size) is int and size > 0 for size in whole) and len(state["shape"]) == 2
        float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_sound = False
    if not is_sound or (packed.has(".weight.nested_absmax") and "nested_offset" not in state):
        raise packed.broken(ending, "JSON with blocksize and shape", repr(found[:60]))
    return state
