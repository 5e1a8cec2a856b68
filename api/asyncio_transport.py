"""A connection on asyncio, with its own loop and with uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

import anyio

from staged_pool.api.transports import RECEIVE_BYTES, Cancellable, Spawner, drop_unsent

ARRIVAL_BYTES: Final = 2**14
"""What is taken at once from a connection that nothing is known of yet: a head and a small body. From one that sends
more it is twice as much each time."""

MUCH_BYTES: Final = 2**15
"""Of a body, at least: for less the event loop is woken by whatever comes."""

WAITING_BYTES: Final = 2**16
"""What may wait in a transport of asyncio without anyone who waits for it."""


class _OfTask:
    """On asyncio: the task itself is cancelled, once. Each request has one; a scope of anyio around it took 4 % of what
    the event loop does for a short text (cProfile)."""

    __slots__ = ("_is_cancelled", "_task")

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._is_cancelled = False

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        task, self._task = self._task, None
        if not self._is_cancelled or task is None:
            return False
        # Whoever else has cancelled the task is to have it cancelled.
        return not task.uncancel() and kind is not None and issubclass(kind, asyncio.CancelledError)

    def cancel(self) -> None:
        if self._task is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()


class AsyncioTransport:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.time = asyncio.get_running_loop().time
        writer.transport.set_write_buffer_limits(0)  # `send` waits until everything is the kernel's
        plain = os.name == "posix" and writer.get_extra_info("sslcontext") is None
        self._descriptor: int | None = self.socket.fileno() if plain else None
        self._resting = False
        """The transport reads nothing until somebody receives: it would go to the reader."""

    @property
    def socket(self) -> Any:
        return self._writer.get_extra_info("socket")

    def spawner(self) -> Spawner:
        from hypercorn.asyncio.task_group import TaskGroup

        group: Spawner = TaskGroup(asyncio.get_running_loop())
        return group

    def cancellable(self) -> Cancellable:
        return _OfTask()

    async def handshake(self) -> str | None:
        chosen: str | None = self._writer.get_extra_info("ssl_object").selected_alpn_protocol()  # the loop has begun it
        return chosen

    async def receive(self) -> bytes:
        self._resume()
        with contextlib.suppress(OSError):
            return await self._reader.read(RECEIVE_BYTES)
        return b""

    async def receive_into(self, room: memoryview, within_s: float) -> int | None:
        transport: Any = self._writer.transport
        waiting = self._reader._buffer  # type: ignore[attr-defined]  # no other way to see it
        if not waiting and not self._reader.at_eof() and not transport.is_closing():
            count = 0 if self._descriptor is None else _read_into(self._descriptor, room)
            if count < len(room):
                with room[count:] as rest:  # it must be gone when the room is given back
                    count += await self._fill(rest, within_s)
            self.rest()
            if self._resting and not self._reader.at_eof():
                return count
            return count or None
        with contextlib.suppress(OSError):
            data = await self._reader.read(len(room))
            room[: len(data)] = data
            return len(data) or None
        return None

    async def _fill(self, room: memoryview, within_s: float) -> int:
        transport: Any = self._writer.transport
        filling = _Filling(transport, room)
        self._resume()
        if wants_much := self._descriptor is not None and len(room) >= MUCH_BYTES:
            _wake_at(self.socket, len(room))
        try:
            with anyio.move_on_after(within_s):
                await filling.ended()
        finally:
            if wants_much:
                _wake_at(self.socket, 1)
        return filling.count

    def show_first(self, look: Callable[[bytes], bool]) -> None:
        if self._descriptor is not None:
            _Looking(self._writer.transport, self._reader, look, self.rest)

    def rest(self) -> None:
        transport: Any = self._writer.transport
        if not self._resting and not transport.is_closing():
            self._resting = True
            transport.pause_reading()

    def _resume(self) -> None:
        if self._resting:
            self._resting = False
            transport: Any = self._writer.transport
            transport.resume_reading()

    @property
    def has_sent_all(self) -> bool:
        transport = self._writer.transport
        return not transport.is_closing() and not transport.get_write_buffer_size()

    def send_nowait(self, data: bytes) -> bool:
        transport = self._writer.transport
        waiting = transport.get_write_buffer_size()
        if transport.is_closing() or waiting + len(data) > WAITING_BYTES:
            return False
        if not waiting and self._descriptor is not None:
            data = _write_through(self._descriptor, data)
        if data:
            transport.write(data)
        return True

    async def send(self, data: bytes | memoryview) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except RuntimeError as error:  # how uvloop says that it is closed
            raise BrokenPipeError(str(error)) from error

    async def close(self) -> None:
        try:
            self._writer.close()
            # Shielded, because all who wait for the end wait for one future, which a cancellation would cancel.
            await asyncio.shield(self._writer.wait_closed())
        except (OSError, RuntimeError):
            pass  # the other side was quicker
        except asyncio.CancelledError:
            self.cut()
            raise

    def cut(self) -> None:
        drop_unsent(self.socket)
        self._writer.transport.abort()


class _Looking(asyncio.BufferedProtocol):
    """Stands before a connection's protocol, and shows what arrives to somebody who may take it.

    It takes no more at first than a head and a small body have: of a large one, which hundreds of clients may begin to
    send at the same time, the rest has its turn in `receive_into`. As long as its buffer is filled, uvloop goes on
    reading, up to 32 times: so the transport is told to rest.
    """

    _most = ARRIVAL_BYTES

    def __init__(
        self, transport: Any, reader: asyncio.StreamReader, look: Callable[[bytes], bool], rest: Callable[[], None]
    ) -> None:
        self._usual = transport.get_protocol()
        self._reader = reader
        self._look = look
        self._rest = rest
        transport.set_protocol(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _arrivals()[: self._most]

    def buffer_updated(self, nbytes: int) -> None:
        is_full = nbytes == self._most
        self._most = min(2 * self._most, RECEIVE_BYTES) if is_full else ARRIVAL_BYTES
        data = bytes(_arrivals()[:nbytes])
        if self._reader._buffer or not self._look(data):  # type: ignore[attr-defined]  # no other way to see it
            self._usual.data_received(data)
            if is_full:
                self._rest()

    def eof_received(self) -> bool | None:
        stays: bool | None = self._usual.eof_received()
        return stays

    def connection_lost(self, exc: Exception | None) -> None:
        self._usual.connection_lost(exc)

    def pause_writing(self) -> None:
        self._usual.pause_writing()

    def resume_writing(self) -> None:
        self._usual.resume_writing()


class _Filling(asyncio.BufferedProtocol):
    """Takes the place of a connection's protocol until a room is full, or nothing more comes. Then nothing is read."""

    def __init__(self, transport: asyncio.Transport, room: memoryview) -> None:
        self._transport = transport
        self._usual: Any = transport.get_protocol()
        self._room = room
        self.count = 0
        """Bytes that lie in the room."""
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        transport.set_protocol(self)

    async def ended(self) -> None:
        """Wait until it is over."""
        try:
            await self._over
        finally:
            self._end()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room[self.count :]

    def buffer_updated(self, nbytes: int) -> None:
        self.count += nbytes
        if self.count == len(self._room):
            self._transport.pause_reading()
            self._end()

    def eof_received(self) -> bool | None:
        self._end()
        keep_open: bool | None = self._usual.eof_received()
        return keep_open

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._usual.connection_lost(exc)

    def pause_writing(self) -> None:
        self._usual.pause_writing()

    def resume_writing(self) -> None:
        self._usual.resume_writing()

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)
        if self._transport.get_protocol() is self:
            self._transport.set_protocol(self._usual)


def _arrivals() -> memoryview:
    """Where what arrives lies until it is looked at, which is at once: all connections of an event loop share it."""
    try:
        room: memoryview = _OF_THREAD.arrivals
    except AttributeError:
        room = _OF_THREAD.arrivals = memoryview(bytearray(RECEIVE_BYTES))
    return room


_OF_THREAD: Final = threading.local()


def _read_into(descriptor: int, room: memoryview) -> int:
    """Receive what waits in the kernel, without holding the interpreter's lock meanwhile. 0: nothing does, or there is
    an end that the transport has to see."""
    try:
        return os.readv(descriptor, [room])
    except OSError:
        return 0


def _wake_at(connection: Any, count: int) -> None:
    """Have the event loop woken when so many bytes are there, or the end is: a body comes in dozens of pieces, and
    every one of them would interrupt a forward."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)


def _write_through(descriptor: int, data: bytes) -> bytes:
    """Hand bytes to the kernel without holding the interpreter's lock meanwhile, as uvloop's own write does: the kernel
    may run the client first, and every forward would wait for it. Returns what it did not take."""
    try:
        return data[os.write(descriptor, data) :]
    except OSError:
        return data  # it is full, or the transport finds out what is wrong
