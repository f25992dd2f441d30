"""One process per folder: who writes there says so in a file and holds a lock on it until the process ends."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from oversmooth.errors import FolderInUse, NotWritable
from oversmooth.output.whole_files import make_folder

LOCK = "running.json"
"""Its content says who holds the folder. What is left of a killed run is no longer locked, and does not count."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds the folder, which is made if it is not there; refuses one that another process holds."""
    make_folder(folder)
    path = folder / LOCK
    file = _locked(path)
    try:
        now = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        file.truncate(0)
        file.write(json.dumps(now))
        file.flush()
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while the lock is held: whoever waits for it finds another file, and asks again
            folder.rmdir()  # succeeds where nothing was written, such as after a refusal
        file.close()


def _locked(path: Path) -> IO[str]:
    """The open file, locked. Locks of POSIX belong to a process: they end with it however it ends, and work on NFS."""
    while True:
        try:
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise NotWritable(str(path), error.strerror or str(error)) from error
        try:
            _lock(file)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        except BlockingIOError as error:
            raise FolderInUse(str(path.parent), _holder(file)) from error
        file.close()  # removed by its holder between our opening and our locking it


def _lock(file: IO[str]) -> None:
    """Raises BlockingIOError if another process holds it; systems without such locks (Windows) hold nothing."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except PermissionError as error:  # what some systems say instead
        raise BlockingIOError(*error.args) from error


def _holder(file: IO[str]) -> str:
    """Who wrote the file, in words."""
    file.seek(0)
    try:
        said = json.loads(file.read())
        return f"process {said['pid']} on {said['host']}, since {said['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process, which has just begun"
    finally:
        file.close()
