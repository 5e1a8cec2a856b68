"""A connection on asyncio, with its own loop and with uvloop."""

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
"""Bytes that may wait to be sent without anyone who waits for them."""

_OF_THREAD: Final = threading.local()


class AsyncioTransport(asyncio.BufferedProtocol):
    """See `Transport`. Made by `open`.

    Args:
        look: Called within the call that receives: an answer that takes no time takes no turn of the event loop.
    """

    socket: Any
    alpn: str | None = None

    def __init__(self, look: Look) -> None:
        self._look = look
        self._arrived = bytearray()
        self._has_ended = False
        self._rests = False
        """Nothing is read until somebody receives."""
        self._is_full = False
        """The kernel takes no more for now."""
        self._moved = asyncio.Event()
        """Something has arrived, or will not."""
        self._drained = asyncio.Event()
        """The kernel takes more, or the connection is lost."""
        self._lost = asyncio.Event()

    @staticmethod
    async def open(connection: socket.socket, tls: ssl.SSLContext | None, look: Look) -> AsyncioTransport:
        """Take over an accepted socket, with a handshake if there is TLS. Cancelled, it is closed.

        Raises:
            OSError: There is no agreement, or the client is gone.
        """
        if connection.fileno() < 0:
            raise BrokenPipeError("the connection is closed")  # uvloop would warn of half a transport
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
        for _ in range(2):  # the event loop has looked at its sockets by then
            await anyio.lowlevel.checkpoint()
        return self._take()

    def _take(self) -> bytes:
        data = bytes(self._arrived)
        self._arrived.clear()
        return data

    def read_now(self, most: int) -> bytes:
        if self._arrived or self._has_ended or self._transport.is_closing():
            return b""  # its descriptor may be another connection's by now
        return read_kernel(self._descriptor, most)

    def _resume(self) -> None:
        if self._rests and not self._transport.is_closing():
            self._rests = False
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

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(0)  # `send` waits until everything is the kernel's
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
        if len(self._arrived) >= ARRIVAL_BYTES and not self._rests:  # uvloop would read on, up to 32 times
            self._rests = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._has_ended = True
        self._moved.set()
        return self._descriptor is not None  # what is being sent may go out; TLS closes both ways

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
    """Where what arrives lies until it is looked at, which is at once: all connections of an event loop share it."""
    try:
        room: memoryview = _OF_THREAD.arrivals
    except AttributeError:
        room = _OF_THREAD.arrivals = memoryview(bytearray(ARRIVAL_BYTES))
    return room


def _write_through(descriptor: int, data: bytes) -> bytes:
    """Hand bytes to the kernel without the interpreter's lock, and return what it did not take.

    Uvloop's own write does the same: the kernel may run the client first, and every forward would wait for it.
    """
    try:
        return data[os.write(descriptor, data) :]
    except OSError:
        return data  # it is full, or the transport finds out what is wrong
