"""A hub on 127.0.0.1: repositories in memory, files behind redirects to storage, limits, gates, faults and a count of all.

As on the real one, `/OWNER/NAME/resolve/REVISION/FILE` answers small files itself and redirects large ones to storage on
another port; the redirect tells hash, size and commit. Only `/resolve/` counts against the limit of requests.
"""

import contextlib
import hashlib
import json
import random
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.hub_judgement import NUMBERED, Arrival, Judgement, Refusal, Sender, judged, pauses_in
from tests.witness.sitecustomize import HEADER

RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>[^?]+)")


@dataclass
class Faults:
    """What goes wrong, each with its probability for one request, drawn from a seeded generator."""

    busy: float = 0.0
    """429 with `Retry-After`, although the limit is kept."""
    cut: float = 0.0
    """Half of the bytes, then the connection is closed."""
    broken: float = 0.0
    """500."""


@dataclass
class Hub:
    """Repositories, and what was asked of them."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    created: dict[str, str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    faults: Faults = field(default_factory=Faults)
    latency: float = 0.0
    """Seconds before every answer."""
    limit: tuple[int, float] | None = None
    """So many resolve requests in any window of so many seconds."""
    retry_after: float = 0.2
    """Seconds that a 429 asks for, a little more each time, so that a pause names its refusal."""
    seed: int = 0
    resolves: int = 0
    over_limit: int = 0
    """Requests that came although the limit was reached."""
    busiest: int = 0
    """Requests in the window that had most of them."""
    arrivals: list[Arrival] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    bytes_sent: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    """Requests by method and kind of file."""
    reads: Counter[str] = field(default_factory=Counter)
    """Requests to storage for tensors, by repository."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._random = random.Random(self.seed)
        self._recent: deque[float] = deque()

    def draw(self, chance: float) -> bool:
        with self._lock:
            return self._random.random() < chance

    def admit(self, sender: Sender | None) -> bool:
        """Notes a resolve request; whether it keeps the limit."""
        with self._lock:
            now = time.monotonic()
            self.resolves += 1
            self.arrivals.append(Arrival(now, sender))
            if self.limit is None:
                return True
            count, window = self.limit
            while self._recent and self._recent[0] <= now - window:
                self._recent.popleft()
            self._recent.append(now)
            self.busiest = max(self.busiest, len(self._recent))
            if len(self._recent) > count:
                self.over_limit += 1
                return False
            return True

    def turn_away(self, sender: Sender | None) -> float:
        """Notes a refusal; the seconds it asks for."""
        with self._lock:
            number = len(self.refusals)
            seconds = self.retry_after + number * NUMBERED
            self.refusals.append(Refusal(number, time.monotonic(), seconds, sender.run if sender else None))
            return seconds

    def judgement(self, log: Path | None = None, killed: Collection[str] = ()) -> Judgement:
        """How the requests so far kept to the refusals; `log` is that of their witness."""
        told = pauses_in(log, self.retry_after) if log else {}
        with self._lock:
            return judged(self.arrivals, self.refusals, told, killed)

    def note(self, name: str, sent: int) -> None:
        with self._lock:
            self.asked[name] += 1
            self.bytes_sent += sent

    def note_read(self, repo: str) -> None:
        with self._lock:
            self.reads[repo] += 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub: Hub = self.server.hub
        if hub.latency:
            time.sleep(hub.latency)
        if self.path.startswith("/api/models"):
            self._models(hub)
        elif self.server.is_storage:
            self._storage(hub)
        else:
            self._resolve(hub)

    def _models(self, hub: Hub) -> None:
        names = [
            name
            for name in hub.repositories
            if f"author={name.split('/')[0]}" in self.path or "author=" not in self.path
        ]
        limit = re.search(r"limit=(\d+)", self.path)
        chosen = names[: int(limit[1])] if limit else names
        models = [
            {"id": name, "modelId": name, "createdAt": hub.created.get(name, "2024-01-01T00:00:00.000Z")}
            for name in chosen
        ]
        self._send(200, json.dumps(models).encode(), {"Content-Type": "application/json"})

    def _resolve(self, hub: Hub) -> None:
        found = RESOLVE.fullmatch(self.path.partition("?")[0])
        sender = Sender.of(self.headers.get(HEADER))
        if not hub.admit(sender) or hub.draw(hub.faults.busy):
            return self._send(429, b"", {"Retry-After": f"{hub.turn_away(sender):.6f}"})
        if hub.draw(hub.faults.broken):
            return self._send(500, b"")
        files = hub.repositories.get(found["repo"]) if found else None
        if found is None or files is None:
            return self._send(404, b"")
        if found["repo"] in hub.gated:
            return self._send(403, b"")
        content = files.get(found["file"])
        commit = {"X-Repo-Commit": hashlib.sha1(found["repo"].encode()).hexdigest()}
        if content is None:
            return self._send(404, b"", commit)
        if found["file"].endswith(".safetensors"):
            linked = {"X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content))}
            place = f"{self.server.storage_url}/{found['repo']}/{found['file']}?signature=1"
            return self._send(302, b"", {**commit, **linked, "Location": place})
        return self._send(200, content, {**commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

    def _storage(self, hub: Hub) -> None:
        owner, name, file = self.path.partition("?")[0].strip("/").split("/", 2)
        content = hub.repositories[f"{owner}/{name}"][file]
        wanted = self.headers.get("Range")
        if not wanted:
            return self._send(200, content, {"Accept-Ranges": "bytes"})
        hub.note_read(f"{owner}/{name}")
        start, stop = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
        said = {"Content-Range": f"bytes {start}-{stop}/{len(content)}", "Accept-Ranges": "bytes"}
        return self._send(206, content[start : stop + 1], said, may_be_cut=True)

    def _send(self, status: int, body: bytes, extra: dict[str, str] | None = None, *, may_be_cut: bool = False) -> None:
        hub: Hub = self.server.hub
        is_cut = may_be_cut and self.command == "GET" and hub.draw(hub.faults.cut)
        with contextlib.suppress(OSError):  # the reader was killed
            self.send_response(status)
            for name, value in {**(extra or {}), "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            sent = b"" if self.command == "HEAD" else body[: len(body) // 2] if is_cut else body
            self.wfile.write(sent)
            hub.note(f"{self.command} {'storage' if self.server.is_storage else 'hub'}", len(sent))
            if is_cut:
                self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """The address of the hub while it is open; its storage has another."""
    servers: list[Any] = []
    for is_storage in (True, False):
        server: Any = _Server(("127.0.0.1", 0), _Handler)
        server.hub, server.is_storage = hub, is_storage
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    servers[1].storage_url = f"http://127.0.0.1:{servers[0].server_port}"
    try:
        yield f"http://127.0.0.1:{servers[1].server_port}"
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def environment_of(url: str, cache: object) -> dict[str, str]:
    """What makes a process take the address for the hub."""
    return {
        "HF_ENDPOINT": url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(cache),
        "no_proxy": "127.0.0.1",
        "HF_HUB_DISABLE_XET": "1",
    }
