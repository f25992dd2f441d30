"""`TensorStore`, `ReadLog` and the folders and files that stores read from."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from oversmooth.errors import BrokenFile, PackedWeights, reason_of
from oversmooth.results import FileFacts

# --- what every kind of checkpoint offers: the names of its tensors, and one tensor at a time ---


@runtime_checkable
class TensorStore(Protocol):
    """A checkpoint opened without reading its tensors."""

    @property
    def names(self) -> Collection[str]:
        """The names of its tensors."""

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU unless it belongs to a live module, in the dtype in which it is stored."""

    def files(self) -> tuple[FileFacts, ...]:
        """The files opened so far."""


class StateDict:
    """Tensors by name, as `model.state_dict()` gives them."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors
        self.names = tensors.keys()

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach()

    def files(self) -> tuple[FileFacts, ...]:
        return ()


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's numbers, row by row."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class ReadLog:
    """Reads through a store and remembers what was read: the hash, the bytes and the dtypes of a `Provenance`."""

    def __init__(self, store: TensorStore):
        self._store = store
        self._hash = hashlib.sha256()
        self.bytes_read = 0
        self.dtypes: set[str] = set()

    def announce(self, names: Iterable[str]) -> None:
        """Tells a store that can merge reads what is going to be read."""
        getattr(self._store, "announce", lambda names: None)(names)

    def read(self, name: str) -> Tensor:
        tensor = self._store.read(name)
        if not tensor.is_floating_point():
            raise PackedWeights("the model", f"{name!r} has dtype {tensor.dtype}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._hash.update(f"{name} {dtype} {tuple(tensor.shape)}\n".encode())
        self._hash.update(bytes_of(tensor))
        self.bytes_read += tensor.nbytes
        stored_as = getattr(self._store, "stored_as", lambda name: None)(name)
        self.dtypes.add(f"{dtype} from {stored_as}" if stored_as else dtype)
        return tensor.detach()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


# --- folders of checkpoints behind one interface, local or remote: which files there are ---

SMALL_FILE_BYTES = 200 * 2**20
"""Largest file beside the weights that belongs to the model."""
LARGEST_JSON = 32 * 2**20
"""Largest config or index that is read; parsed, JSON takes twenty times its own size."""


class RangedFile:
    """A file of known size of which any range of bytes can be read, exactly or not at all."""

    def __init__(
        self, label: str, size: int, fetch: Callable[[int, int], bytes | bytearray], *, gap: int | None = None
    ):
        self.label = label
        self.size = size
        self.gap = gap
        """Bytes that may be read in vain to save a read; `None` where reads cost nothing but their bytes."""
        self._fetch = fetch

    def read(self, start: int, stop: int) -> bytearray:
        """Bytes `start:stop`; raises `BrokenFile` when the file ends before that."""
        if not 0 <= start <= stop <= self.size:
            raise BrokenFile(self.label, f"at least {stop} bytes", f"{self.size}")
        found = self._fetch(start, stop)
        data = found if isinstance(found, bytearray) else bytearray(found)
        if len(data) != stop - start:
            raise BrokenFile(self.label, f"{stop - start} bytes at {start}", f"{len(data)}")
        return data


@runtime_checkable
class Folder(Protocol):
    """A place that holds the files of one model."""

    label: str

    def listing(self) -> list[str] | None:
        """File names, sorted; `None` where the place cannot be listed."""

    def has(self, name: str) -> bool: ...

    def open(self, name: str) -> RangedFile: ...


class LocalFolder:
    def __init__(self, path: Path):
        self.path = path
        self.label = str(path)

    def listing(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self.path.iterdir() if entry.is_file())
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def has(self, name: str) -> bool:
        try:
            return (self.path / name).is_file()
        except (OSError, ValueError):  # a name that no file can have, or a folder that may not be searched
            return False

    def open(self, name: str) -> RangedFile:
        path = self.path / name

        def fetch(start: int, stop: int) -> bytearray:
            """The bytes, copied once: straight into the memory that the tensor will have."""
            data, done = bytearray(stop - start), 0
            try:
                with path.open("rb", buffering=0) as file:
                    file.seek(start)
                    while got := file.readinto(memoryview(data)[done:]):
                        done += got
            except OSError as error:
                raise _unreadable(path, error) from error
            return data if done == len(data) else data[:done]

        try:
            return RangedFile(str(path), path.stat().st_size, fetch)
        except OSError as error:
            raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> BrokenFile:
    return BrokenFile(str(path), "something readable", reason_of(error), "Check the path and its permissions.")


def read_small(folder: Folder, name: str, largest: int) -> bytes:
    """A whole file; refuses one that is too large to be what it should be."""
    file = folder.open(name)
    if file.size > largest:
        raise BrokenFile(file.label, f"at most {largest} bytes", f"{file.size}", "Check that it is the right file.")
    return bytes(file.read(0, file.size))
