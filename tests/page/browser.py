"""A real browser without a window, a server for it, and load on the server."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from tests.servers.process import ServerProcess, serve_command

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

WIDE: Final = {"width": 1200, "height": 900}
NARROW: Final = {"width": 360, "height": 740}


@contextmanager
def browser() -> Iterator[Any]:
    """Start Chromium for the block, and yield its playwright object."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


@contextmanager
def opened(started: Any, url: str, problems: list[str], **settings: Any) -> Iterator[Any]:
    """Open the page in a context of its own. Errors of its console are added to `problems`."""
    context = started.new_context(**{"viewport": WIDE, **settings})
    page = context.new_page()
    page.on("console", lambda line: problems.append(line.text) if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(url)
    until(page, "document.getElementById('model').options.length > 0")
    try:
        yield page
    finally:
        context.close()


def until(page: Any, expression: str, within_s: float = 60.0) -> None:
    """Wait until an expression is true in the page. Its policy forbids playwright's own wait."""
    latest = time.monotonic() + within_s
    while not page.evaluate(expression):
        assert time.monotonic() < latest, f"never true: {expression}"
        page.wait_for_timeout(100)


@contextmanager
def server(folder: Path, *flags: str) -> Iterator[ServerProcess]:
    """Serve a real model of 22 million weights in a process of its own."""
    with ServerProcess(serve_command("--no-access-log", *flags), folder / "log") as process:
        process.wait_ready()
        yield process


@contextmanager
def load(port: int, *, clients: int, texts: int) -> Iterator[None]:
    """Send requests from several clients while the block runs."""
    ends = threading.Event()
    words = "the quick brown fox jumps over the lazy dog while nobody looks at the river"
    body = json.dumps({"input": [f"{words} {place}" for place in range(texts)]}).encode()

    def client() -> None:
        while not ends.is_set():
            with suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                try:
                    while not ends.is_set():
                        connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
                        connection.getresponse().read()
                finally:
                    connection.close()

    threads = [threading.Thread(target=client, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join(60)
