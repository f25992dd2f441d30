"""4-bit floats with a scale per block: MXFP4 as gpt-oss stores its experts, and NVFP4 as modelopt stores weights."""

from collections.abc import Callable

import torch
from torch import Tensor

from oversmooth.models.stores.quantised.bits import grid, powers_of_two, scale_blocks, unpack_fp4
from oversmooth.models.stores.quantised.float8 import UNUSED
from oversmooth.models.stores.quantised.packing import PackedWeight, Packing, Settings

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
    values = unpack_fp4(packed.part(codes, torch.uint8))
    if values.ndim != 2:
        raise packed.broken(codes, "a matrix", f"the shape {tuple(values.shape)}")
    blocks = grid((values.shape[0], values.shape[1]), (1, block))
    why = f"one scale per {block} of {values.shape[1]} inputs"
    scales = packed.part(".weight_scale", torch.float8_e4m3fn, shape=blocks, why=why).float()
    return scale_blocks(values, combined(scales), (1, block))
