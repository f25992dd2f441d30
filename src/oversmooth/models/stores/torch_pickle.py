"""Files of `torch.save`: checked before torch loads them with `weights_only`.

`torch.load(mmap=True)` does not read an archive record by record: it takes compressed bytes for numbers, and reads beyond the
end of a short record. Here every record must be uncompressed and as long as its storage says, and nothing may be called
that allocates memory from a number in the file.
"""

import io
import os
import pickle
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor, nn

from oversmooth.errors import BrokenFile, PackedWeights, UnsafePickle, first_line, reason_of
from oversmooth.results import FileFacts

# --- files of `torch.save`, walked before torch loads them: nothing is made ---

ITEM_BYTES = {
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    **dict.fromkeys(("FloatStorage", "IntStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("CharStorage", "ByteStorage", "BoolStorage", "QInt8Storage", "QUInt8Storage"), 1),
    **dict.fromkeys(("QUInt4x2Storage", "QUInt2x4Storage", "UntypedStorage"), 1),
    "ComplexDoubleStorage": 16,
}
NEVER_CALLED = {"Tensor", "bytearray", *ITEM_BYTES}
LEGACY_PICKLES = 5
"""Magic number, version, system, the object, the keys of its storages; their bytes follow."""
WHAT = "a PyTorch state dict"


def check_records(path: Path) -> None:
    """Raises `BrokenFile` unless every storage of the archive is a plain record of exactly its own length."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            _check_entries(path, entries)
            top = entries[0].filename.partition("/")[0]
            pickled = archive.read(f"{top}/data.pkl")
            for entry in entries:
                archive.open(entry).close()  # the header in front of the record says the same as the directory
    except BrokenFile:
        raise
    except Exception as error:  # zipfile raises whatever its parts raise on broken bytes
        raise BrokenFile(str(path), WHAT, first_line(error)) from error
    sizes = {entry.filename: entry.file_size for entry in entries}
    for key, expected in _walked(path, io.BytesIO(pickled)):
        found = sizes.get(f"{top}/data/{key}")
        if found != expected:
            has = "no such record" if found is None else f"{found}"
            raise BrokenFile(str(path), f"{expected} bytes in its record {key!r}", has)


def check_legacy(path: Path) -> None:
    """Raises `BrokenFile` unless the storages that a file of the format before 1.6 names fit into it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        bounded = _Bounded(file)
        named = [storage for _ in range(LEGACY_PICKLES) for storage in _walked(path, bounded)]
    if sum(dict(named).values()) > size:
        raise BrokenFile(str(path), f"{sum(dict(named).values())} bytes of storages", f"a file of {size}")


def _walked(path: Path, file: "io.BytesIO | _Bounded") -> list[tuple[str, int]]:
    """Key and bytes of every storage that a pickle names, as often as it is named; none where the file has ended."""
    looking = _Looking(file)
    try:
        looking.load()
    except EOFError:
        return []
    except Exception as error:  # pickle raises whatever its parts raise on broken bytes
        raise BrokenFile(str(path), WHAT, first_line(error)) from error
    return looking.storages


class _Bounded:
    """Never reads more from a file than it holds: Python allocates memory before it reads."""

    def __init__(self, file: BinaryIO):
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        self.readline = file.readline

    def read(self, count: int) -> bytes:
        return self._file.read(min(count, self._size))

    def readinto(self, buffer: Any) -> int:
        raise pickle.UnpicklingError("a buffer")


def _check_entries(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    if not entries:
        raise BrokenFile(str(path), WHAT, "an empty archive")
    packed = next((entry for entry in entries if entry.compress_type or entry.flag_bits & 1), None)
    if packed is not None:
        raise BrokenFile(str(path), "records that are neither compressed nor encrypted", repr(packed.filename[:80]))
    name, count = Counter(entry.filename for entry in entries).most_common(1)[0]
    if count > 1:
        raise BrokenFile(str(path), "every record once", f"{name[:80]!r} {count} times")


class _Inert:
    """Stands for everything that a pickle makes: does nothing, whatever is done to it."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def _ignore(self, *_: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = _ignore


class _NeverCalled(_Inert):
    """Stands for what may be named, but would make memory out of a number, or numbers out of nothing, when called."""

    def __new__(cls, *_: Any, **__: Any) -> "_NeverCalled":
        raise pickle.UnpicklingError(f"a call of {cls.__name__}")


class _Looking(pickle._Unpickler):  # the one in Python, whose memory no index in the file can blow up
    """Walks a pickle without making anything of it, and notes the storages that it names."""

    # BYTEARRAY8 makes as many bytes as the file says, before it reads them; torch does not know it either.
    dispatch: ClassVar = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def __init__(self, file: "io.BytesIO | _Bounded"):
        super().__init__(file)
        self.storages: list[tuple[str, int]] = []
        """Key and bytes, once for each time they are named."""

    def find_class(self, module: str, name: str) -> type[_Inert]:
        return type(name, (_NeverCalled if name in NEVER_CALLED else _Inert,), {})

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError("an extension code")

    def persistent_load(self, pid: Any) -> _Inert:
        kind, storage, key, _, count = pid[:5]
        if kind != "storage" or not isinstance(count, int):
            raise pickle.UnpicklingError(f"a reference to {str(kind)[:40]!r}")
        self.storages.append((str(key), count * ITEM_BYTES[storage.__name__]))
        return _Inert()


# --- `.bin`, `.pt` and `.pth` files, loaded with `weights_only=True` and memory-mapped ---

WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net")
"""Keys under which training scripts keep the state dict."""

NAMED = re.compile(r"GLOBAL ([\w.]+)")
MADE = re.compile(r"but got (<class '[\w.]+'>|[\w.]+)")
"""In messages of torch's unpickler."""


class PickleStore:
    """Tensors of one pickle file, or of the shards that an index names; a shard is opened when it is needed."""

    def __init__(self, folder: Path, where: Mapping[str, str]):
        self._folder = folder
        self._where = dict(where)
        self._open: dict[str, Mapping[str, Tensor]] = {}
        self.names = self._where.keys()

    @classmethod
    def single(cls, path: Path) -> "PickleStore":
        store = cls(path.parent, {})
        store._where.update(dict.fromkeys(store._shard(path.name), path.name))
        return store

    def _shard(self, shard: str) -> Mapping[str, Tensor]:
        if shard not in self._open:
            self._open[shard] = load_tensors(self._folder / shard)
        return self._open[shard]

    def read(self, name: str) -> Tensor:
        shard = self._where[name]
        tensors = self._shard(shard)
        if name not in tensors:
            raise BrokenFile(shard, f"the tensor {name!r}, as the index says", "no such tensor")
        return plain_tensor(self._folder / shard, name, tensors[name])

    def file_of(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._where[name]

    def files(self) -> tuple[FileFacts, ...]:
        return tuple(FileFacts(name=n, size_bytes=(self._folder / n).stat().st_size) for n in sorted(self._open))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The state dict in a pickle file, mapped where the format allows it; refuses everything that is not tensors."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise BrokenFile(str(path), WHAT, reason_of(error), "Check the path and its permissions.") from error
    is_zip = start == b"PK\3\4"  # as torch itself decides
    if not is_zip and start[:1] != pickle.PROTO:
        raise BrokenFile(str(path), WHAT, "neither a zip archive nor a pickle")
    (check_records if is_zip else check_legacy)(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of pickle protocols that are refused next
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        reason = str(error).strip()
        if "Unsupported global" in reason or "Weights only" in reason or "weights_only" in reason.lower():
            raise UnsafePickle(str(path), _what_was_refused(reason)) from error
        raise BrokenFile(str(path), WHAT, first_line(error)) from error
    except (Exception, MemoryError) as error:  # torch raises whatever its parts raise on a broken file
        raise BrokenFile(str(path), WHAT, first_line(error)) from error
    return _state_dict(path, loaded)


def plain_tensor(path: Path, name: str, tensor: Tensor) -> Tensor:
    """The tensor, if it is one of numbers in memory and no larger than its file (strides of 0 repeat a number)."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise PackedWeights(str(path), f"{name!r} is a {kind} {type(tensor).__name__}")
    if tensor.is_meta:
        raise BrokenFile(str(path), f"numbers in {name!r}", "a tensor on the meta device, which has none")
    if tensor.is_quantized:
        raise PackedWeights(str(path), f"{name!r} has dtype {tensor.dtype}")
    size = path.stat().st_size
    if tensor.numel() * tensor.itemsize > size:
        found = f"shape {tuple(tensor.shape)} with strides {tensor.stride()} in a file of {size} bytes"
        raise BrokenFile(str(path), f"a tensor {name!r} of its own numbers", found)
    return tensor.resolve_neg()


def _what_was_refused(message: str) -> str:
    """What the file would have called, without what torch advises, which is to trust it."""
    if name := NAMED.search(message):
        return f"it names {name[1][:120]}"
    if made := MADE.search(message):
        return f"it makes {made[1][:120]}"
    return "it holds more than tensors, numbers, words, lists and dictionaries"


def _state_dict(path: Path, loaded: Any) -> dict[str, Tensor]:
    for _ in range(3):  # wrappers nest: {"checkpoint": {"model": {...}}} is as deep as scripts go
        if not isinstance(loaded, Mapping):
            break
        inner = [loaded[key] for key in WRAPPERS if isinstance(loaded.get(key), Mapping)]
        if inner:  # before the tensors: a step or a scheduler's state may lie beside the model
            loaded = inner[0]
            continue
        if tensors := {n: t for n, t in loaded.items() if isinstance(n, str) and isinstance(t, Tensor)}:
            return tensors
        break
    found = f"the keys {list(loaded)[:5]}" if isinstance(loaded, Mapping) else f"a {type(loaded).__name__}"
    raise BrokenFile(str(path), "a state dict of tensors", found, f"Known wrappers: {', '.join(WRAPPERS)}.")
