"""Files behind `http(s)://`, by byte ranges: every answer is checked against what was asked, and has to come in time.

fsspec's own reader believes an answer of another range, or of another length, so only its connection pool is used.
"""

import re
import time
from contextlib import suppress
from typing import Any

from oversmooth.errors import MissingDependency, RemoteUnavailable
from oversmooth.models.stores.addressed import AddressedFolder
from oversmooth.models.stores.attempts import COPY_IT, retried
from oversmooth.models.stores.files import RangedFile
from oversmooth.models.stores.traffic import current_traffic

ANSWER_SECONDS = 20.0
"""How long one read may take in all, retries included, beside the time of its bytes at the slowest speed."""
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
    """A folder behind a web address; it cannot be listed, and nothing is downloaded but the ranges asked for."""

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
        """Hash of a file, where the server told it when it was asked for its size, as the hub does of large files."""
        return self._hashes.get(self._address(name))

    def _open(self, address: str) -> RangedFile:
        size = self._size(address)
        gap = self._traffic.gap_bytes
        return RangedFile(address, size, lambda start, stop: self._fetch(address, start, stop, size), gap=gap)

    def _size(self, address: str) -> int:
        """The size of a file, asked for once; raises `FileNotFoundError` where there is none."""
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
        self._traffic.wait_for_permit()  # right before a request to the place itself
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
        """Where the file really is, and what the hub says of it on the way there."""
        first = answer.history[0] if answer.history else answer
        if found := LINKED_SHA256.fullmatch(first.headers.get("X-Linked-Etag", "").strip()):
            self._hashes[address] = found["sha256"]
        self.commit = first.headers.get("X-Repo-Commit") or self.commit
        if answer.history and answer.status in (200, 206) and answer.url.origin() != first.url.origin():
            self._storage[address] = str(answer.url)

    async def _announced_size(self, address: str, until: float) -> tuple[int | None, int]:
        """What a HEAD request says, and its status; no size where it is refused, compressed or silent about it."""
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
    """Raises unless the answer is exactly the bytes that were asked for; a whole file may come as one."""
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
