"""safetensors files: the header is checked completely, then tensors are read as byte ranges.

They are not memory-mapped: mapped pages stay resident, so the peak would grow with the number of layers read.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oversmooth.environment.files import json_kind, json_object
from oversmooth.errors import BrokenFile, PackedWeights
from oversmooth.models.stores.store import LARGEST_JSON, Folder, RangedFile, read_small
from oversmooth.results import FileFacts

# --- neighbouring reads of one remote file, merged ---

LARGEST_RUN = 32 * 2**20
"""Bytes of one merged read; a single tensor may be larger."""

Span = tuple[int, int]


def merged(spans: Iterable[Span], gap: int, largest: int = LARGEST_RUN) -> list[Span]:
    """Spans in order, joined where at most `gap` bytes lie between them and the whole stays within `largest`.

    >>> merged([(0, 4), (6, 8), (20, 30)], gap=2)
    [(0, 8), (20, 30)]
    """
    runs: list[Span] = []
    for start, stop in sorted(set(spans)):
        if runs and start - runs[-1][1] <= gap and max(stop, runs[-1][1]) - runs[-1][0] <= largest:
            runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
        else:
            runs.append((start, stop))
    return runs


class MergedFile:
    """A file of which is known what will be read; a run is fetched once and forgotten when all of it was handed out."""

    def __init__(self, file: RangedFile, spans: Iterable[Span]):
        self._file = file
        self._wanted = set(spans)
        self._runs = merged(self._wanted, file.gap or 0)
        self._held: dict[Span, bytearray] = {}

    def read(self, start: int, stop: int) -> bytearray:
        if (start, stop) not in self._wanted:
            return self._file.read(start, stop)
        self._wanted.discard((start, stop))
        run = self._runs[bisect_right(self._runs, (start, self._file.size + 1)) - 1]
        if run == (start, stop):
            return self._file.read(start, stop)
        data = self._held.get(run)
        if data is None:
            data = self._held[run] = self._file.read(*run)
        part = data[start - run[0] : stop - run[0]]
        if not any(run[0] <= first and last <= run[1] for first, last in self._wanted):
            del self._held[run]
        return part


# --- the header ---

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    **({"F8_E8M0": torch.float8_e8m0fnu} if hasattr(torch, "float8_e8m0fnu") else {}),  # since torch 2.7
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
BITS: Mapping[str, int] = {
    **{name: 8 * dtype.itemsize for name, dtype in DTYPES.items()},
    **dict.fromkeys(("F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("U64", "C64"), 64),
    "F4": 4,
    "U16": 16,
    "U32": 32,
}
"""Bits per number of every dtype of the format, also of those that are never read here: the layout needs them."""
LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the format's own implementation."""
COMMON_HEADER = 2**17
"""Bytes that hold the header of most models; read at once where that may cost some bytes in vain."""
LARGEST_COUNT = 2**63
"""No dimension, and no number of bits of a tensor, reaches this."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the header, with its bytes as offsets into the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: RangedFile) -> dict[str, Entry]:
    """The header of a safetensors file, checked as the format's own reader checks it.

    Tensors must follow each other without gap or overlap from the end of the header to the end of the file. A name
    that stands twice is refused too (the format's reader takes the last).
    """
    if file.size < 8:
        raise BrokenFile(file.label, "a safetensors header", f"a file of {file.size} bytes")
    first = bytes(file.read(0, min(file.size, max(8, min(file.gap or 0, COMMON_HEADER)))))  # one request for most files
    length = int.from_bytes(first[:8], "little")
    if length > min(file.size - 8, LARGEST_HEADER):
        raise BrokenFile(file.label, "a safetensors header that fits into the file", f"a header of {length} bytes")
    header = json_object(
        first[8 : 8 + length] if 8 + length <= len(first) else bytes(file.read(8, 8 + length)),
        file.label,
        "a safetensors header in JSON",
        object_pairs_hook=_without_duplicates,
        parse_constant=_no_constant,
        parse_int=_whole,
        parse_float=_fraction,
    )
    metadata = header.pop("__metadata__", {})
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        found = "other values" if isinstance(metadata, dict) else json_kind(metadata)
        raise BrokenFile(file.label, "__metadata__ of strings by name", found)
    base = 8 + length
    entries = {name: _entry(file, name, item, base) for name, item in header.items()}
    _check_layout(file, entries, base)
    return entries


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} twice")
        found[name] = value
    return found


def _no_constant(word: str) -> None:
    raise ValueError(f"{word}, which is no JSON")


def _whole(digits: str) -> int | float:
    number = _fraction(digits)
    return number if digits.startswith("-") else int(digits)  # sizes have no sign; the reference refuses -0


def _fraction(digits: str) -> float:
    """A number; one beyond the range of floats is refused, as by the reference."""
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"a number of {len(digits)} digits")
    return number


def _entry(file: RangedFile, name: str, item: object, base: int) -> Entry:
    try:
        dtype, shape, (start, stop) = item["dtype"], tuple(item["shape"]), item["data_offsets"]  # type: ignore[index]
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenFile(file.label, f"dtype, shape and offsets of {name!r}", _shortened(item)) from error
    is_whole = all(type(size) is int for size in (*shape, start, stop))
    if not isinstance(dtype, str) or not is_whole or stop < start:
        raise BrokenFile(file.label, f"a dtype and whole, ordered sizes for {name!r}", _shortened(item))
    if dtype not in BITS:
        raise BrokenFile(file.label, f"a dtype of safetensors for {name!r}", repr(dtype[:40]))
    if math.prod(max(size, 1) for size in shape) * BITS[dtype] >= LARGEST_COUNT:
        raise BrokenFile(file.label, f"a shape of {name!r} that a tensor can have", _shortened(list(shape)))
    if 8 * (stop - start) != math.prod(shape) * BITS[dtype]:
        raise BrokenFile(
            file.label, f"{_shortened(list(shape))} numbers of {dtype} in {name!r}", f"{stop - start} bytes"
        )
    if base + stop > file.size:
        raise BrokenFile(file.label, f"{base + stop} bytes, as its header promises for {name!r}", f"{file.size}")
    return Entry(dtype, shape, base + start, base + stop)


def _check_layout(file: RangedFile, entries: Mapping[str, Entry], base: int) -> None:
    """Raises unless every byte after the header belongs to exactly one tensor."""
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            fault = "leaves a gap" if entry.start > end else "overlaps another tensor"
            raise BrokenFile(file.label, f"{name!r} to begin at byte {end}", f"{entry.start}, which {fault}")
        end = entry.stop
    if end != file.size:
        raise BrokenFile(file.label, f"a file of {end} bytes, as its header promises", f"{file.size}")


def _shortened(value: object) -> str:
    return text if len(text := repr(value)) <= 200 else f"{text[:200]}..."


class SafetensorsStore:
    """One safetensors file, or the shards that an index names; a shard is opened when one of its tensors is read."""

    def __init__(self, folder: Folder, where: Mapping[str, str]):
        self._folder = folder
        self._where = dict(where)
        self._open: dict[str, tuple[RangedFile, dict[str, Entry]]] = {}
        self._announced: set[str] = set()
        self._merged: dict[str, MergedFile] = {}
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
        data = self._reader(shard).read(entry.start, entry.stop)
        if not data:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).reshape(entry.shape)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header alone."""
        _, header = self._shard(self._where[name])
        return header[name].shape

    def announce(self, names: Iterable[str]) -> None:
        """Says what is going to be read: neighbours in a remote file then come in one request."""
        self._announced.update(names)

    def _reader(self, shard: str) -> RangedFile | MergedFile:
        file, header = self._shard(shard)
        if file.gap is None:
            return file
        if shard not in self._merged:
            spans = [(header[name].start, header[name].stop) for name in self._announced & header.keys()]
            self._merged[shard] = MergedFile(file, spans)
        return self._merged[shard]

    def content_sha256(self) -> str | None:
        """Hash of the files that hold the tensors, where their server tells it; nothing is read."""
        told = getattr(self._folder, "sha256_of", None)
        hashes = [told(shard) for shard in sorted(set(self._where.values()))] if told else []
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest() if hashes and all(hashes) else None

    @property
    def commit(self) -> str | None:
        """The commit of the repository that the files come from, where their server tells it."""
        return getattr(self._folder, "commit", None)

    def file_of(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._where[name]

    def files(self) -> tuple[FileFacts, ...]:
        return tuple(FileFacts(name=name, size_bytes=file.size) for name, (file, _) in sorted(self._open.items()))


def read_weight_map(folder: Folder, index: str) -> dict[str, str]:
    """Tensor name to shard, from an index file."""
    label = f"{folder.label}/{index}"
    content = json_object(read_small(folder, index, LARGEST_JSON), label, "a JSON index with a weight_map")
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict):
        found = f"a weight_map that is {json_kind(weight_map)}" if "weight_map" in content else "none"
        raise BrokenFile(label, "a JSON index with a weight_map", found)
    for shard in weight_map.values():
        if not isinstance(shard, str) or not shard or set(shard) & set("/\\\0"):
            raise BrokenFile(label, "shards beside the index", repr(shard), "Refused: the index points elsewhere.")
    absent = sorted(shard for shard in set(weight_map.values()) if not folder.has(shard))
    if absent:
        raise BrokenFile(label, "every shard beside it", f"no {absent[0]}", "Download the missing shards.")
    return weight_map
