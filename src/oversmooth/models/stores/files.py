"""Folders of checkpoints behind one interface, local or remote: which files there are, and exact bytes of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from oversmooth.errors import BrokenFile, reason_of

SMALL_FILE_BYTES = 200 * 2**20
"""Largest file beside the weights that counts as one of theirs."""
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
