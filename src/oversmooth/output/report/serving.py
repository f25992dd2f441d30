"""A page that is made anew whenever it is asked for, on this machine only: `oversmooth watch`.

`/` is the page and `/figures.json` its numbers and sentences, which the page asks for every few seconds and shows in
place. Nothing else is served, to nobody but this machine: the server listens on the loopback address and refuses other
host names, so that a page on the web cannot read it by pointing a name of its own at 127.0.0.1.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from oversmooth.errors import BadValue, OversmoothError
from oversmooth.output.report.blocks import Page
from oversmooth.output.report.render import figures_of, render

LOOPBACK = "127.0.0.1"
UPDATES = "figures.json"


def page_server(make: Callable[[], Page], port: int = 0) -> ThreadingHTTPServer:
    """A server on the loopback address; port 0 takes a free one. It serves when `serve_forever` is called."""
    try:
        server = ThreadingHTTPServer((LOOPBACK, port), _handler(make))
    except (OSError, OverflowError) as error:
        raise BadValue("--port", port, f"a free port ({error})") from error
    server.daemon_threads = True
    return server


def _handler(make: Callable[[], Page]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.headers.get("Host", "").rpartition(":")[0]
            if name not in (LOOPBACK, "localhost"):
                self._answer(403, "text/plain", "This page is for this machine only.\n")
            elif self.path == "/":
                self._made(lambda page: ("text/html", render(page)))
            elif self.path == f"/{UPDATES}":
                self._made(lambda page: ("application/json", json.dumps(_news(page), allow_nan=False)))
            else:
                self._answer(404, "text/plain", "There is only one page: /\n")

        def _made(self, text_of: Callable[[Page], tuple[str, str]]) -> None:
            try:
                kind, text = text_of(replace(make(), updates=UPDATES))
            except OversmoothError as error:  # a file that is being replaced; the page asks again
                self._answer(503, "text/plain", f"{error}\n")
                return
            self._answer(200, kind, text)

        def _answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing: the terminal belongs to the user."""

    return Handler


def _news(page: Page) -> dict[str, Any]:
    """What changes on a page while a run trains; `parts` tells whether it still has the same ones."""
    return {
        "parts": page.parts,
        "verdict": page.verdict,
        "facts": [list(fact) for fact in page.facts],
        "findings": [asdict(finding) for finding in page.findings],
        "tables": {table.id: [[asdict(cell) for cell in row] for row in table.rows] for table in page.tables},
        "figures": figures_of(page),
    }
