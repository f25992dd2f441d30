"""Files and folders are written beside their place and then renamed: whole or not at all."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from oversmooth.errors import NotWritable, reason_of


def require_writable(*paths: Path | None) -> None:
    """Refuses destinations that cannot be written, before the work whose results they should receive."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise NotWritable(str(path), "it is a folder")
        if not path.absolute().parent.is_dir():
            raise NotWritable(str(path), f"there is no folder {str(path.parent)!r}")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a temporary path and renames the result to `path`; a failure leaves nothing behind."""
    require_writable(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        os.replace(partial, path)
    except OSError as error:
        raise NotWritable(str(path), reason_of(error)) from error
    finally:
        with suppress(OSError):
            partial.unlink()


def require_free(folder: Path) -> None:
    """Refuses a folder that holds something already, or that has no parent to be written into."""
    reason = None
    if folder.exists() and not folder.is_dir():
        reason = "it is a file"
    elif folder.is_dir() and any(folder.iterdir()):
        reason = "the folder is not empty, and nothing is overwritten"
    elif not folder.absolute().parent.is_dir():
        reason = f"there is no folder {str(folder.parent)!r}"
    if reason is not None:
        raise NotWritable(str(folder), reason, "Give a new folder inside one that exists.")


def make_folder(folder: Path) -> None:
    """The folder and those above it, where they are not there yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if folder.is_file() else reason_of(error)
        raise NotWritable(str(folder), reason, "Give a folder that you may write to.") from error


@contextmanager
def folder_whole(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder beside its place and renames it at the end; a failure leaves nothing behind."""
    require_free(folder)
    partial = folder.absolute().with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        yield partial
        if folder.is_dir():
            folder.rmdir()  # empty, as was checked
        os.replace(partial, folder)
    except OSError as error:
        raise NotWritable(str(folder), reason_of(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
