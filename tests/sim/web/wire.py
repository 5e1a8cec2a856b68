"""A simulated connection: the wire between client and server, and the server's transport."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel

from staged_pool.api.http.transports import ARRIVAL_BYTES, Look

WAITING_BYTES = 2**16
"""Bytes that may be sent without waiting, as on asyncio."""


class Wire:
    """Both directions of one connection.

    Args:
        kernel_bytes: Size of the kernel's buffer for bytes that the client does not read.
    """

    def __init__(self, kernel_bytes: int) -> None:
        self.arrived = bytearray()
        """Bytes from the client that the server has not received."""
        self.received = 0
        """Number of bytes that the server has received or taken after a look."""
        self.is_ended = False
        """The client has closed its side."""
        self.is_reset = False
        self.sent = bytearray()
        """Bytes from the server that are in the kernel's buffer, unread by the client."""
        self.unsent = b""
        """Bytes from the server that wait for room in the kernel's buffer."""
        self.is_closed = False
        """The server has closed."""
        self.is_cut = False
        """The server has reset it."""
        self.look: Look | None = None
        self._kernel_bytes = kernel_bytes
        self._moved = anyio.Event()

    # The client's end

    def deliver(self, data: bytes) -> None:
        """Deliver bytes of the client to the server."""
        if self.is_closed:
            return
        if not self.arrived and self.look is not None and self.look(data):
            self.received += len(data)
        else:
            self.arrived += data
        self.move()

    def end(self, *, by_reset: bool) -> None:
        """Close the client's side, or reset the connection."""
        self.is_ended = True
        self.is_reset = by_reset
        if by_reset:
            self.sent.clear()
        self.move()

    async def read(self) -> bytes:
        """Return the bytes that the server has sent; nothing at the end."""
        while not self.sent and not self.is_closed and not self.is_reset:
            await self.moves()
        data = b"" if self.is_cut or self.is_reset else bytes(self.sent)
        self.sent.clear()
        self._fill()
        self.move()
        return data

    # The server's end

    def take(self, most: int = ARRIVAL_BYTES) -> bytes:
        data = bytes(self.arrived[:most])
        del self.arrived[: len(data)]
        self.received += len(data)
        return data

    @property
    def is_gone(self) -> bool:
        return self.is_closed or self.is_reset

    def put(self, data: bytes | memoryview) -> None:
        """Send bytes; those beyond the kernel's buffer wait."""
        self.unsent += data
        self._fill()
        self.move()

    def _fill(self) -> None:
        taken = self.unsent[: max(0, self._kernel_bytes - len(self.sent))]
        self.sent += taken
        self.unsent = self.unsent[len(taken) :]

    def close(self, *, by_reset: bool = False) -> None:
        self.is_closed = True
        self.is_cut |= by_reset
        self.move()

    def move(self) -> None:
        """Wake the tasks that wait for a change."""
        moved, self._moved = self._moved, anyio.Event()
        moved.set()

    async def moves(self) -> None:
        """Wait until something changes."""
        await self._moved.wait()


class FakeSocket:
    """A socket that the server accepts."""

    family = socket.AF_INET

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def getpeername(self) -> tuple[str, int]:
        if self.wire.is_reset:
            raise OSError("the client is gone")
        return "127.0.0.1", 1

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 8000

    def close(self) -> None:
        self.wire.close()


class FakeTransport:
    """A `Transport` (see `api/http/transports.py`): as that of asyncio if it looks at what arrives, else as trio's."""

    alpn = None

    def __init__(self, connection: FakeSocket, look: Look | None) -> None:
        self.socket: Any = connection
        self._wire = connection.wire
        self._looks = look is not None
        self._wire.look = look

    @staticmethod
    def opener(*, looks: bool) -> Callable[[Any, ssl.SSLContext | None, Look], Awaitable[FakeTransport]]:
        """Return a double of `AsyncioTransport.open` or `TrioTransport.open`."""

        async def open_(connection: Any, _tls: ssl.SSLContext | None, look: Look) -> FakeTransport:
            await anyio.lowlevel.checkpoint()
            return FakeTransport(connection, look if looks else None)

        return open_

    async def receive(self) -> bytes:
        wire = self._wire
        while not wire.arrived and not wire.is_ended and not wire.is_closed:
            await wire.moves()
        if not self._looks:
            await anyio.lowlevel.checkpoint_if_cancelled()
        return b"" if wire.is_reset else wire.take()

    async def arrived(self) -> bytes:
        for _ in range(2):
            await anyio.lowlevel.checkpoint()
        return self._wire.take()

    def read_now(self, most: int) -> bytes:
        return self._wire.take(most)

    @property
    def has_sent_all(self) -> bool:
        return self._looks and not self._wire.is_gone and not self._wire.unsent

    def send_nowait(self, data: bytes) -> bool:
        if not self._looks:
            return not data
        if self._wire.is_gone or len(self._wire.unsent) + len(data) > WAITING_BYTES:
            return False
        self._wire.put(data)
        return True

    async def send(self, data: bytes | memoryview) -> None:
        if not self._wire.is_gone:
            self._wire.put(data)
            await anyio.lowlevel.checkpoint()
            await self._all_sent()
        if self._wire.is_gone:
            raise BrokenPipeError("the connection is closed")

    async def _all_sent(self) -> None:
        while self._wire.unsent and not self._wire.is_gone:
            await self._wire.moves()

    async def close(self) -> None:
        try:
            await self._all_sent()
        except BaseException:
            self.cut()
            raise
        self._wire.close()

    def cut(self) -> None:
        self._wire.close(by_reset=True)
