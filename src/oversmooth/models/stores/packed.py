"""GPTQ, AWQ, bitsandbytes, float8, MXFP4 and NVFP4 weights."""

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oversmooth.models.stores.packing import (
    PackedWeight,
    Packing,
    Settings,
    grid,
    powers_of_two,
    scale_blocks,
    unpack_bits,
    unpack_fp4,
)

# --- GPTQ and AWQ: integers of 2 to 8 bits in 32-bit words ---

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the eight output channels of an AWQ word lie: channel j in the place AWQ_ORDER[j], counted in 4 bits."""
BITS = (2, 3, 4, 8)
GPTQ_PARTS = (".qzeros", ".scales", ".g_idx")


def gptq(settings: Settings) -> Packing:
    """`(code - zero) * scale`, packed along the input; `g_idx` says to which group each input channel belongs.

    Files of the format `gptq` store zeros minus one, those of `gptq_v2` store zeros unchanged.
    """
    bits = settings.integer("bits", BITS)
    version = settings.word("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    settings.word("pack_dtype", ("int32",), "int32")
    group = settings.group_size()
    overrides = bool(settings.get("dynamic"))
    in_order_of_activations = settings.flag("desc_act")

    def dequantise(packed: PackedWeight) -> Tensor:
        if in_order_of_activations and group != -1 and not packed.has(".g_idx"):
            raise packed.broken(".g_idx", "the group of each input channel, which desc_act shuffles", "none")
        return _gptq_weight(packed, bits, group, less_one=version == "gptq", overrides=overrides)

    words = f"GPTQ, {bits} bits" + ("" if group == -1 else f" in groups of {group}")
    return Packing(words=words, marker=".qweight", parts=GPTQ_PARTS, dequantise=dequantise)


def _gptq_weight(packed: PackedWeight, bits: int, group: int, *, less_one: bool, overrides: bool) -> Tensor:
    words = packed.matrix(".qweight", torch.int32)
    index = packed.part(".g_idx", torch.int32, torch.int64) if packed.has(".g_idx") else None
    if index is not None and (index.ndim != 1 or not len(index)):
        raise packed.broken(".g_idx", "the group of each input channel", f"the shape {tuple(index.shape)}")
    if overrides and index is not None:  # modules may differ from the config, and the shapes say how
        bits = words.shape[0] * 32 // len(index)
        if bits not in BITS:
            raise packed.broken(".qweight", f"{len(index)} input channels of {BITS} bits", f"{words.shape[0]} words")
        groups_stored = len(packed.matrix(".scales"))
        group = -1 if groups_stored == 1 else math.ceil(len(index) / groups_stored)
    rows = words.shape[0] * 32 // bits if index is None else len(index)
    size = rows if group == -1 else group
    if math.ceil(rows * bits / 32) != words.shape[0]:
        shape = tuple(words.shape)
        raise packed.broken(".qweight", f"{rows} input channels of {bits} bits in 32-bit words", f"the shape {shape}")
    columns, groups = words.shape[1], math.ceil(rows / size)
    scales, packed_zeros = _scales_and_zeros(packed, rows, size, columns, math.ceil(columns * bits / 32))
    zeros = unpack_bits(packed_zeros, bits, columns)
    if less_one:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    codes = unpack_bits(words.T.contiguous(), bits, rows).float()
    if index is None or torch.equal(index.long(), torch.arange(rows) // size):
        return scale_blocks(codes, scales.T.float(), (1, size), zeros.T.float())
    if int(index.min()) < 0 or int(index.max()) >= groups:
        raise packed.broken(".g_idx", f"groups from 0 to {groups - 1}", f"{int(index.min())} to {int(index.max())}")
    chosen = index.long()
    return codes.sub_(zeros.T[:, chosen].float()).mul_(scales.T[:, chosen].float())


def _scales_and_zeros(packed: PackedWeight, rows: int, size: int, columns: int, words: int) -> tuple[Tensor, Tensor]:
    """One row for each group of input channels: a scale per output channel, and the zeros in 32-bit words."""
    groups, why = math.ceil(rows / size), f"one number per group of {size} of {rows} input channels"
    scales = packed.part(".scales", torch.float16, torch.bfloat16, torch.float32, shape=(groups, columns), why=why)
    packed.not_negative(".scales", scales)
    return scales, packed.part(".qzeros", torch.int32, shape=(groups, words), why=why)


def awq(settings: Settings) -> Packing:
    """`(code - zero) * scale` in 4 bits, packed along the output in an order of its own (the version `gemm`)."""
    settings.integer("bits", (4,), settings.get("w_bit"))
    key = "format" if settings.get("version") is None and settings.get("format") is not None else "version"
    settings.word(key, ("gemm",), "gemm")
    if settings.get("zero_point") is False:
        raise settings.unreadable("zero_point", False, "true")
    group = settings.group_size("q_group_size" if settings.get("group_size") is None else "group_size")

    def dequantise(packed: PackedWeight) -> Tensor:
        words = packed.matrix(".qweight", torch.int32)
        rows, size = words.shape[0], words.shape[0] if group == -1 else group
        scales, zeros = _scales_and_zeros(packed, rows, size, words.shape[1] * 8, words.shape[1])
        codes = _awq_codes(words).T.float().contiguous()
        return scale_blocks(codes, scales.T.float(), (1, size), _awq_codes(zeros).T.float())

    words = "AWQ, 4 bits" + ("" if group == -1 else f" in groups of {group}")
    return Packing(words=words, marker=".qweight", parts=GPTQ_PARTS, dequantise=dequantise)


def _awq_codes(words: Tensor) -> Tensor:
    plain = unpack_bits(words, 4, words.shape[1] * 8)
    return plain.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)


# --- bitsandbytes: NF4 and FP4 with one largest value per block (itself quantised or not) ---

STATES = {kind: f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
BITSANDBYTES_PARTS = (".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", *STATES.values())
OF_127 = 7.874015718698502e-3
"""1 / 127, as the library rounds it."""


def bitsandbytes(settings: Settings) -> tuple[Packing, ...]:
    """Both kinds at once: the tensors beside a weight show which one it has."""
    if settings.get("load_in_8bit") not in (None, True, False):
        raise settings.unreadable("load_in_8bit", settings.get("load_in_8bit"), "true or false")
    four = Packing(
        words="bitsandbytes, 4 bits", marker=".weight.absmax", parts=BITSANDBYTES_PARTS, dequantise=_four_bits
    )
    eight = Packing(words="bitsandbytes, 8 bits", marker=".SCB", parts=(".weight_format",), dequantise=_eight_bits)
    return four, eight


def _eight_bits(packed: PackedWeight) -> Tensor:
    codes = packed.matrix(".weight", torch.int8)
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
    """The JSON in bytes that the library stores beside the tensors: sizes, and the offset of nested values."""
    ending = next((ending for ending in STATES.values() if packed.has(ending)), None)
    if ending is None:
        raise packed.broken(".weight.quant_state", f"a state of {' or '.join(STATES)}", "none")
    bytes_of_it = packed.part(ending, torch.uint8)
    if bytes_of_it.ndim != 1:
        raise packed.broken(ending, "a row of bytes", f"the shape {tuple(bytes_of_it.shape)}")
    found = bytes(bytes_of_it.tolist())
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


# --- 8-bit floats with scales: `fp8` (DeepSeek's blocks, or one scale per tensor) ---

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
UNUSED = (".input_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale", ".q_scale", ".output_scale")
"""Scales of activations: they change how a product is computed, not what the weight is."""


def float8(settings: Settings) -> Packing:
    """`fp8`: `weight * weight_scale_inv`, with one scale per block of `weight_block_size`, or one for all."""
    block = settings.block("weight_block_size")
    words = "with one scale per tensor" if block is None else f"in blocks of {block[0]} x {block[1]}"
    return _float8(words, ".weight_scale_inv", block)


def float8_per_row(settings: Settings) -> Packing:
    """`fbgemm_fp8`: one scale for each row of the weight."""
    return _float8("with one scale per row", ".weight_scale", (1, -1))


def float8_per_tensor(settings: Settings) -> Packing:
    """modelopt's `FP8`: one scale for the whole weight, under the name `weight_scale`."""
    return _float8("with one scale per tensor", ".weight_scale", None)


