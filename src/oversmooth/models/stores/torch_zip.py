"""The zip archive that `torch.save` writes, checked before it is mapped into memory.

A mapped archive is not read record by record: `torch.load(mmap=True)` takes compressed bytes for numbers, and a record
that is too short goes on into its neighbour. Here every record must be stored plainly and be as long as its storage says.
"""

import io
import pickle
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from oversmooth.errors import BrokenFile, first_line

ITEM_BYTES = {
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    **dict.fromkeys(("FloatStorage", "IntStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("CharStorage", "ByteStorage", "BoolStorage", "QInt8Storage", "QUInt8Storage"), 1),
    **dict.fromkeys(("QUInt4x2Storage", "QUInt2x4Storage", "UntypedStorage"), 1),
    "ComplexDoubleStorage": 16,
}
WHAT = "a PyTorch state dict"


def check_records(path: Path) -> None:
    """Raises `BrokenFile` unless every storage of the archive is a plain record of exactly its own length."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            _check_entries(path, entries)
            top = entries[0].filename.partition("/")[0]
            pickled = archive.read(f"{top}/data.pkl")
    except BrokenFile:
        raise
    except Exception as error:  # zipfile raises whatever its parts raise on broken bytes
        raise BrokenFile(str(path), WHAT, first_line(error)) from error
    looking = _Looking(io.BytesIO(pickled))
    try:
        looking.load()
    except Exception as error:  # as pickle does
        raise BrokenFile(str(path), WHAT, first_line(error)) from error
    sizes = {entry.filename: entry.file_size for entry in entries}
    for key, expected in looking.storages:
        found = sizes.get(f"{top}/data/{key}")
        if found != expected:
            has = "no such record" if found is None else f"{found}"
            raise BrokenFile(str(path), f"{expected} bytes in its record {key!r}", has)


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

    def __setstate__(self, state: object) -> None:
        pass

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def append(self, item: object) -> None:
        pass

    def extend(self, items: object) -> None:
        pass

    def add(self, item: object) -> None:
        pass


class _Looking(pickle._Unpickler):  # the one in Python, whose memory no index in the file can blow up
    """Walks a pickle without making anything of it, and notes the storages that it names."""

    # BYTEARRAY8 makes as many bytes as the file says, before it reads them; torch does not know it either.
    dispatch: ClassVar = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.storages: list[tuple[str, int]] = []
        """Key and bytes, as often as they are named."""

    def find_class(self, module: str, name: str) -> type[_Inert]:
        return type(name, (_Inert,), {})

    def get_extension(self, code: int) -> None:
        raise pickle.UnpicklingError("an extension code")

    def persistent_load(self, pid: Any) -> _Inert:
        kind, storage, key, _, count = pid
        if kind != "storage" or not isinstance(count, int):
            raise pickle.UnpicklingError(f"a reference to {str(kind)[:40]!r}")
        self.storages.append((str(key), count * ITEM_BYTES[storage.__name__]))
        return _Inert()
