"""Folders of checkpoints, local or remote, behind one interface: which files there are, and bytes of them.

Local files, `http(s)://`, the hub and every other fsspec location give the same kind of object: a binary file that can
`seek` and `read`, so that a tensor is fetched as a byte range and never more. A remote file is opened without
read-ahead; a server that ignores ranges is refused rather than downloaded.
"""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from oversmooth.errors import BrokenFile, MissingDependency, RemoteUnavailable

T = TypeVar("T")
TRIES = 3
"""How often a remote read is tried before it is given up; waits of 1 and 2 seconds lie between."""
SMALL_FILE_BYTES = 200 * 2**20
"""Largest file that is read whole from a remote folder (a config, an index, a pickle we must refuse)."""


class RangedFile:
    """A file of known size of which any range of bytes can be read, exactly or not at all."""

    def __init__(self, label: str, size: int, fetch: Callable[[int, int], bytes]):
        self.label = label
        self.size = size
        self._fetch = fetch

    def read(self, start: int, stop: int) -> bytearray:
        """Bytes `start:stop`; raises `BrokenFile` when the file ends before that."""
        if not 0 <= start <= stop <= self.size:
            raise BrokenFile(self.label, f"at least {stop} bytes", f"{self.size}")
        data = bytearray(self._fetch(start, stop))
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
        return sorted(entry.name for entry in self.path.iterdir() if entry.is_file())

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def open(self, name: str) -> RangedFile:
        path = self.path / name

        def fetch(start: int, stop: int) -> bytes:
            try:
                with path.open("rb") as file:
                    file.seek(start)
                    return file.read(stop - start)
            except OSError as error:
                found = error.strerror or str(error)
                raise BrokenFile(str(path), "a readable file", found, "Check the path and its rights.") from error

        return RangedFile(str(path), path.stat().st_size, fetch)


class RemoteFolder:
    """A folder behind a URL, read through fsspec."""

    def __init__(self, url: str, headers: dict[str, str] | None = None, *, query: str = ""):
        try:
            import fsspec
        except ImportError as error:
            raise MissingDependency("fsspec", "hf", "reading from a URL") from error
        self.label = url.rstrip("/")
        self._query = query
        options: dict[str, Any] = {}
        if url.startswith("http"):
            try:
                import aiohttp  # noqa: F401 - what fsspec reads http with
            except ImportError as error:
                raise MissingDependency("aiohttp", "hf", "reading from a URL") from error
            # The proxies and certificates of the environment count here as they do in every other tool.
            options = {"client_kwargs": {"headers": headers or {}, "trust_env": True}}
        try:
            self._fs, _ = fsspec.core.url_to_fs(self.label, **options)
        except (ValueError, ImportError) as error:  # an unknown protocol, or one whose package is not installed
            raise RemoteUnavailable(self.label, str(error), "Use http(s)://, hf:// or a local copy.") from error

    def listing(self) -> None:
        return None

    def _address(self, name: str) -> str:
        return f"{self.label}/{name}{self._query}"

    def has(self, name: str) -> bool:
        try:
            _retried(self._address(name), lambda: self._fs.info(self._address(name)))
        except FileNotFoundError:
            return False
        return True

    def open(self, name: str) -> RangedFile:
        address = self._address(name)
        try:
            file = _retried(address, lambda: self._fs.open(address, "rb", cache_type="none"))
        except FileNotFoundError as error:
            raise RemoteUnavailable(address, "there is no such file") from error
        if not getattr(file, "size", None) or not file.seekable():
            file.close()
            reason = "the server gives no size or refuses byte ranges, so its tensors cannot be read one by one"
            raise RemoteUnavailable(address, reason, "Download the file and inspect the local copy.")

        def fetch(start: int, stop: int) -> bytes:
            file.seek(start)
            return bytes(file.read(stop - start))

        return RangedFile(address, file.size, lambda start, stop: _retried(address, lambda: fetch(start, stop)))


def read_small(folder: Folder, name: str) -> bytes:
    """A whole file; refuses one that is too large to be a config or an index."""
    file = folder.open(name)
    if file.size > SMALL_FILE_BYTES:
        raise BrokenFile(file.label, f"at most {SMALL_FILE_BYTES} bytes", f"{file.size}", "Point at a local copy.")
    return bytes(file.read(0, file.size))


def hub_folder(repo: str, revision: str | None = None, subfolder: str = "") -> RemoteFolder:
    """A model repository on the Hugging Face hub, read by byte ranges with the user's own token where there is one."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import build_hf_headers
    except ImportError as error:
        raise MissingDependency("huggingface_hub", "hf", "reading from the hub") from error
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise RemoteUnavailable(
            f"the hub model {repo!r}", "HF_HUB_OFFLINE is set", "Unset it, or point at a local folder."
        )
    try:
        url = huggingface_hub.hf_hub_url(repo, "FILE", revision=revision, subfolder=subfolder or None)
    except HFValidationError as error:
        raise RemoteUnavailable(f"the hub model {repo!r}", str(error).rstrip("."), "Check its name.") from error
    return RemoteFolder(url.removesuffix("/FILE"), headers=build_hf_headers())


def cached_hub_folder(repo: str, revision: str | None = None) -> LocalFolder | None:
    """The local copy that an earlier download left in the hub cache, if it holds a config."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(repo, "config.json", revision=revision)
    except HFValidationError:  # no repository can have that name
        return None
    folder = Path(found).parent if isinstance(found, str) else None
    weights = folder and any(re.search(r"\.(safetensors|bin)$", name) for name in os.listdir(folder))
    return LocalFolder(folder) if folder and weights else None


def _retried(label: str, read: Callable[[], T]) -> T:
    """Calls `read`, again after a pause when the network fails; a file that does not exist is not tried again."""
    for attempt in range(TRIES):
        try:
            return read()
        except ValueError as error:  # fsspec: the server answered a range with something else
            raise RemoteUnavailable(label, str(error), "Download the file and inspect the local copy.") from error
        except Exception as error:  # aiohttp, requests and OS errors have no common base
            status = _status(error)
            # fsspec says "not found" of any failure; what really happened is its cause.
            if isinstance(error, FileNotFoundError) and (status == 404 or error.__cause__ is None):
                raise
            if attempt == TRIES - 1 or status in (401, 403):
                raise _unavailable(label, error) from error
            time.sleep(2**attempt)
    raise AssertionError("the loop returns or raises")


def _status(error: BaseException | None) -> int | None:
    """The HTTP status behind an error, if a server answered at all."""
    while error is not None:
        if isinstance(status := getattr(error, "status", None), int):
            return status
        error = error.__cause__
    return None


def _unavailable(label: str, error: BaseException) -> RemoteUnavailable:
    if (status := _status(error)) in (401, 403):
        advice = "The model may not exist, or may need `hf auth login` and its owner's permission."
        return RemoteUnavailable(label, f"access was refused ({status})", advice)
    cause = (error.__cause__ if isinstance(error, FileNotFoundError) else None) or error
    return RemoteUnavailable(label, f"{type(cause).__name__}: {cause}")