def _float8(words: str, scale: str, block: tuple[int, int] | None) -> Packing:
    dequantise = partial(_scaled_float8, scale=scale, block=block)
    return Packing(words=f"float8 {words}", marker=scale, parts=UNUSED, dequantise=dequantise)


def _scaled_float8(packed: PackedWeight, scale: str, block: tuple[int, int] | None) -> Tensor:
    """Codes times scales; in a block, -1 means the whole axis; no block means the whole matrix."""
    codes = packed.matrix(".weight", *FLOAT8)
    shape = (codes.shape[0], codes.shape[1])
    rows, columns = (size if size > 0 else whole for size, whole in zip(block or (-1, -1), shape, strict=True))
    why = f"one scale per block of {rows} x {columns} of a weight of {shape[0]} x {shape[1]}"
    if packed.part(scale).dtype == torch.uint8:  # exponents of two
        scales = powers_of_two(packed.part(scale, shape=grid(shape, (rows, columns)), why=why))
    else:
        scales = packed.scale(scale, grid(shape, (rows, columns)), why)
    return scale_blocks(codes.float(), scales, (rows, columns))


# --- 4-bit floats with a scale per block: MXFP4 as gpt-oss stores its experts ---

MX_BLOCK, NV_BLOCK = 32, 16


def mxfp4(settings: Settings) -> Packing:
    """`_blocks` of 32 numbers in 16 bytes and `_scales` of one exponent each; gpt-oss keeps (experts, in, out)."""

    def dequantise(packed: PackedWeight) -> Tensor:
        blocks = packed.part("_blocks", torch.uint8)
        if blocks.ndim < 3 or blocks.shape[-1] != MX_BLOCK // 2:
            expected = f"blocks of {MX_BLOCK // 2} bytes in the last axis"
            raise packed.broken("_blocks", expected, f"the shape {tuple(blocks.shape)}")
        why = f"one exponent per block of {MX_BLOCK}"
        exponents = packed.part("_scales", torch.uint8, shape=tuple(blocks.shape[:-1]), why=why)
        values = unpack_fp4(blocks).mul_(powers_of_two(exponents)[..., None]).flatten(-2)
        return values.transpose(-2, -1)

    return Packing(words="MXFP4", marker="_blocks", parts=("_scales",), dequantise=dequantise, weight="")


def nvfp4(settings: Settings) -> Packing:
    """modelopt's NVFP4: codes, times a float8 scale per 16 inputs, times one float32 scale `weight_scale_2`."""

    def dequantise(packed: PackedWeight) -> Tensor:
        overall = packed.scale(".weight_scale_2", (1, 1), "one number for the whole weight")
        return nv_weight(packed, ".weight", lambda scales: scales * overall)

    parts = (".weight_scale_2", *UNUSED)
    return Packing(words="NVFP4", marker=".weight_scale", parts=parts, dequantise=dequantise)


def nv_weight(packed: PackedWeight, codes: str, combined: Callable[[Tensor], Tensor], block: int = NV_BLOCK) -> Tensor:
    """4-bit floats times the float8 scale of their block, which `combined` first joins with the scale of the weight."""
    values = unpack_fp4(packed.matrix(codes, torch.uint8))
    blocks = grid((values.shape[0], values.shape[1]), (1, block))
    why = f"one scale per {block} of {values.shape[1]} inputs"
    scales = packed.part(".weight_scale", torch.float8_e4m3fn, shape=blocks, why=why).float()
    return scale_blocks(values, combined(scales), (1, block))
