"""8-bit floats with scales: `fp8` (DeepSeek's blocks, or one scale per tensor), `fbgemm_fp8` and modelopt's FP8."""

import torch
from torch import Tensor

from oversmooth.models.stores.quantised.bits import grid, in_float32, scale_blocks
from oversmooth.models.stores.quantised.packing import PackedWeight, Packing, Settings

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
UNUSED = (".input_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale", ".q_scale", ".output_scale")
"""Scales of activations: they change how a product is computed, not what the weight is."""


def float8(settings: Settings) -> Packing:
    """`fp8`: `weight * weight_scale_inv`, with one scale per block of `weight_block_size`, or one for all."""
    block = settings.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
    ):
        raise settings.unreadable("weight_block_size", block, "two positive numbers")
    words = f"float8 in blocks of {block[0]} x {block[1]}" if block else "float8 with one scale per tensor"

    def dequantise(packed: PackedWeight) -> Tensor:
        return scaled_float8(packed, ".weight_scale_inv", tuple(block) if block else None)

    return Packing(words=words, marker=".weight_scale_inv", parts=UNUSED, dequantise=dequantise)


def float8_per_row(settings: Settings) -> Packing:
    """`fbgemm_fp8`: one scale for each row of the weight."""

    def dequantise(packed: PackedWeight) -> Tensor:
        return scaled_float8(packed, ".weight_scale", (1, -1))

    return Packing(words="float8 with one scale per row", marker=".weight_scale", parts=UNUSED, dequantise=dequantise)


def float8_per_tensor(settings: Settings) -> Packing:
    """modelopt's `FP8`: one scale for the whole weight, under the name `weight_scale`."""

    def dequantise(packed: PackedWeight) -> Tensor:
        return scaled_float8(packed, ".weight_scale", None)

    words = "float8 with one scale per tensor"
    return Packing(words=words, marker=".weight_scale", parts=UNUSED, dequantise=dequantise)


def scaled_float8(packed: PackedWeight, scale: str, block: tuple[int, int] | None) -> Tensor:
    """Codes times scales; -1 stands for the whole length of an axis, and no block for the whole matrix."""
    codes = packed.part(".weight", *FLOAT8)
    if codes.ndim != 2:
        raise packed.broken(".weight", "a matrix", f"the shape {tuple(codes.shape)}")
    shape = (codes.shape[0], codes.shape[1])
    rows, columns = (size if size > 0 else whole for size, whole in zip(block or (-1, -1), shape, strict=True))
    why = f"one scale per block of {rows} x {columns} of a weight of {shape[0]} x {shape[1]}"
    found = packed.part(scale)
    if found.dtype == torch.uint8:  # exponents of two
        scales = in_float32(packed.part(scale, shape=grid(shape, (rows, columns)), why=why))
    else:
        scales = packed.scale(scale, grid(shape, (rows, columns)), why)
    return scale_blocks(codes.float(), scales, (rows, columns))
