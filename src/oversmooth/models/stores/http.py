"""Files behind `http(s)://`, by byte ranges: every answer is checked against what was asked, and has to come in time.

fsspec's own reader believes an answer of another range, or of another length, so only its connection pool is used.
"""

import re
import time
from typing import Any

from oversmooth.errors import MissingDependency, RemoteUnavailable
from oversmooth.models.stores.addressed import AddressedFolder
from oversmooth.models.stores.attempts import COPY_IT, retried
from oversmooth.models.stores.files import RangedFile

ANSWER_SECONDS = 20.0
"""How long one read may take in all, retries included, beside the time of its bytes at the slowest speed."""
SILENCE_SECONDS = 12.0
"""How long a server may say nothing before the connection is given up."""
SLOWEST_BYTES_PER_SECOND = 64 * 2**10
CONTENT_RANGE = re.compile(r"bytes (?P<first>\d{1,19})-(?P<last>\d{1,19})/(?P<size>\d{1,19}|\*)")
NO_RANGES = "the server gives no size or refuses byte ranges, so its tensors cannot be read one by one"


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
        client = {"headers": headers or {}, "trust_env": True, "auto_decompress": False}
        self._pool = fsspec.filesystem("http", client_kwargs=client, skip_instance_cache=True)

    def _open(self, address: str) -> RangedFile:
        size = self._size(address)
        return RangedFile(address, size, lambda start, stop: self._fetch(address, start, stop, size))

    def _size(self, address: str) -> int:
        """The size of a file; raises `FileNotFoundError` where there is none."""
        until = time.monotonic() + ANSWER_SECONDS

        async def ask() -> int:
            size = await self._announced_size(address, until)
            return size if size is not None else await self._size_by_range(address, until)

        return retried(address, lambda: self._run(ask), until)

    def _fetch(self, address: str, start: int, stop: int, size: int) -> bytes:
        if start == stop:
            return b""
        until = time.monotonic() + ANSWER_SECONDS + (stop - start) / SLOWEST_BYTES_PER_SECOND

        async def ask() -> bytes:
            async with await self._request("GET", address, until, f"bytes={start}-{stop - 1}") as answer:
                _check_range(address, answer, start, stop, size)
                return await _body(address, answer, stop - start)

        return retried(address, lambda: self._run(ask), until)

    def _run(self, ask: Any) -> Any:
        from fsspec.asyn import sync

        return sync(self._pool.loop, ask)

    async def _request(self, method: str, address: str, until: float, wanted: str = "") -> Any:
        """The answer of the server, its headers only; raises unless it is a success."""
        import aiohttp

        left = max(until - time.monotonic(), 0.001)  # aiohttp reads 0 as no limit
        limit = aiohttp.ClientTimeout(total=left, sock_connect=SILENCE_SECONDS, sock_read=SILENCE_SECONDS)
        headers = {"Accept-Encoding": "identity", **({"Range": wanted} if wanted else {})}
        session = await self._pool.set_session()
        url = self._pool.encode_url(address)
        answer = await session.request(method, url, headers=headers, timeout=limit, allow_redirects=True)
        if answer.status == 404:
            answer.close()
            raise FileNotFoundError(address)
        if method == "GET" and answer.status != 416:
            answer.raise_for_status()
        return answer

    async def _announced_size(self, address: str, until: float) -> int | None:
        """What a HEAD request says; `None` where it is refused, compressed or silent about the size."""
        async with await self._request("HEAD", address, until) as answer:
            length = answer.headers.get("Content-Length", "")
            if answer.status != 200 or _encoding(answer) or not re.fullmatch(r"\d{1,18}", length):
                return None
            if answer.headers.get("Accept-Ranges", "").strip().lower() == "none":
                raise RemoteUnavailable(address, NO_RANGES, COPY_IT)
            return int(length)

    async def _size_by_range(self, address: str, until: float) -> int:
        async with await self._request("GET", address, until, "bytes=0-0") as answer:
            _check_encoding(address, answer)
            found = CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if answer.status != 206 or not found or found["size"] == "*":
                raise RemoteUnavailable(address, NO_RANGES, COPY_IT)
            return int(found["size"])


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
