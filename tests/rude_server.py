"""A web server on 127.0.0.1 that says whatever a test tells it to, byte by byte, sound or not."""

import contextlib
import re
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

RANGE = re.compile(r"range: bytes=(\d+)-(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    start: int | None
    stop: int | None
    """The bytes that were asked for, `None` where all were."""


Parts = Iterator["bytes | float"]
"""What is sent, in order; a number is a pause in seconds."""


@contextlib.contextmanager
def rude_server(answer: Callable[[Request], Parts]) -> Iterator[str]:
    """The address of a server that answers every request with the parts of `answer`, then hangs up."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):  # the reader had enough
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    line = self.rfile.readline(65_536)
                    if not line:
                        return
                    head += line
                for part in answer(_parsed(head.decode("latin-1"))):
                    if isinstance(part, bytes):
                        self.wfile.write(part)
                        self.wfile.flush()
                    elif stopped.wait(part):
                        return

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass

    stopped = threading.Event()
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        stopped.set()
        server.shutdown()
        server.server_close()


def _parsed(head: str) -> Request:
    method, path, _ = head.split(" ", 2)
    found = RANGE.search(head)
    return Request(method, path, int(found[1]) if found else None, int(found[2]) + 1 if found else None)


def head(status: str, **headers: object) -> bytes:
    """Status line and headers; `Content_Length=3` is the header Content-Length."""
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return ("\r\n".join([*lines, "Connection: close"]) + "\r\n\r\n").encode("latin-1")


def honest(content: bytes, request: Request) -> Parts:
    """What a good server of one file would send."""
    if request.method == "HEAD":
        yield head("200 OK", Content_Length=len(content), Accept_Ranges="bytes")
    elif request.start is None or request.stop is None:
        yield head("200 OK", Content_Length=len(content)) + content
    else:
        part = content[request.start : request.stop]
        said = f"bytes {request.start}-{request.start + len(part) - 1}/{len(content)}"
        yield head("206 Partial Content", Content_Length=len(part), Content_Range=said) + part


def elapsed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.monotonic()
    call()
    return time.monotonic() - start
