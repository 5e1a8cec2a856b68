"""A hub of models on this machine, as far as a download asks it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

COMMIT: Final = "0123456789abcdef0123456789abcdef01234567"
"""The only commit of the model."""


@contextmanager
def hub_with(name: str, folder: Path, half_sent: Callable[[str], object] = lambda path: None) -> Iterator[str]:
    """Run a hub with one model for a block, which gets its URL.

    Args:
        name: Id of the model on the hub.
        folder: Its files.
        half_sent: Called with the path of a file of which half is sent. The rest follows when it returns.
    """
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if path.startswith(f"/api/models/{name}/tree/"):
                self._send_json([_entry(path, file) for path, file in files.items()])
            elif path.startswith(f"/api/models/{name}"):
                siblings = [{"rfilename": path} for path in files]
                self._send_json({"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0})
            elif (file := self._file(path)) is not None:
                self._send_file(*file)
            else:
                self.send_error(404)

        do_HEAD = do_GET

        def _file(self, path: str) -> tuple[str, Path] | None:
            for revision in (COMMIT, "main"):
                within = path.removeprefix(f"/{name}/resolve/{revision}/")
                if within in files:
                    return within, files[within]
            return None

        def _send_json(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _send_file(self, path: str, file: Path) -> None:
            data = file.read_bytes()
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha1(data, usedforsecurity=False).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            half_sent(path)
            self.wfile.write(data[len(data) // 2 :])

        def log_message(self, format: str, *args: object) -> None:  # the name of the base class
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def _entry(path: str, file: Path) -> dict[str, object]:
    data = file.read_bytes()
    digest = hashlib.sha1(data, usedforsecurity=False).hexdigest()
    return {"type": "file", "path": path, "size": len(data), "oid": digest}
