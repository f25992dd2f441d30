"""Reads byte ranges from HTTP servers, the hub and fsspec, with a rate limiter and retries.

A survey of thousands of models waits for its turn before every request, obeys servers that ask it to come back later, and
counts what it fetched: `with traffic(...)` applies to everything that is opened inside.

fsspec's own reader accepts answers of another range or length than it asked for, so only its connection pool is used.
"""

import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from oversmooth.errors import MissingDependency, OversmoothError, RemoteUnavailable, reason_of
from oversmooth.models.stores.store import Folder, LocalFolder, RangedFile

# --- what folders behind an address share: files by name, none of them listed ---


class AddressedFolder(ABC):
    """A folder whose files have addresses: its own, the name, and what comes behind it (a signature, say)."""

    def __init__(self, url: str, query: str):
        self.label = url.rstrip("/")
        self._query = query

    def listing(self) -> None:
        return None

    def has(self, name: str) -> bool:
        try:
            self._size(self._address(name))
        except FileNotFoundError:
            return False
        return True

    def open(self, name: str) -> RangedFile:
        address = self._address(name)
        try:
            return self._open(address)
        except FileNotFoundError as error:
            raise RemoteUnavailable(address, "there is no such file") from error

    def _address(self, name: str) -> str:
        return f"{self.label}/{name}{self._query}"

    @abstractmethod
    def _size(self, address: str) -> int | None:
        """Size of a file if known without reading it; raises `FileNotFoundError` if there is no such file."""

    @abstractmethod
    def _open(self, address: str) -> RangedFile:
        """The file; raises `FileNotFoundError` if there is none."""


# --- rate limits, waits and counters of the requests of one piece of work ---

RESET = re.compile(r";\s*t=(?P<seconds>\d{1,9})")
"""Seconds until a window of the `RateLimit` header begins anew, as the hub writes it."""


def _at_once(host: str) -> float:
    return 0.0


def _for_itself(host: str, seconds: float) -> None:
    """Nobody else has to know."""


@dataclass(slots=True, kw_only=True)
class RateLimiter:
    """Limits and counters of the requests that one piece of work makes."""

    permit: Callable[[str], float] = _at_once
    """Seconds to wait before one more request to the host that was named; storage it redirects to has no limit."""
    told_to_wait: Callable[[str, float], None] = _for_itself
    """Called with a host and how long it asks everybody to wait."""
    longest_wait_seconds: float = math.inf
    """A host that asks for longer is given up instead."""
    tries: int | None = None
    """How often one read is tried; `None` for the usual number."""
    patience_seconds: float | None = None
    """How long one read may take, waits included; `None` for the usual time."""
    gap_bytes: int = 0
    """Bytes that may be read in vain to save a request."""
    requests: int = 0
    """Requests that were sent, those to storage included."""
    bytes_received: int = 0

    def wait_for_permit(self, address: str) -> None:
        """Returns once one more request may be sent; raises where its host asks for more patience than there is."""
        while (seconds := self.permit(host_of(address))) > 0:
            if seconds > self.longest_wait_seconds:
                raise asks_for_too_long(address, seconds, self.longest_wait_seconds)
            time.sleep(seconds)

    def count(self, requests: int, received: int = 0) -> None:
        self.requests += requests
        self.bytes_received += received


_CURRENT: ContextVar[RateLimiter | None] = ContextVar("traffic", default=None)


def current_traffic() -> RateLimiter:
    return _CURRENT.get() or RateLimiter()


@contextmanager
def traffic(given: RateLimiter) -> Iterator[RateLimiter]:
    """Everything that is opened inside obeys these limits."""
    token = _CURRENT.set(given)
    try:
        yield given
    finally:
        _CURRENT.reset(token)


def host_of(address: str) -> str:
    """Host and port of an address, for which its limits hold; empty where it names none."""
    try:
        return urlsplit(address).netloc.rpartition("@")[2].lower()
    except ValueError:
        return ""


