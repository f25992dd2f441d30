"""Files that are complete or absent, locks on folders, and small text, JSON and TOML files with clear errors.

A link stays a link and what it points at is replaced. Devices and pipes (`/dev/stdout`, a named pipe) are written into,
never replaced. What is half written is removed when writing fails, and by `remove_partials` when a signal ends the process.
What a killed process could not remove, the next one that writes into the same folder does.
"""

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from oversmooth.errors import BrokenFile, FolderInUse, NotWritable, reason_of

# --- files and folders are written beside their place and then renamed: whole or not at all ---

DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(?P<number>\d{1,9})")
STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}
_COUNTER = itertools.count()
_PARTIALS: set[Path] = set()
"""What is being written just now by this process."""
LEFT_BEHIND = re.compile(r"\..*\.(?P<process>[1-9]\d{0,9})-\d+(-(?P<host>[0-9a-f]{6}))?\.partial", re.DOTALL)
"""Names of what is half written: by which process, and on which host, since several may write into one folder."""
_LOOKED_THROUGH: set[Path] = set()
"""Folders in which nothing of dead processes is left; a survey writes thousands of files into one."""


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


def write_text_whole(path: Path, text: str) -> None:
    """A text in UTF-8 at `path`; a failure leaves nothing behind."""
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


CACHE = "OVERSMOOTH_CACHE"
"""The variable that says where corpora and untrained curves are kept; without it, the user's cache."""


def cache_folder(room: str) -> Path:
    """Where things of one kind are kept between runs; it may not exist yet."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get(CACHE, home / "oversmooth")).expanduser() / room


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
    name = f".{place.name[:40]}.{os.getpid()}-{next(_COUNTER)}-{_host()}.partial"
    partial = place.absolute().with_name(name)
    _remove_left_behind(partial.parent)
    _PARTIALS.add(partial)
    try:
        yield partial
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            partial.unlink()
        _PARTIALS.discard(partial)


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]


def _remove_left_behind(folder: Path) -> None:
    """Removes what processes of this host that are gone have half written in a folder."""
    if folder in _LOOKED_THROUGH or os.name == "nt":
        return
    _LOOKED_THROUGH.add(folder)
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            match = LEFT_BEHIND.fullmatch(entry.name)
            if match is None or match["host"] not in (None, _host()):
                continue
            if _is_gone(int(match["process"]), entry.stat(follow_symlinks=False).st_mtime):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)


def _is_gone(process: int, written: float) -> bool:
    """Whether the process that wrote something at this time has ended; its number may have been given to a later one."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it is somebody else's, or no number of a process
        return False
    try:  # Linux says when the process began, in ticks since the system did
        status = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
        ticks = int(status.rpartition(")")[2].split()[19])
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        boot = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
    except (OSError, ValueError, IndexError, StopIteration):
        return False
    return boot + ticks / os.sysconf("SC_CLK_TCK") > written + 2  # both are whole seconds somewhere


def _replaceable(path: Path) -> Path:
    """Where the new file goes: the path itself, or what a link points at; raises where no file can be."""
    try:
        place = path.resolve() if path.is_symlink() else path
        is_folder, has_parent = place.is_dir(), place.absolute().parent.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long a name, a null byte, a circle of links
        raise NotWritable(_short(path), reason_of(error)) from error
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
        reason = reason_of(error)
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
        reason = "it is a file" if isinstance(error, FileExistsError) else reason_of(error)
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
        except Exception as error:
            reason = _input_or_output(error)
            if reason is None:
                raise
            if reason == os.strerror(errno.ENOSPC):
                advice = "Free some space, or give a folder on another disk."
                raise NotWritable(str(folder), reason, advice) from error
            raise NotWritable(str(folder), reason) from error


def _input_or_output(error: Exception) -> str | None:
    """What the operating system said to a library that wrote, in words; `None` where the error is about something else."""
    if isinstance(error, OSError):
        return reason_of(error)
    found = re.search(r"I/O error: (?P<reason>.+?)(?: \(os error \d+\))?$", str(error))  # safetensors
    if type(error).__name__ == "SafetensorError" and found:
        return found["reason"]
    if isinstance(error, RuntimeError) and re.search(
        "PytorchStreamWriter failed writing|file write failed", str(error)
    ):
        return os.strerror(errno.ENOSPC)  # torch does not say why; its writer fails for this reason
    return None


