"""CIFAR-10 and CIFAR-100 in the archive of their authors: pickles from Python 2, read without executing anything."""

import io
import lzma
import pickle
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from oversmooth.errors import BrokenFile, UnsafePickle, first_line

TRAIN_FILES = {"cifar-100-python": ("train",), "cifar-10-batches-py": tuple(f"data_batch_{i}" for i in range(1, 6))}
TEST_FILES = {"cifar-100-python": "test", "cifar-10-batches-py": "test_batch"}
LABELS = (b"fine_labels", b"labels")
ALLOWED = {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
"""What the pickles need beside `_reconstruct` of numpy, which has moved between its versions."""
CLASSES = {"cifar-100-python": 100, "cifar-10-batches-py": 10}
LARGEST_FILE = 1 << 30
"""Bytes; the largest file of the real archives has 155 MB."""
Split = tuple[numpy.ndarray, list[int]]


def is_cifar(path: Path) -> bool:
    """Whether this looks like the archive, the folder inside it, or a folder that holds either."""
    return path.name.endswith((".tar.gz", ".tgz")) or _folder(path) is not None


def read_cifar(path: Path) -> dict[str, Split]:
    """Pixels `(image, row, column, channel)` and labels of `train` and `test`; fine labels where there are two kinds."""
    folder = _folder(path)
    if folder is not None:
        return _splits(folder.name, lambda name: (folder / name).read_bytes(), str(folder))
    try:
        with tarfile.open(path, "r:*") as archive:
            files = [member for member in archive.getmembers() if member.isfile()]
            inside = {Path(member.name).parent.name for member in files}
            name = next((name for name in TRAIN_FILES if name in inside), None)
            if name is None:
                raise BrokenFile(str(path), f"a folder {' or '.join(TRAIN_FILES)}", ", ".join(sorted(inside)) or "none")

            members = {Path(m.name).name: m for m in files if Path(m.name).parent.name == name}

            def read(member: str) -> bytes:
                if members[member].size > LARGEST_FILE:
                    found = f"{members[member].size} bytes"
                    raise BrokenFile(f"{path}/{member}", f"at most {LARGEST_FILE} bytes", found)
                opened = archive.extractfile(members[member])
                assert opened is not None, "only files were listed"
                return opened.read()

            splits = _splits(name, read, str(path))
            _read_on(archive)
            return splits
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, ValueError) as error:
        raise BrokenFile(str(path), "a CIFAR archive (.tar.gz)", str(error) or type(error).__name__) from error


def _read_on(archive: tarfile.TarFile) -> None:
    """To the end of the file, where gzip finds out whether its content is what was packed."""
    assert archive.fileobj is not None, "it is open"
    while archive.fileobj.read(1 << 20):
        pass


def _folder(path: Path) -> Path | None:
    for folder in (path, *(path / name for name in TRAIN_FILES)):
        if folder.name in TRAIN_FILES and (folder / TEST_FILES[folder.name]).is_file():
            return folder
    return None


def _splits(name: str, read: Callable[[str], bytes], where: str) -> dict[str, Split]:
    def batch(file: str) -> Split:
        try:
            return _batch(read(file), f"{where}/{file}", CLASSES[name])
        except (KeyError, OSError) as error:
            raise BrokenFile(where, f"the file {file}", "none") from error

    parts = [batch(file) for file in TRAIN_FILES[name]]
    train = numpy.concatenate([pixels for pixels, _ in parts]), [label for _, labels in parts for label in labels]
    return {"train": train, "test": batch(TEST_FILES[name])}


def _batch(content: bytes, where: str, classes: int) -> Split:
    try:
        found = _NumbersOnly(io.BytesIO(content), where).load()
    except UnsafePickle:
        raise
    except Exception as error:  # a broken pickle raises nearly anything
        raise BrokenFile(where, "a pickle of pixels and labels", first_line(error)) from error
    label_key = next((key for key in LABELS if isinstance(found, dict) and key in found), None)
    pixels = found.get(b"data") if isinstance(found, dict) else None
    if label_key is None or not isinstance(pixels, numpy.ndarray) or pixels.ndim != 2 or pixels.shape[1] != 3072:
        raise BrokenFile(where, "data of 3072 bytes per image, and labels", "something else")
    # An array can be made without its bytes; then it would take memory that the file does not have.
    if pixels.dtype != numpy.uint8 or not 0 < pixels.nbytes <= len(content):
        raise BrokenFile(where, "pixels as bytes, at least one image", f"{pixels.dtype} of shape {pixels.shape}")
    planes = pixels.reshape(-1, 3, 32, 32)
    return numpy.ascontiguousarray(planes.transpose(0, 2, 3, 1)), _labels(found[label_key], len(pixels), classes, where)


def _labels(found: Any, count: int, classes: int, where: str) -> list[int]:
    if not isinstance(found, list | tuple) or len(found) != count:
        said = f"{len(found)}" if isinstance(found, list | tuple) else type(found).__name__
        raise BrokenFile(where, f"a list of {count} labels", said)
    wrong = [label for label in found if type(label) is not int or not 0 <= label < classes]
    if wrong:
        raise BrokenFile(where, f"labels from 0 to {classes - 1}", repr(wrong[0])[:80])
    return list(found)


class _NumbersOnly(pickle.Unpickler):
    """Arrays, lists, dictionaries and text; everything else that a pickle can call is refused."""

    def __init__(self, file: io.BytesIO, where: str):
        super().__init__(file, encoding="bytes")
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return super().find_class("numpy._core.multiarray", name)
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        raise UnsafePickle(self.where, f"{module}.{name}")
