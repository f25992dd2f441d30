"""GGUF files: the header is parsed here, tensors are dequantised when they are read.

The gguf package's own reader trusts counts, so a small file can keep it busy for ever, and it accepts tensors that overlap or
lie off their alignment. Here they must follow each other as llama.cpp, which defines the format, demands.
"""

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from oversmooth.errors import BrokenFile, MissingDependency, PackedWeights, reason_of
from oversmooth.models.stores.store import LocalFolder
from oversmooth.results import FileFacts

# --- the header of a GGUF file ---

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type number of a plain value to its `struct` letter."""
UINT32 = 4
LONGEST_LIST = 4096
"""Lists up to this length are kept (sizes per layer); longer ones (vocabularies) are only walked over."""
LARGEST_RANK = 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies; `start:stop` are bytes of the file, `shape` has the slowest axis first."""

    kind: int
    """Number of the quantisation."""
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


@dataclass(frozen=True, slots=True)
class _Walk:
    """A position in the file; every step is checked against what is left of it."""

    file: BinaryIO
    label: str
    size: int

    @property
    def left(self) -> int:
        return self.size - self.file.tell()

    def require(self, count: int, at_least: int, what: str) -> None:
        """Raises unless `count` things of `at_least` so many bytes can still follow."""
        if count * at_least > self.left:
            raise BrokenFile(self.label, f"a GGUF file that holds {count} {what}", f"{self.left} bytes")

    def bytes(self, count: int) -> bytes:
        self.require(count, 1, "bytes more")
        data = self.file.read(count)
        if len(data) != count:
            raise BrokenFile(self.label, f"a GGUF file of {self.size} bytes", "one that shrinks while it is read")
        return data

    def skip(self, count: int) -> None:
        self.require(count, 1, "bytes more")
        self.file.seek(count, 1)

    def number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self.bytes(struct.calcsize(f"<{letter}")))[0]

    def text(self) -> str:
        raw = self.bytes(self.number("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BrokenFile(self.label, "names and words in UTF-8", repr(raw[:40])) from error

    def value(self, kind: int) -> Any:
        """A metadata value; `None` for a list too long to be of interest."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._list(self.number("I"), self.number("Q"))
        raise BrokenFile(self.label, "a GGUF file with known types of metadata", f"type {kind}")

    def _list(self, kind: int, count: int) -> list[Any] | None:
        if kind in SCALARS:
            letter = SCALARS[kind]
            width = struct.calcsize(f"<{letter}")
            self.require(count, width, "numbers in a list")
            if count > LONGEST_LIST:
                self.skip(count * width)
                return None
            return list(struct.unpack(f"<{count}{letter}", self.bytes(count * width)))
        if kind != STRING:
            raise BrokenFile(self.label, "lists of numbers or of words", f"a list of type {kind}")
        self.require(count, 8, "words in a list")
        for _ in range(count):
            self.skip(self.number("Q"))
        return None


def read_gguf_header(path: Path) -> GGUFHeader:
    """Metadata and the places of all tensors; raises `BrokenFile` for whatever llama.cpp would not load."""
    try:
        with path.open("rb") as file:
            walk = _Walk(file, str(path), path.stat().st_size)
            return _header(walk)
    except OSError as error:
        found = reason_of(error)
        raise BrokenFile(str(path), "a readable GGUF file", found, "Check the path and its permissions.") from error


def _header(walk: _Walk) -> GGUFHeader:
    if walk.size < 24 or walk.bytes(4) != MAGIC:
        raise BrokenFile(walk.label, "a GGUF file", f"{walk.size} bytes without its mark at the start")
    version = walk.number("I")
    if version not in VERSIONS:
        found = "one for machines of the other byte order" if version & 0xFFFF == 0 else f"version {version}"
        raise BrokenFile(walk.label, f"a GGUF file of version {VERSIONS[0]} or {VERSIONS[1]}", found)
    tensor_count, value_count = walk.number("Q"), walk.number("Q")
    metadata = _metadata(walk, value_count)
    kind, alignment = metadata.get("general.alignment", (UINT32, 32))
    if kind != UINT32 or alignment == 0 or alignment & (alignment - 1):
        raise BrokenFile(walk.label, "an alignment that is a power of two", repr(alignment))
    places = _places(walk, tensor_count)
    base = -(-walk.file.tell() // alignment) * alignment
    return GGUFHeader({key: value for key, (_, value) in metadata.items()}, _laid_out(walk, places, base, alignment))


def _metadata(walk: _Walk, count: int) -> dict[str, tuple[int, Any]]:
    """Key to type and value."""
    walk.require(count, 13, "values of metadata")
    found: dict[str, tuple[int, Any]] = {}
    for _ in range(count):
        key, kind = walk.text(), walk.number("I")
        if key in found:
            raise BrokenFile(walk.label, "a GGUF file that says everything once", f"the key {key!r} twice")
        found[key] = (kind, walk.value(kind))
    return found


def _places(walk: _Walk, count: int) -> dict[str, tuple[int, tuple[int, ...], int]]:
    """Tensor name to type, shape (slowest axis first) and offset, in the order of the file."""
    walk.require(count, 24, "tensors")
    found: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(count):
        name, rank = walk.text(), walk.number("I")
        if rank > LARGEST_RANK:
            raise BrokenFile(walk.label, f"at most {LARGEST_RANK} axes of {name!r}", f"{rank}")
        shape = tuple(walk.number("Q") for _ in range(rank))
        if name in found:
            raise BrokenFile(walk.label, "a GGUF file that holds every tensor once", f"{name!r} twice")
        found[name] = (walk.number("I"), shape[::-1], walk.number("Q"))
    return found


def _laid_out(
    walk: _Walk, places: dict[str, tuple[int, tuple[int, ...], int]], base: int, alignment: int
) -> dict[str, GGUFTensor]:
    """The tensors, one behind the other at the next multiple of the alignment, inside the file."""
    expected = 0
    found: dict[str, GGUFTensor] = {}
    for name, (kind, shape, offset) in places.items():
        length = _length(walk, name, kind, shape)
        if offset != expected:
            raise BrokenFile(walk.label, f"{name!r} at offset {expected}, behind the tensor before it", f"{offset}")
        found[name] = GGUFTensor(kind, shape, base + offset, base + offset + length)
        if found[name].stop > walk.size:
            raise BrokenFile(
                walk.label, f"a GGUF file of {found[name].stop} bytes or more, for {name!r}", f"{walk.size}"
            )
        expected += -(-length // alignment) * alignment
    return found


def _length(walk: _Walk, name: str, kind: int, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; its rows must be whole blocks of its quantisation."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        per_block, bytes_per_block = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as error:
        raise BrokenFile(walk.label, f"a known quantisation of {name!r}", f"type {kind}") from error
    row = shape[-1] if shape else 1
    if row % per_block:
        raise BrokenFile(walk.label, f"rows of {name!r} in blocks of {per_block}", f"rows of {row}")
    return math.prod(shape) // per_block * bytes_per_block


# --- metadata as a config, and tensors dequantised one at a time ---

SIZE_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.value_length": "head_dim",
    "use_parallel_residual": "use_parallel_residual",
    "residual_scale": "residual_multiplier",
}
"""GGUF metadata under the architecture's name, and the config key that says the same."""
PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
"""Types stored as numbers; all others are bytes of blocks."""
PART = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
MOST_PARTS = 1000


class GGUFStore:
    """The tensors of one GGUF file; `config` holds its architecture and sizes under transformers' names.

    A model that was split has `parts`, in order and with `path` as the first: metadata lie there, tensors in all of them.
    """

    def __init__(self, path: Path, parts: Sequence[Path] = ()):
        try:
            import gguf  # noqa: F401 - sizes and meaning of its blocks
        except ImportError as error:
            raise MissingDependency("gguf", "gguf", "reading a GGUF file") from error
        self._path = path
        paths = tuple(parts) or (path,)
        self._files = [LocalFolder(part.parent).open(part.name) for part in paths]
        headers = [read_gguf_header(part) for part in paths]
        self._tensors = {
            name: (file, tensor)
            for file, header in zip(self._files, headers, strict=True)
            for name, tensor in header.tensors.items()
        }
        self.names = self._tensors.keys()
        self.config = _config(path, headers[0].metadata)
        if parts:
            _require_whole(paths, [header.metadata for header in headers], len(self._tensors))

    def read(self, name: str) -> Tensor:
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize, quant_shape_to_byte_shape

        file, tensor = self._tensors[name]
        kind = GGMLQuantizationType(tensor.kind)
        raw = np.frombuffer(file.read(tensor.start, tensor.stop), PLAIN.get(kind.name, "u1"))
        if not raw.size:
            return torch.empty(tensor.shape)
        stored = tensor.shape if kind.name in PLAIN else quant_shape_to_byte_shape(tensor.shape, kind)
        try:
            with np.errstate(all="ignore"):  # scales of a broken block may be infinite; that is for the caller to see
                values = dequantize(raw.reshape(stored), kind)
        except NotImplementedError as error:
            raise PackedWeights(str(self._path), f"{name!r} is {kind.name}") from error
        return torch.from_numpy(values.astype("float32", copy=True)).reshape(tensor.shape)

    def files(self) -> tuple[FileFacts, ...]:
        return tuple(FileFacts(name=Path(file.label).name, size_bytes=file.size) for file in self._files)


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """All parts of a split model of which `path` is one, in order; empty for a whole file.

    Raises `BrokenFile` where one of them is not there.
    """
    part = PART.search(path.name)
    if part is None or int(part["count"]) < 2:
        return ()
    base, count = path.name[: part.start()], int(part["count"])
    if count > MOST_PARTS:
        raise BrokenFile(str(path), f"at most {MOST_PARTS} parts", f"a name that says {count}")
    parts = tuple(path.with_name(f"{base}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1))
    absent = [item.name for item in parts if not item.is_file()]
    if absent:
        raise BrokenFile(str(path), f"all {count} parts beside it", f"no {absent[0]}", "Download the missing parts.")
    return parts


def _require_whole(paths: Sequence[Path], metadata: Sequence[dict[str, Any]], found: int) -> None:
    """The metadata of all parts must agree: the number of each, their count, and the number of tensors."""
    for number, (path, said) in enumerate(zip(paths, metadata, strict=True)):
        for key, expected in (("split.no", number), ("split.count", len(paths)), ("split.tensors.count", found)):
            if said.get(key) != expected:
                told = f"{said.get(key)!r}"
                raise BrokenFile(str(path), f"metadata {key} = {expected}", told, "Download the parts again.")


def _config(path: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise BrokenFile(str(path), "the name of a model in metadata general.architecture", repr(architecture))
    config: dict[str, Any] = {"gguf_architecture": architecture}
    stated = {key: metadata[f"{architecture}.{key}"] for key in SIZE_KEYS if f"{architecture}.{key}" in metadata}
    for key, value in stated.items():
        if isinstance(value, list):  # per-layer sizes; hybrids store 0 where a block has no attention
            different = sorted(set(value) - {0})
            if len(different) > 1:
                raise PackedWeights(str(path), f"{key} differs between layers: {different[:8]}")
            value = different[0] if different else None
        config[SIZE_KEYS[key]] = value
    return config