def asks_for_too_long(address: str, seconds: float, longest: float) -> RemoteUnavailable:
    """A server that wants to be asked again later than anybody here waits."""
    reason = f"the server {host_of(address)} asks to wait {seconds:.0f} seconds, and the longest wait is {longest:.0f}"
    return RemoteUnavailable(address, reason, "Try again later, or use a local copy.", may_pass=True)


def asked_to_wait(headers: Mapping[str, str] | None) -> float | None:
    """Seconds after which a server wants to be asked again: `Retry-After`, or the end of a `RateLimit` window."""
    if headers is None:
        return None
    said = str(headers.get("Retry-After", "")).strip()
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", said):
        return float(said)
    if said:
        return _until_date(said)
    found = RESET.search(str(headers.get("RateLimit", "")))
    return float(found["seconds"]) if found else None


def _until_date(said: str) -> float | None:
    from email.utils import parsedate_to_datetime

    try:
        return max(parsedate_to_datetime(said).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None


# --- remote reads, retried where that can help, and their failures in words ---

T = TypeVar("T")
TRIES = 3
"""How often a remote read is tried before it is given up; waits of 1 and 2 seconds lie between."""
LONGEST_PAUSE = 60
"""Seconds; a server may ask for longer."""
BUSY = (429, 503)
"""Statuses of a server that may say when to come back."""
COPY_IT = "Download the file and inspect the local copy."


def retried(label: str, read: Callable[[], T], until: float = math.inf, limits: RateLimiter | None = None) -> T:
    """Calls `read`, again after a pause when the network fails; no attempt begins after `until` (monotonic seconds).

    A server that says when to come back is obeyed. A file that does not exist, and what `read` refused itself, are not
    tried again.
    """
    limits = limits or current_traffic()
    tries = limits.tries or TRIES
    for attempt in range(tries):
        try:
            return read()
        except OversmoothError:
            raise
        except ValueError as error:  # no address at all, or fsspec: a range was answered with something else
            raise RemoteUnavailable(label, str(error) or "it is no valid address", COPY_IT) from error
        except Exception as error:  # aiohttp, requests and OS errors have no common base
            status = _status(error)
            # fsspec says "not found" of any failure; what really happened is its cause.
            if isinstance(error, FileNotFoundError) and (status == 404 or error.__cause__ is None):
                raise
            asked = asked_to_wait(getattr(error, "headers", None)) if status in BUSY else None
            pause = float(min(2**attempt, LONGEST_PAUSE)) if asked is None else asked
            if status in BUSY and pause > 0:
                limits.told_to_wait(host_of(label), pause)
            longest = min(until - time.monotonic(), limits.longest_wait_seconds)
            if asked is not None and asked > longest > 0:
                raise asks_for_too_long(label, asked, longest) from error
            is_late = pause > longest
            if attempt == tries - 1 or is_late or status in (401, 403):
                raise _unavailable(label, error) from error
            time.sleep(pause)
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
    if isinstance(cause, TimeoutError):
        advice = "Try again later, or use a local copy."
        return RemoteUnavailable(label, "the server did not answer in time", advice, may_pass=True)
    return RemoteUnavailable(label, f"{type(cause).__name__}: {cause}".rstrip(": "), may_pass=True)


# --- files behind `http(s)://`, by byte ranges: every answer is checked against what was asked ---

ANSWER_SECONDS = 20.0
"""How long one read may take, retries included, on top of the time for its bytes at the slowest speed."""
SILENCE_SECONDS = 12.0
"""How long a server may say nothing before the connection is given up."""
SLOWEST_BYTES_PER_SECOND = 64 * 2**10
CONTENT_RANGE = re.compile(r"bytes (?P<first>\d{1,19})-(?P<last>\d{1,19})/(?P<size>\d{1,19}|\*)")
LINKED_SHA256 = re.compile(r'(W/)?"?(?P<sha256>[0-9a-f]{64})"?')
"""The header in which the hub tells the hash of a large file."""
NO_RANGES = "the server gives no size or refuses byte ranges, so its tensors cannot be read one by one"


class _StorageGone(Exception):
    """Storage does not answer where a redirect led: its signature has ended, say. The long way then, with a permit."""


class HttpFolder(AddressedFolder):
    """A folder behind a web address. It cannot be listed; only the requested ranges are downloaded."""

    def __init__(self, url: str, headers: dict[str, str] | None = None, *, query: str = ""):
        try:
            import aiohttp  # noqa: F401 - what fsspec reads http with
            import fsspec
        except ImportError as error:
            raise MissingDependency(error.name or "aiohttp", "hf", "reading from a URL") from error
        super().__init__(url, query)
        # The proxies and certificates of the environment count here as they do in every other tool.
        client = {"trust_env": True, "auto_decompress": False}
        own = {**client, "headers": headers or {}}
        self._pool = fsspec.filesystem("http", client_kwargs=own, skip_instance_cache=True)
        # Storage that a file was redirected to is asked directly from then on, and never sees the user's token.
        self._storage_pool = fsspec.filesystem("http", client_kwargs=client, skip_instance_cache=True)
        self._storage: dict[str, str] = {}
        self._sizes: dict[str, int | None] = {}
        self._hashes: dict[str, str] = {}
        self.commit: str | None = None
        """The commit that the files belong to, where the server tells it as the hub does."""
        self._traffic = current_traffic()

    def sha256_of(self, name: str) -> str | None:
        """Hash of a file if the server sent it with the size, as the hub does for large files."""
        return self._hashes.get(self._address(name))

    def _open(self, address: str) -> RangedFile:
        size = self._size(address)
        gap = self._traffic.gap_bytes
        return RangedFile(address, size, lambda start, stop: self._fetch(address, start, stop, size), gap=gap)

    def _size(self, address: str) -> int:
        """The size of a file, requested once; raises `FileNotFoundError` if there is none."""
        if address not in self._sizes:
            until = time.monotonic() + self._patience(0)
            try:
                self._sizes[address] = retried(address, lambda: self._ask_size(address, until), until, self._traffic)
            except FileNotFoundError:
                self._sizes[address] = None
        size = self._sizes[address]
        if size is None:
            raise FileNotFoundError(address)
        return size

    def _ask_size(self, address: str, until: float) -> int:
        self._storage.pop(address, None)  # the place itself is asked for a size, and for a permit before that
        size, status = self._run(address, lambda: self._announced_size(address, _sooner(until, 0)))
        if size is not None:
            return int(size)
        try:
            return int(self._run(address, lambda: self._size_by_range(address, _sooner(until, 0))))
        except RemoteUnavailable as error:
            if status >= 500:  # it failed at the first question: the answer to the second one is no reason to give up
                raise ConnectionError(f"the server answered with status {status}") from error
            raise

    def _fetch(self, address: str, start: int, stop: int, size: int) -> bytes:
        if start == stop:
            return b""
        until = time.monotonic() + self._patience(stop - start)

        async def ask() -> bytes:
            limit = _sooner(until, stop - start)
            async with await self._request("GET", address, limit, f"bytes={start}-{stop - 1}") as answer:
                _check_range(address, answer, start, stop, size)
                return await _body(address, answer, stop - start)

        data: bytes = retried(address, lambda: self._run(address, ask), until, self._traffic)
        self._traffic.count(0, len(data))
        return data

    def _patience(self, count: int) -> float:
        """Seconds that a read of so many bytes may take, retries included."""
        return (self._traffic.patience_seconds or ANSWER_SECONDS) + count / SLOWEST_BYTES_PER_SECOND

    def _run(self, address: str, ask: Any) -> Any:
        from fsspec.asyn import sync

        if address in self._storage:
            with suppress(_StorageGone):
                return sync(self._pool.loop, ask)
        self._traffic.wait_for_permit(address)  # right before a request to the place itself
        return sync(self._pool.loop, ask)

    async def _request(self, method: str, address: str, until: float, wanted: str = "") -> Any:
        """The answer of the server, its headers only; raises unless it is a success."""
        storage = self._storage.get(address) if method == "GET" else None
        if storage is not None:
            answer = await self._send(self._storage_pool, method, storage, until, wanted)
            if answer.status in (200, 206):
                return answer
            answer.close()
            self._storage.pop(address, None)
            raise _StorageGone(address)
        answer = await self._send(self._pool, method, self._pool.encode_url(address), until, wanted)
        if answer.status == 404:
            answer.close()
            raise FileNotFoundError(address)
        if (method == "GET" and answer.status != 416) or answer.status == 429:
            answer.raise_for_status()
        self._remember(address, answer)
        return answer

    async def _send(self, pool: Any, method: str, url: Any, until: float, wanted: str) -> Any:
        import aiohttp

        left = max(until - time.monotonic(), 0.001)  # aiohttp reads 0 as no limit
        limit = aiohttp.ClientTimeout(total=left, sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS)
        headers = {"Accept-Encoding": "identity", **({"Range": wanted} if wanted else {})}
        session = await pool.set_session()
        self._traffic.count(1)
        answer = await session.request(method, url, headers=headers, timeout=limit, allow_redirects=True)
        self._traffic.count(len(answer.history))
        return answer

    def _remember(self, address: str, answer: Any) -> None:
        """Remembers where the file really is, and its hash and commit if the hub sent them."""
        first = answer.history[0] if answer.history else answer
        if found := LINKED_SHA256.fullmatch(first.headers.get("X-Linked-Etag", "").strip()):
            self._hashes[address] = found["sha256"]
        self.commit = first.headers.get("X-Repo-Commit") or self.commit
        if answer.history and answer.status in (200, 206) and answer.url.origin() != first.url.origin():
            self._storage[address] = str(answer.url)

    async def _announced_size(self, address: str, until: float) -> tuple[int | None, int]:
        """Size and status from a HEAD request; no size if the request is refused or the file is compressed."""
        async with await self._request("HEAD", address, until) as answer:
            length = answer.headers.get("Content-Length", "")
            if answer.status != 200 or _encoding(answer) or not re.fullmatch(r"\d{1,18}", length):
                return None, answer.status
            if answer.headers.get("Accept-Ranges", "").strip().lower() == "none":
                raise RemoteUnavailable(address, NO_RANGES, COPY_IT)
            return int(length), answer.status

    async def _size_by_range(self, address: str, until: float) -> int:
        async with await self._request("GET", address, until, "bytes=0-0") as answer:
            _check_encoding(address, answer)
            found = CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if answer.status != 206 or not found or found["size"] == "*":
                raise RemoteUnavailable(address, NO_RANGES, COPY_IT)
            return int(found["size"])


def _sooner(until: float, count: int) -> float:
    """When one attempt at so many bytes is given up: at the end of all patience, and before that for another attempt."""
    return min(until, time.monotonic() + ANSWER_SECONDS + count / SLOWEST_BYTES_PER_SECOND)


def _check_range(address: str, answer: Any, start: int, stop: int, size: int) -> None:
    """Raises unless the answer is exactly the requested bytes; a whole file may come without a range."""
    _check_encoding(address, answer)
    asked = f"bytes {start} to {stop - 1} of {size} were asked for"
    if answer.status == 200:
        if (start, stop) == (0, size):
            return
        raise RemoteUnavailable(address, f"{asked}, and the server, which has no byte ranges, sent all", COPY_IT)
    said = answer.headers.get("Content-Range", "")
    found = CONTENT_RANGE.fullmatch(said)
    is_right = found and (int(found["first"]), int(found["last"])) == (start, stop - 1)
    if answer.status != 206 or not found or not is_right or found["size"] not in ("*", str(size)):
        words = f"status {answer.status} with {said[:80]!r}" if said else f"status {answer.status} without a range"
        raise RemoteUnavailable(address, f"{asked}, and the server answered with {words}", COPY_IT)


def _encoding(answer: Any) -> str:
    said = str(answer.headers.get("Content-Encoding", "")).strip().lower()
    return "" if said == "identity" else said


def _check_encoding(address: str, answer: Any) -> None:
    if encoding := _encoding(answer):
        reason = f"the server sends it compressed ({encoding[:40]}) although plain bytes were asked for"
        raise RemoteUnavailable(address, reason, COPY_IT)


async def _body(address: str, answer: Any, count: int) -> bytes:
    """Exactly `count` bytes; never more are kept, whatever the server sends."""
    parts: list[bytes] = []
    length = 0
    async for part in answer.content.iter_any():
        parts.append(part)
        length += len(part)
        if length > count:
            break
    if length != count:
        found = f"more than {count}" if length > count else str(length)
        raise RemoteUnavailable(address, f"{count} bytes were asked for, and {found} came", COPY_IT)
    return b"".join(parts)


# --- folders that are not on this machine: web addresses, the hub ---


def remote_folder(url: str, *, query: str = "") -> Folder:
    """The folder behind a URL of any protocol."""
    return (HttpFolder if url.startswith(("http://", "https://")) else FsspecFolder)(url, query=query)


class FsspecFolder(AddressedFolder):
    """A folder of a protocol that fsspec knows (s3, gs, ssh, ...), read without read-ahead."""

    def __init__(self, url: str, *, query: str = ""):
        try:
            import fsspec
        except ImportError as error:
            raise MissingDependency("fsspec", "hf", "reading from a URL") from error
        super().__init__(url, query)
        try:
            self._fs, _ = fsspec.core.url_to_fs(self.label)
        except (ValueError, ImportError) as error:  # an unknown protocol, or one whose package is not installed
            raise RemoteUnavailable(self.label, str(error), "Use http(s)://, hf:// or a local copy.") from error
        except OSError as error:  # a host that is asked for at once, as by ftp
            raise RemoteUnavailable(self.label, reason_of(error)) from error

    def _size(self, address: str) -> int | None:
        size: int | None = retried(address, lambda: self._fs.info(address)).get("size")
        return size

    def _open(self, address: str) -> RangedFile:
        file = retried(address, lambda: self._fs.open(address, "rb", cache_type="none"))
        if not getattr(file, "size", None) or not file.seekable():
            file.close()
            raise RemoteUnavailable(address, "it has no size or no byte ranges", COPY_IT)

        def fetch(start: int, stop: int) -> bytes:
            file.seek(start)
            return bytes(file.read(stop - start))

        return RangedFile(address, file.size, lambda start, stop: retried(address, lambda: fetch(start, stop)))


def hub_folder(repo: str, revision: str | None = None, subfolder: str = "") -> HttpFolder:
    """A model repository on the Hugging Face hub, read by byte ranges, with the user's token if there is one."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError
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
    return HttpFolder(url.removesuffix("/FILE"), headers=_headers())


def _headers() -> dict[str, str]:
    """User agent and the user's token, unless implicit tokens are switched off.

    huggingface_hub's own headers also name the agent that a program runs in, and ask the hub for a list of agents first:
    a request outside the rate limiter.
    """
    from importlib.metadata import version

    from huggingface_hub import constants, get_token

    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    return {
        "User-Agent": f"oversmooth/{version('oversmooth')}",
        **({"Authorization": f"Bearer {token}"} if token else {}),
    }


def cached_hub_folder(repo: str, revision: str | None = None) -> LocalFolder | None:
    """The local copy that an earlier download left in the hub cache, if it holds a config."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(repo, "config.json", revision=revision)
    except (HFValidationError, OSError):  # no repository can have that name
        return None
    folder = Path(found).parent if isinstance(found, str) else None
    weights = folder and any(re.search(r"\.(safetensors|bin)$", name) for name in os.listdir(folder))
    return LocalFolder(folder) if folder and weights else None
