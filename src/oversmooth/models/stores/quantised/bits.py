"""What the packings are made of: small integers in words, 4-bit floats in bytes, and scales for blocks of a matrix."""

import math

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The sixteen numbers of E2M1, the 4-bit float of MXFP4 and NVFP4, by their code."""


def unpack_bits(words: Int[Tensor, "rows words"], bits: int, count: int) -> UInt8[Tensor, "rows count"]:
    """The first `count` unsigned integers of `bits` bits in each row of 32-bit words, lowest bits first, without gaps.

    32 integers fill `bits` words exactly; where `bits` does not divide 32, some begin in one word and end in the next.
    """
    rows, width = words.shape
    cycles = math.ceil(width / bits)
    words = torch.nn.functional.pad(words, (0, cycles * bits - width)).reshape(rows, cycles, bits)
    found = torch.empty(rows, cycles, 32, dtype=torch.uint8)
    for lane in range(32):
        word, offset = divmod(lane * bits, 32)
        value = words[..., word] >> offset
        if offset + bits > 32:  # the shift copies the sign into the bits that the next word holds
            value = (value & ((1 << (32 - offset)) - 1)) | (words[..., word + 1] << (32 - offset))
        found[..., lane] = value & ((1 << bits) - 1)
    return found.reshape(rows, cycles * 32)[:, :count]


def unpack_fp4(packed: UInt8[Tensor, "*batch bytes"]) -> Float[Tensor, "*batch values"]:
    """Two E2M1 numbers per byte, the one in the low half first."""
    table = torch.tensor(FP4_VALUES)
    return torch.stack((table[(packed & 15).int()], table[(packed >> 4).int()]), -1).flatten(-2)


def powers_of_two(exponents: UInt8[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """E8M0: one byte is an exponent with bias 127; 255 stands for NaN."""
    found = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
    return found.masked_fill(exponents == 255, torch.nan)


def in_float32(scale: Tensor) -> Tensor:
    """A scale as float32, whatever it is stored in; bytes are exponents."""
    return powers_of_two(scale) if scale.dtype == torch.uint8 else scale.float()


def grid(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks a matrix has in each direction; the last ones may be cut off by its edges."""
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])


def over_blocks(
    values: Float[Tensor, "grid_rows grid_columns"], shape: tuple[int, int], block: tuple[int, int]
) -> Tensor:
    """One value per block, broadcast to what multiplies a matrix of `shape` seen as `_blocks` shows it."""
    if shape[0] % block[0] or shape[1] % block[1]:
        return values.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]
    return values[:, None, :, None]


def scale_blocks(
    codes: Float[Tensor, "rows columns"],
    scale: Float[Tensor, "grid_rows grid_columns"],
    block: tuple[int, int],
    zero: Float[Tensor, "grid_rows grid_columns"] | None = None,
) -> Float[Tensor, "rows columns"]:
    """`(codes - zero) * scale`, with one zero and one scale for each block; changes `codes` in place."""
    shape = (codes.shape[0], codes.shape[1])
    is_whole = not (shape[0] % block[0] or shape[1] % block[1])
    seen = codes.view(shape[0] // block[0], block[0], shape[1] // block[1], block[1]) if is_whole else codes
    if zero is not None:
        seen.sub_(over_blocks(zero, shape, block))
    seen.mul_(over_blocks(scale, shape, block))
    return codes
