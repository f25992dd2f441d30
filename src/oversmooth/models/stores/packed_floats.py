"""Float8, MXFP4 and NVFP4 weights."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from oversmooth.models.stores.packing import (
    PackedWeight,
    Packing,
    Settings,
    grid,
    powers_of_two,
    scale_blocks,
    unpack_fp4,
)

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
    """Codes times scales; -1 stands for the whole length of an axis, and no block for the whole matrix."""
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
