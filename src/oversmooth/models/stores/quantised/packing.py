"""What a packing is: which tensors make up a packed weight, and how they become one matrix of float32."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oversmooth.errors import BrokenFile, PackedWeights

CHECK_CONFIG = "Check that quantization_config in config.json belongs to these weights, or download them again."


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The tensors of one packed weight, read when they are asked for; whatever does not fit is a `BrokenFile`."""

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
        if dtypes and found.dtype not in dtypes:
            words = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.broken(ending, f"numbers of {words}", str(found.dtype).removeprefix("torch."))
        if shape is not None and tuple(found.shape) != shape:
            raise self.broken(ending, f"the shape {shape}{why and ', ' + why}", f"the shape {tuple(found.shape)}")
        return found

    def scale(self, ending: str, shape: tuple[int, int], why: str) -> Tensor:
        """A floating tensor of one number per block, as float32; a lone number or a column counts as its own grid."""
        found = self.part(ending)
        if not found.is_floating_point():
            raise self.broken(ending, "floating numbers", str(found.dtype).removeprefix("torch."))
        is_one = shape == (1, 1) and found.numel() == 1
        is_column = shape[1] == 1 and tuple(found.shape) in ((shape[0],), shape)
        if not is_one and not is_column and tuple(found.shape) != shape:
            raise self.broken(ending, f"the shape {shape}, {why}", f"the shape {tuple(found.shape)}")
        return found.float().reshape(shape)

    def broken(self, ending: str, expected: str, found: str) -> BrokenFile:
        return BrokenFile(f"{self.where}: the tensor {self.path + ending!r}", expected, found, CHECK_CONFIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """One way of packing weights, as a checkpoint's config settles it."""

    words: str
    """What it is, for provenance and messages."""
    marker: str
    """Ending of the tensor that only packed weights have; what stands before it is the module's path."""
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

    def group_size(self, key: str = "group_size") -> int:
        """Channels that share a scale; -1 for all of them."""
        value = self.integer(key)
        if value < 1 and value != -1:
            raise self.unreadable(key, value, "a positive number, or -1 for whole rows")
        return value

    def fields(self, key: str) -> "Settings":
        """The object under a key."""
        value = self._fields.get(key)
        if not isinstance(value, Mapping):
            raise self.unreadable(key, value, "an object")
        return Settings(self.where, f"{self.method}, {key}", value)

    def unreadable(self, key: str, value: object, expected: str) -> PackedWeights:
        return PackedWeights(self.where, f"{self.method} with {key}={value!r}; readable is {expected}")
