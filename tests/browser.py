"""A real headless Chromium, driven by Playwright; tests skip with a reason where it cannot be had."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 180_000
"""Milliseconds that the browser may take for one step: on a busy machine it waits its turn."""
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@dataclass
class Opened:
    """A page with everything that went wrong on it."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def opened(file: Path | str, *, width: int = 1200, height: int = 900, dark: bool = False) -> Iterator[Opened]:
    """Opens a local file or an address, and records console errors and every request."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("chromium is not installed and apt is not there to install it")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS, timeout=PATIENCE)
        scheme = "dark" if dark else "light"
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, accept_downloads=True)
        page.set_default_timeout(PATIENCE)
        seen = Opened(page)
        page.on("console", lambda message: seen.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.on("request", lambda request: seen.requests.append(request.url))
        page.goto(file if isinstance(file, str) else file.absolute().as_uri())
        yield seen
        browser.close()
