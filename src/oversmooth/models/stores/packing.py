"""The description of a packing of quantised weights, and how to unpack bits."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from oversmooth.errors import BrokenFile, PackedWeights

# --- what a packing is: which tensors make up a packed weight, and how they become one matrix of float32 ---

CHECK_CONFIG = "Check that quantization_config in config.json belongs to these weights, or download them again."


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The tensors of one packed weight, read on demand; mismatches raise `BrokenFile`."""

    where: str
    path: str
    """Of the module that the weight belongs to."""
    names: Collection[str]
    _read: Callable[[str], Tensor]

    def has(self, ending: str) -> bool:
        return self.path + ending in self.names

    def part(self, ending: str, *dtypes: torch.dtype, shape: tuple[int, ...] | None = None, why: str = "") -> Tensor:
        """The tensor `path + ending`, of one of these dtypes and of this shape, where one is given."""
        name = self.path + ending
        if name not in self.names:
            raise self.broken(ending, "a tensor of that name, which this packing needs", "none")
        found = self._read(name)
        if found.dtype == torch.bool:  # torch computes with them as with 0 and 1
            raise self.broken(ending, "numbers", "true and false")
        if dtypes and found.dtype not in dtypes:
            words = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.broken(ending, f"numbers of {words}", str(found.dtype).removeprefix("torch."))
        if shape is not None and tuple(found.shape) != shape:
            raise self.broken(ending, f"the shape {shape}{why and ', ' + why}", f"the shape {tuple(found.shape)}")
        return found

    def matrix(self, ending: str, *dtypes: torch.dtype) -> Tensor:
        """The same for what must be a matrix, and not an empty one."""
        found = self.part(ending, *dtypes)
        if found.ndim != 2 or not found.numel():
            raise self.broken(ending, "a matrix of numbers", f"the shape {tuple(found.shape)}")
        return found

    def not_negative(self, ending: str, scales: Tensor) -> Tensor:
        """The scales themselves; no quantiser writes a negative one, and it would turn the sign of its weights."""
        if bool((scales < 0).any()):
            raise self.broken(ending, "scales of 0 or more", f"the scale {float(scales.min()):g}")
        return scales

    def scale(self, ending: str, shape: tuple[int, int], why: str) -> Tensor:
        """A floating tensor of one number per block, as float32; a lone number or a column counts as its own grid."""
        found = self.part(ending)
        if not found.is_floating_point():
            raise self.broken(ending, "floating numbers", str(found.dtype).removeprefix("torch."))
        is_one = shape == (1, 1) and found.numel() == 1
        is_column = shape[1] == 1 and tuple(found.shape) in ((shape[0],), shape)
        if not is_one and not is_column and tuple(found.shape) != shape:
            raise self.broken(ending, f"the shape {shape}, {why}", f"the shape {tuple(found.shape)}")
        return self.not_negative(ending, found.float()).reshape(shape)

    def broken(self, ending: str, expected: str, found: str) -> BrokenFile:
        return BrokenFile(f"{self.where}: the tensor {self.path + ending!r}", expected, found, CHECK_CONFIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """One way of packing weights, as a checkpoint's config settles it."""

    words: str
    """What it is, for provenance and messages."""
    marker: str
    """Ending of the tensor that only packed weights have; the part before it is the module's path."""
    parts: tuple[str, ...]
    """Endings of tensors that belong to packed weights and are no tensors of the model."""
    dequantise: Callable[[PackedWeight], Tensor]
    """The weight in float32, laid out as `nn.Linear` has it: (out, in)."""
    weight: str = ".weight"
    """Ending of the weight in the model itself."""


class Settings:
    """`quantization_config` with checked fields: what is absent, of another type or unknown is named."""

    def __init__(self, where: str, method: str, fields: Mapping[str, Any]):
        self.where = where
        self.method = method
        self._fields = fields

    def get(self, key: str) -> Any:
        return self._fields.get(key)

    def integer(self, key: str, allowed: Iterable[int] = (), default: int | None = None) -> int:
        value = self._fields.get(key, default)
        known = tuple(allowed)
        if not isinstance(value, int) or isinstance(value, bool) or (known and value not in known):
            expected = " or ".join(map(str, known)) if known else "a whole number"
            raise self.unreadable(key, value, expected)
        return value

    def word(self, key: str, allowed: Iterable[str], default: str | None = None) -> str:
        value = self._fields.get(key, default)
        known = tuple(allowed)
        lowered = value.lower() if isinstance(value, str) else value
        if lowered not in known:
            raise self.unreadable(key, value, " or ".join(known))
        return str(lowered)

    def flag(self, key: str) -> bool:
        """Whether a switch is on; absent, it is off."""
        value = self._fields.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.unreadable(key, value, "true or false")
        return bool(value)

    def group_size(self, key: str = "group_size") -> int:
        """Channels that share a scale; -1 for all of them."""
        value = self.integer(key)
        if value < 1 and value != -1:
            raise self.unreadable(key, value, "a positive number, or -1 for whole rows")
        return value

    def block(self, key: str) -> tuple[int, int] | None:
        """Rows and columns that share a scale; `None` where the key is absent."""
        value = self._fields.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
            raise self.unreadable(key, value, "two positive numbers")
        return value[0], value[1]

    def fields(self, key: str) -> "Settings":
        """The object under a key."""
        value = self._fields.get(key)
        if not isinstance(value, Mapping):
            raise self.unreadable(key, value, "an object")
        return Settings(self.where, f"{self.method}, {key}", value)

    def unreadable(self, key: str, value: object, expected: str) -> PackedWeights:
        return PackedWeights(self.where, f"{self.method} with {key}={value!r}; readable is {expected}")


# --- what the packings are made of: small integers in words, 4-bit floats in bytes ---

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
    """E8M0: one byte is an exponent with bias 127; 255 is NaN."""
    found = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
    return found.masked_fill(exponents == 255, torch.nan)


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
