"""Files are written beside their place and then renamed: whole or not at all."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from oversmooth.errors import NotWritable


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
        raise NotWritable(str(path), error.strerror or str(error)) from error
    finally:
        with suppress(OSError):
            partial.unlink()
