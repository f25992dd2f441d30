"""Files and folders are written beside their place and then renamed: whole or not at all.

A link stays a link and what it points at is replaced. Devices and pipes (`/dev/stdout`, a named pipe) are written into,
never replaced. What is half written is removed when writing fails, and by `remove_partials` when a signal ends the process.
"""

import itertools
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from oversmooth.errors import NotWritable, reason_of

DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(?P<number>\d{1,9})")
STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}
_COUNTER = itertools.count()
_PARTIALS: set[Path] = set()
"""What is being written just now by this process."""


def remove_partials() -> None:
    """Removes what is half written; for the end of a process by a signal, when nothing else runs any more."""
    for partial in list(_PARTIALS):
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            with suppress(OSError):
                partial.unlink()


def require_writable(*paths: Path | None) -> None:
    """Refuses destinations that cannot be written, before the work whose results they should receive."""
    for path in paths:
        if path is not None and _descriptor(path) is None and not _is_special(path):
            _replaceable(path)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a temporary path and puts the result at `path`; a failure leaves nothing behind."""
    number = _descriptor(path)
    if number is not None or _is_special(path):
        _write_into(path, number, write)
        return
    place = _replaceable(path)
    with _partial(place) as partial:
        try:
            write(partial)
            if place.exists():
                shutil.copymode(place, partial)
            os.replace(partial, place)
        except OSError as error:
            raise NotWritable(str(path), reason_of(error)) from error


@contextmanager
def _partial(place: Path) -> Iterator[Path]:
    """A free name beside a place, short enough for every file system, gone at the end."""
    name = f".{place.name[:40]}.{os.getpid()}-{next(_COUNTER)}.partial"
    partial = place.absolute().with_name(name)
    _PARTIALS.add(partial)
    try:
        yield partial
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            partial.unlink()
        _PARTIALS.discard(partial)


def _replaceable(path: Path) -> Path:
    """Where the new file goes: the path itself, or what a link points at; raises where no file can be."""
    try:
        place = path.resolve() if path.is_symlink() else path
        is_folder, has_parent = place.is_dir(), place.absolute().parent.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long a name, a null byte, a circle of links
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise NotWritable(_short(path), reason) from error
    if is_folder:
        raise NotWritable(str(path), "it is a folder")
    if not has_parent:
        raise NotWritable(_short(path), f"there is no folder {_short(place.parent)!r}")
    if fault := _no_name(place):
        raise NotWritable(_short(path), fault)
    return place


def _no_name(path: Path) -> str | None:
    """Why no file can have this name, if none can."""
    if "\0" in str(path):
        return "its name holds a null byte"
    return "its name is too long" if len(os.fsencode(path.name)) > 255 else None


def _short(path: Path) -> str:
    return text if len(text := str(path)) <= 200 else f"{text[:200]}..."


def _descriptor(path: Path) -> int | None:
    """The number of the open stream that a path such as /dev/stdout stands for."""
    if str(path) in STREAMS:
        return STREAMS[str(path)]
    found = DESCRIPTOR.fullmatch(str(path))
    return int(found["number"]) if found else None


def _is_special(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder: a device, a pipe, a socket."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _write_into(path: Path, number: int | None, write: Callable[[Path], object]) -> None:
    """Writes a file elsewhere and copies its bytes into a stream, device or pipe as it is."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # what was printed before comes before
    with tempfile.TemporaryDirectory(prefix="oversmooth-") as folder:
        _PARTIALS.add(Path(folder))
        try:
            write(Path(folder) / "whole")
            with (Path(folder) / "whole").open("rb") as whole, _opened(path, number) as stream:
                shutil.copyfileobj(whole, stream)
        except OSError as error:
            raise NotWritable(str(path), reason_of(error)) from error
        finally:
            _PARTIALS.discard(Path(folder))


@contextmanager
def _opened(path: Path, number: int | None) -> Iterator[BinaryIO]:
    if number is None:
        with path.open("wb") as stream:
            yield stream
    else:
        with os.fdopen(os.dup(number), "wb") as stream:
            yield stream


def require_free(folder: Path) -> None:
    """Refuses a folder that holds something already, or that lies below a file; folders above it may be missing."""
    try:
        reason = _not_free(folder)
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
    if reason is not None:
        raise NotWritable(_short(folder), reason, "Give a new folder.")


def _not_free(folder: Path) -> str | None:
    if folder.is_symlink() and not folder.exists():
        return "it is a link to nowhere"
    if folder.exists() and not folder.is_dir():
        return "it is a file"
    if folder.is_dir() and any(folder.iterdir()):
        return "the folder is not empty, and nothing is overwritten"
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir():
        return f"{_short(above)!r} is a file"
    return _no_name(folder)


def make_folder(folder: Path) -> None:
    """The folder and those above it, where they are not there yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        if isinstance(error, FileExistsError):
            reason = "it is a file"
        raise NotWritable(_short(folder), reason, "Give a folder that you may write to.") from error


@contextmanager
def folder_whole(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder beside its place and renames it at the end; a failure leaves nothing behind."""
    require_free(folder)
    place = folder.resolve() if folder.is_symlink() else folder
    make_folder(place.parent)
    with _partial(place) as partial:
        try:
            partial.mkdir()
            yield partial
            if place.is_dir():
                place.rmdir()  # empty, as was checked
            os.replace(partial, place)
        except OSError as error:
            raise NotWritable(str(folder), reason_of(error)) from error
