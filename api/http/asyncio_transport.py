"""Transport of a connection on asyncio and uvloop."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from typing import Any, Final, cast

import anyio.lowlevel

from staged_pool.api.http.transports import ARRIVAL_BYTES, Look, drop_unsent, read_kernel

WAITING_BYTES: Final = 2**16
"""Maximum bytes buffered by `send_nowait`."""

_THREAD: Final = threading.local()


class AsyncioTransport(asyncio.BufferedProtocol):
    """A `Transport` on asyncio; `open` makes one.

    Args:
        look: Called with arriving bytes, within asyncio's callback: an immediate answer needs no task switch.
    """

    socket: Any
    alpn: str | None = None

    def __init__(self, look: Look) -> None:
        self._look = look
        self._arrived = bytearray()
        self._has_ended = False
        self._reading_paused = False
        """Reading is paused until the next `receive`."""
        self._is_full = False
        """The kernel's send buffer is full."""
        self._moved = asyncio.Event()
        """Set when bytes have arrived, or the client has closed."""
        self._drained = asyncio.Event()
        """Set when the kernel takes bytes again, or the connection is lost."""
        self._lost = asyncio.Event()

    @staticmethod
    async def open(connection: socket.socket, tls: ssl.SSLContext | None, look: Look) -> AsyncioTransport:
        """Take over an accepted socket, after a TLS handshake if needed. Cancellation closes it.

        Raises:
            OSError: The handshake failed, or the client has left.
        """
        if connection.fileno() < 0:
            raise BrokenPipeError("the connection is closed")  # uvloop would warn about an incomplete transport
        transport = AsyncioTransport(look)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: transport, connection, ssl=tls)
        return transport

    async def receive(self) -> bytes:
        while not self._arrived and not self._has_ended:
            self._resume()
            self._moved.clear()
            await self._moved.wait()
        return self._take()

    async def arrived(self) -> bytes:
        self._resume()
        for _ in range(2):  # by then the event loop has polled its sockets
            await anyio.lowlevel.checkpoint()
        return self._take()

    def _take(self) -> bytes:
        data = bytes(self._arrived)
        self._arrived.clear()
        return data

    def read_now(self, most: int) -> bytes:
        if self._arrived or self._has_ended or self._transport.is_closing():
            return b""  # the descriptor may already belong to another connection
        return read_kernel(self._descriptor, most)

    def _resume(self) -> None:
        if self._reading_paused and not self._transport.is_closing():
            self._reading_paused = False
            self._transport.resume_reading()

    @property
    def has_sent_all(self) -> bool:
        return not self._transport.is_closing() and not self._transport.get_write_buffer_size()

    def send_nowait(self, data: bytes) -> bool:
        waiting = self._transport.get_write_buffer_size()
        if self._transport.is_closing() or waiting + len(data) > WAITING_BYTES:
            return False
        if not waiting and self._descriptor is not None:
            data = _write_through(self._descriptor, data)
        if data:
            self._transport.write(data)
        return True

    async def send(self, data: bytes | memoryview) -> None:
        if not self._transport.is_closing():
            self._drained.clear()
            self._transport.write(data)
        await self.send_rest()

    async def send_rest(self) -> None:
        if self._is_full and not self._transport.is_closing():
            await self._drained.wait()
        if self._transport.is_closing():
            raise BrokenPipeError("the connection is closed")

    async def close(self) -> None:
        try:
            self._transport.close()
            await self._lost.wait()
        except asyncio.CancelledError:
            self.cut()
            raise

    def cut(self) -> None:
        drop_unsent(self.socket)
        self._transport.abort()

    # Callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(0)  # `send` waits until the kernel has all bytes
        self.socket = transport.get_extra_info("socket")
        encrypted = transport.get_extra_info("ssl_object")
        self.alpn = None if encrypted is None else encrypted.selected_alpn_protocol()
        self._descriptor = self.socket.fileno() if os.name == "posix" and encrypted is None else None

    def get_buffer(self, sizehint: int) -> memoryview:
        return _arrivals()

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(_arrivals()[:nbytes])
        if self._arrived or not self._look(data):
            self._arrived += data
            self._moved.set()
        if len(self._arrived) >= ARRIVAL_BYTES and not self._reading_paused:  # uvloop would read up to 32 times more
            self._reading_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._has_ended = True
        self._moved.set()
        return self._descriptor is not None  # True keeps the sending side open, which TLS does not allow

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_ended = True
        for event in (self._moved, self._drained, self._lost):
            event.set()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._drained.set()


def _arrivals() -> memoryview:
    """Return the receive buffer of this thread's event loop, shared by all its connections."""
    try:
        room: memoryview = _THREAD.arrivals
    except AttributeError:
        room = _THREAD.arrivals = memoryview(bytearray(ARRIVAL_BYTES))
    return room


def _write_through(descriptor: int, data: bytes) -> bytes:
    """Write to the kernel without the interpreter's lock; return the bytes left.

    uvloop's own write holds the lock. The kernel may run the client within the call, and all forwards would wait.
    """
    try:
        return data[os.write(descriptor, data) :]
    except OSError:
        return data  # the buffer is full, or the transport will report the error
