"""A host of images on a real socket, of which a test decides every byte."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import anyio
import anyio.abc
from anyio.streams.tls import TLSListener

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.media.fetcher import MediaFetcher

IMAGE = bytes(range(256)) * 5
NAME = "images.example"
LOCAL = "127.0.0.1"

Behave: TypeAlias = Callable[[anyio.abc.ByteStream], Awaitable[None]]


def answer(body: bytes = IMAGE, *headers: str, status: str = "200 OK", kind: str | None = "image/png") -> Behave:
    """Sends one complete answer."""
    lines = [f"HTTP/1.1 {status}", *headers, *([f"content-type: {kind}"] if kind else [])]
    if not any(header.startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"content-length: {len(body)}")

    async def behave(stream: anyio.abc.ByteStream) -> None:
        await stream.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    return behave


def redirect(location: str, status: str = "302 Found") -> Behave:
    return answer(b"", f"location: {location}", status=status)


@dataclass
class Origin:
    port: int
    pages: dict[str, Behave] = field(default_factory=lambda: {"/": answer()})
    requests: list[str] = field(default_factory=list)
    """The heads that came."""
    connections: int = 0
    open_now: int = 0

    def url(self, path: str = "/", *, host: str = NAME, scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def serve(self, stream: anyio.abc.ByteStream) -> None:
        self.open_now += 1
        self.connections += 1
        try:
            async with stream:
                with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                    head = b""
                    while b"\r\n\r\n" not in head:
                        head += await stream.receive()
                    self.requests.append(head.decode())
                    await self.pages[head.split(b" ")[1].decode()](stream)
        finally:
            self.open_now -= 1


@asynccontextmanager
async def origin(tls: ssl.SSLContext | None = None) -> AsyncIterator[Origin]:
    listener: Any = await anyio.create_tcp_listener(local_host=LOCAL)
    made = Origin(listener.extra(anyio.abc.SocketAttribute.local_port))
    if tls is not None:
        listener = TLSListener(listener, tls, standard_compatible=False)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, made.serve)
        yield made
        tasks.cancel_scope.cancel()


@dataclass
class Names:
    """Looks hosts up in a table; each answer may be one of a row of them."""

    table: Mapping[str, Sequence[str]] = field(default_factory=lambda: {NAME: [LOCAL]})
    later: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """A host's second and further addresses."""
    asked: list[str] = field(default_factory=list)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        table = self.later if host in self.asked and host in self.later else self.table
        self.asked.append(host)
        if host not in table:
            raise OSError("no such host")
        return table[host]


def fetcher(names: Names | None = None, **settings: Any) -> MediaFetcher:
    """One that may ask this machine, and whatever is public."""
    defaults: dict[str, Any] = {"allow_media_domains": ("*", LOCAL), "media_timeout_s": 10.0}
    return MediaFetcher(EngineConfig(**defaults | settings), find=names or Names())
