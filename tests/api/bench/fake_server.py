"""A server of bytes, which answers each request as the test says, and records them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anyio
import anyio.abc
import orjson
from anyio.streams.buffered import BufferedByteReceiveStream

CLOSE = b""
"""Answer that closes the connection instead."""


class Asked(NamedTuple):
    """A request of the client under test."""

    method: str
    path: str
    head: bytes
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


Answering = Callable[[Asked], Awaitable[bytes] | bytes]


@dataclass
class FakeServer:
    """The server, once it listens."""

    port: int
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        return [each.path for each in self.asked]


def answer(status: int = 200, content: Any = None, **headers: str) -> bytes:
    """Write an answer with a Content-Length."""
    body = orjson.dumps({} if content is None else content)
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} Any\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def routes(**by_path: bytes) -> Answering:
    """Answer by path; others are not found. Names have `_` for `/`."""
    known: Mapping[str, bytes] = {f"/{name.replace('_', '/')}": content for name, content in by_path.items()}
    return lambda asked: known.get(asked.path, answer(404, {"error": {"message": "no such route"}}))


@asynccontextmanager
async def fake_server(answering: Answering) -> AsyncIterator[FakeServer]:
    """Run a server for the block. An empty answer closes the connection."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    server = FakeServer(listener.extra(anyio.abc.SocketAttribute.local_port))

    async def serve(stream: anyio.abc.SocketStream) -> None:
        server.connections += 1
        reader = BufferedByteReceiveStream(stream)
        try:
            while True:
                head = await reader.receive_until(b"\r\n\r\n", 2**16)
                length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                body = await reader.receive_exactly(int(length[1])) if length and int(length[1]) else b""
                method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
                server.asked.append(asked := Asked(method, path, head, body))
                content = answering(asked)
                content = content if isinstance(content, bytes) else await content
                if content == CLOSE:
                    break
                await stream.send(content)
                if b"connection: close" in content.lower() or content.startswith(b"HTTP/1.0"):
                    break
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        try:
            yield server
        finally:
            tasks.cancel_scope.cancel()