# --- one process per folder: who writes there says so in a file and holds a lock on it until the process ---

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
            raise NotWritable(str(path), reason_of(error)) from error
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


# --- JSON that others wrote, and every way in which it can be wrong, in words ---

KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}


DEEPEST = 127
"""Levels of nesting; more are refused by the safetensors reader too, and no file of ours has a tenth of it."""
TOO_DEEP = "JSON nested too deeply to be read"


def json_kind(value: object) -> str:
    """What kind of JSON value it is, in words.

    >>> json_kind([1, 2]), json_kind(None)
    ('a list', 'null')
    """
    return KINDS.get(type(value), "null")


def json_object(text: bytes | str, file: str, expected: str = "a JSON object", **options: Any) -> dict[str, Any]:
    """The JSON object in a text; raises `BrokenFile` that says what was found instead.

    Refused too: text that is not UTF-8, nesting beyond the stack, and halves of surrogate pairs, which no file could be
    written with later. `options` are those of `json.loads`.
    """
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(decoded, **options)
        if "\\u" in decoded:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise BrokenFile(file, expected, f"bytes that are not UTF-8 text, at {error.start}") from error
    except UnicodeEncodeError as error:
        half = f"{error.object[error.start]!r}"
        raise BrokenFile(file, expected, f"{half}, which is half a character") from error
    except json.JSONDecodeError as error:
        where = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise BrokenFile(file, expected, f"no JSON ({where})" if decoded.strip() else "an empty text") from error
    except RecursionError as error:
        raise BrokenFile(file, expected, TOO_DEEP) from error
    except ValueError as error:  # Python's own limit on digits, or what an option refused
        raise BrokenFile(file, expected, str(error).partition(";")[0]) from error
    if not isinstance(value, dict):
        raise BrokenFile(file, expected, json_kind(value))
    if depth_of(value) > DEEPEST:
        raise BrokenFile(file, expected, TOO_DEEP)
    return value


def depth_of(value: object) -> int:
    """Levels of lists and objects, counted without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


# --- small text files that a user names: rules, recipes, logs, saved analyses ---

LARGEST_TEXT = 64 * 2**20
"""Bytes; a device such as /dev/zero never ends, and no file of this kind is a tenth as long."""

TOML_TOO_DEEP, FIX_IT = "TOML nested too deeply to be read", "Fix that line."


def read_text_file(path: Path, expected: str) -> str:
    """The text of a file or pipe; raises `BrokenFile` where it cannot be opened, is no UTF-8 or is too long."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_TEXT + 1)
        if len(content) > LARGEST_TEXT:
            raise BrokenFile(str(path), expected, f"more than {LARGEST_TEXT // 2**20} MB", "Check the path.")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BrokenFile(str(path), expected, f"bytes that are not UTF-8 text, at {error.start}") from error
    except OSError as error:
        raise BrokenFile(str(path), expected, reason_of(error), "Check the path.") from error


def toml_tables(text: str, file: str, expected: str = "TOML") -> dict[str, Any]:
    """The tables of a text in TOML, and every way in which it can be wrong in words; digits and nesting have limits."""
    try:
        tables = tomllib.loads(text)
    except RecursionError as error:
        raise BrokenFile(file, expected, TOML_TOO_DEEP, FIX_IT) from error
    except ValueError as error:  # what is no TOML, and Python's own limit on digits
        raise BrokenFile(file, expected, str(error).partition(";")[0], FIX_IT) from error
    if depth_of(tables) > DEEPEST:
        raise BrokenFile(file, expected, TOML_TOO_DEEP, FIX_IT)
    return tables


# --- pieces of Markdown that cannot be taken for anything else ---


def table_text(names: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown; bars inside cells are escaped."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(line_text(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def line_text(text: str) -> str:
    """On one line, and without anything that Markdown would take for a tag."""
    return " ".join(text.split()).replace("<", "&lt;")


def plain_text(text: str) -> str:
    """What others wrote, a file name say, so that Markdown shows it as it is: no link, no picture, no heading.

    >>> print(plain_text('a*b'))
    a\\*b
    """
    return re.sub(r"([\\`*_{}\[\]()#+!|~<>&:@])", r"\\\1", " ".join(text.split()))


def code_text(text: str) -> str:
    """The same as code, between more backticks than it has itself in a row."""
    line = " ".join(text.split())
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{space}{line}{space}{fence}"
