"""A host of files in threads of its own, for servers in processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

HOLDS: Final = b""
"""Content of a file that never comes."""


@dataclass
class FileHost:
    """Files by their paths, and the requests for them."""

    port: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    is_held: threading.Event = field(default_factory=threading.Event)
    """Set when a client waits for a file that never comes."""
    was_left: threading.Event = field(default_factory=threading.Event)
    """Set when that client has closed its connection."""

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/{path}"

    def add(self, path: str, content: bytes) -> str:
        """Add a file, and return its URL."""
        self.files[path] = content
        return self.url(path)


@contextmanager
def file_host() -> Iterator[FileHost]:
    """Run a host for a block."""
    host = FileHost()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/")
            host.asked.append(name)
            content = host.files.get(name)
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("content-length", str(len(content) or 10))
            self.end_headers()
            if content == HOLDS:
                host.is_held.set()
                self.connection.recv(1)
                host.was_left.set()
            else:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        host.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield host
        finally:
            server.shutdown()
            thread.join()
