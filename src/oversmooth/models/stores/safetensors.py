"""safetensors files, read by byte ranges: the header first, then only the tensors that are asked for.

Not memory-mapped on purpose: pages of a map stay resident, so the peak would grow with the number of layers read.
The header is checked completely before any number is believed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oversmooth.errors import BrokenFile, PackedWeights
from oversmooth.models.stores.files import Folder, RangedFile, read_small
from oversmooth.results import FileFacts

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the format's own implementation."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the header, with its bytes as offsets into the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: RangedFile) -> dict[str, Entry]:
    """The checked header of a safetensors file."""
    if file.size < 8:
        raise BrokenFile(file.label, "a safetensors header", f"a file of {file.size} bytes")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > min(file.size - 8, LARGEST_HEADER):
        raise BrokenFile(file.label, "a safetensors header that fits into the file", f"a header of {length} bytes")
    try:
        header = json.loads(bytes(file.read(8, 8 + length)))
        assert isinstance(header, dict)
    except (ValueError, RecursionError, AssertionError) as error:
        raise BrokenFile(file.label, "a safetensors header in JSON", "something else") from error
    base = 8 + length
    return {name: _entry(file, name, item, base) for name, item in header.items() if name != "__metadata__"}


def _entry(file: RangedFile, name: str, item: object, base: int) -> Entry:
    try:
        dtype, shape, (start, stop) = item["dtype"], tuple(item["shape"]), item["data_offsets"]  # type: ignore[index]
        is_whole = isinstance(dtype, str) and all(isinstance(size, int) and size >= 0 for size in (*shape, start, stop))
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenFile(file.label, f"dtype, shape and offsets of {name!r}", repr(item)) from error
    if not is_whole or stop < start:
        raise BrokenFile(file.label, f"a dtype and whole, ordered sizes for {name!r}", repr(item))
    if dtype in DTYPES and stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise BrokenFile(file.label, f"{list(shape)} numbers of {dtype} in {name!r}", f"{stop - start} bytes")
    if base + stop > file.size:
        raise BrokenFile(file.label, f"{base + stop} bytes, as its header promises for {name!r}", f"{file.size}")
    return Entry(dtype, shape, base + start, base + stop)


class SafetensorsStore:
    """One safetensors file, or the shards that an index names; a shard is opened when one of its tensors is read."""

    def __init__(self, folder: Folder, where: Mapping[str, str]):
        self._folder = folder
        self._where = dict(where)
        self._open: dict[str, tuple[RangedFile, dict[str, Entry]]] = {}
        self.names = self._where.keys()

    @classmethod
    def single(cls, folder: Folder, name: str) -> "SafetensorsStore":
        store = cls(folder, {})
        _, header = store._shard(name)
        store._where.update(dict.fromkeys(header, name))
        return store

    @classmethod
    def sharded(cls, folder: Folder, index: str) -> "SafetensorsStore":
        return cls(folder, read_weight_map(folder, index))

    def _shard(self, shard: str) -> tuple[RangedFile, dict[str, Entry]]:
        if shard not in self._open:
            file = self._folder.open(shard)
            self._open[shard] = (file, read_header(file))
        return self._open[shard]

    def read(self, name: str) -> Tensor:
        shard = self._where[name]
        file, header = self._shard(shard)
        if name not in header:
            raise BrokenFile(file.label, f"the tensor {name!r}, as the index says", "no such tensor")
        entry = header[name]
        if entry.dtype not in DTYPES:
            raise PackedWeights(file.label, f"{name!r} has dtype {entry.dtype}")
        data = file.read(entry.start, entry.stop)
        if not data:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).reshape(entry.shape)

    def file_of(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._where[name]

    def files(self) -> tuple[FileFacts, ...]:
        return tuple(FileFacts(name=name, size_bytes=file.size) for name, (file, _) in sorted(self._open.items()))


def read_weight_map(folder: Folder, index: str) -> dict[str, str]:
    """Tensor name to shard, from an index file."""
    label = f"{folder.label}/{index}"
    try:
        weight_map = json.loads(read_small(folder, index))["weight_map"]
        assert isinstance(weight_map, dict)
    except (ValueError, KeyError, TypeError, RecursionError, AssertionError) as error:
        raise BrokenFile(label, "a JSON index with a weight_map", "something else") from error
    escaping = [shard for shard in weight_map.values() if not isinstance(shard, str) or "/" in shard or "\\" in shard]
    if escaping:
        raise BrokenFile(label, "shards beside the index", repr(escaping[0]), "Refused: the index points elsewhere.")
    absent = sorted({shard for shard in weight_map.values() if not folder.has(shard)})
    if absent:
        raise BrokenFile(label, "every shard beside it", f"no {absent[0]}", "Download the missing shards.")
    return weight_map
