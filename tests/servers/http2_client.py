"""An HTTP/2 client that sends any bytes, and tells what the server does about them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import hpack
from hyperframe.frame import Frame

from tests.servers.on_socket import Served

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 1
END_HEADERS = 4
PADDED = 8
WITH_PRIORITY = 32

REQUEST = ((b":method", b"GET"), (b":scheme", b"http"), (b":authority", b"a"), (b":path", b"/health"))
UPLOAD = ((b":method", b"POST"), *REQUEST[1:3], (b":path", b"/v1/embeddings"), (b"content-type", b"application/json"))


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def block(*headers: tuple[bytes, bytes]) -> bytes:
    """Compress headers so that no state is left with the decoder."""
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*header) for header in headers])


def head(stream: int, *headers: tuple[bytes, bytes], flags: int = END_HEADERS | END_STREAM) -> bytes:
    return frame(HEADERS, block(*(headers or REQUEST)), flags, stream)


def setting(name: int, value: int) -> bytes:
    return frame(SETTINGS, name.to_bytes(2, "big") + value.to_bytes(4, "big"))


def number(value: int) -> bytes:
    return value.to_bytes(4, "big")


@dataclass
class Received:
    """Frames that the server has sent."""

    frames: list[Any] = field(default_factory=list)
    statuses: dict[int, bytes] = field(default_factory=dict)
    bodies: dict[int, bytes] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    resets: dict[int, int] = field(default_factory=dict)
    goaway: int | None = None
    closed: bool = False

    def settled(self, stream: int) -> bool:
        return self.closed or stream in self.ended or stream in self.resets


class RawHttp2:
    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self.stream = stream
        self.seen = Received()
        self._buffer = b""
        self._decoder = hpack.Decoder()

    async def send(self, *frames: bytes) -> None:
        """Send; that the server has closed meanwhile is seen when reading."""
        try:
            await self.stream.send(b"".join(frames))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.seen.closed = True

    async def read(self) -> None:
        """Read what comes next."""
        try:
            self._buffer += await self.stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            self.seen.closed = True
        while len(self._buffer) >= 9:
            parsed, length = Frame.parse_frame_header(memoryview(self._buffer[:9]))
            if len(self._buffer) < 9 + length:
                break
            parsed.parse_body(memoryview(self._buffer[9 : 9 + length]))
            self._buffer = self._buffer[9 + length :]
            self._see(parsed)

    def _see(self, parsed: Any) -> None:
        seen, stream = self.seen, parsed.stream_id
        seen.frames.append(parsed)
        match parsed.type:
            case 0:
                seen.bodies[stream] = seen.bodies.get(stream, b"") + parsed.data
            case 1:
                seen.statuses[stream] = bytes(dict(self._decoder.decode(parsed.data, raw=True))[b":status"])
            case 3:
                seen.resets.setdefault(stream, parsed.error_code)  # one more for each frame that comes later
            case 7:
                seen.goaway = parsed.error_code
        if "END_STREAM" in parsed.flags:
            seen.ended.add(stream)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Read until the condition holds."""
        with anyio.fail_after(30):
            while not condition():
                await self.read()

    async def until_settled(self, *streams: int) -> Received:
        """Read until each stream is answered or reset, or the connection is closed."""
        await self.until(lambda: all(self.seen.settled(stream) for stream in streams))
        return self.seen

    async def until_closed(self) -> Received:
        await self.until(lambda: self.seen.closed)
        return self.seen

    async def until_answered_ping(self) -> Received:
        """Read until the server has seen everything that was sent, or is gone."""
        await self.send(frame(PING, b"all seen"))
        frames = self.seen.frames
        await self.until(lambda: self.seen.closed or any(answer.type == PING for answer in frames))
        return self.seen


@asynccontextmanager
async def raw_http2(served: Served, settings: bytes = frame(SETTINGS)) -> AsyncIterator[RawHttp2]:
    async with await served.connect() as stream:
        client = RawHttp2(stream)
        await client.send(PREFACE, settings)
        yield client
