"""Byte stream over a connected Unix socket, which may also carry descriptors.

It stands on `anyio.wait_readable` and `anyio.wait_writable`. With uvloop, an `anyio.abc.UNIXSocketStream` that is
cancelled while bytes arrive fails in the event loop, which sets a future that is cancelled already.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Final, TypeVar

import anyio
import anyio.lowlevel

from staged_pool.stages.wire import Bytes

T = TypeVar("T")

_READ_BYTES: Final = 1 << 16

_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})
"""Errors of a system that has no room for a call. They say nothing of the peer."""


class UnixStream:
    """One end of a connection. One task may receive and another one send.

    A cancelled `receive` or `receive_files` loses nothing. A cancelled `send` may have sent a part. All of them raise
    `OSError` if the system has no descriptors or no memory for the call, which is no end of the peer.

    Args:
        end: A connected socket of bytes, which is closed with the stream.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end

    async def __aenter__(self) -> UnixStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def receive(self, max_bytes: int = _READ_BYTES) -> bytes:
        """Wait for bytes.

        Raises:
            EndOfStream: The peer has closed its end.
            BrokenResourceError: The peer ended with bytes unread.
            ClosedResourceError: This end is closed.
        """
        data = await self._once(anyio.wait_readable, partial(self._socket.recv, max_bytes))
        if not data:
            raise anyio.EndOfStream
        return data

    async def receive_files(self, most_bytes: int, most_files: int) -> tuple[bytes, Sequence[int]]:
        """Wait for a message and its descriptors. The caller closes them. Raises the errors of `receive`.

        A program that is started here does not inherit them. They are fewer than were sent if this process may open no
        more: the system closes the rest.
        """
        take = partial(socket.recv_fds, self._socket, most_bytes, most_files)
        data, files, _, _ = await self._once(anyio.wait_readable, take)
        if not data:
            raise anyio.EndOfStream
        for file in files:
            os.set_inheritable(file, False)
        return data, files

    async def send(self, item: Bytes) -> None:
        """Send bytes.

        Raises:
            BrokenResourceError: The peer is gone.
            ClosedResourceError: This end is closed.
        """
        rest = memoryview(item)
        while rest:
            rest = rest[await self._once(anyio.wait_writable, partial(self._socket.send, rest)) :]

    async def send_files(self, message: bytes, files: Sequence[int]) -> None:
        """Send descriptors with a message. They stay open here. Raises the errors of `send`."""
        give = partial(socket.send_fds, self._socket, [message], files)
        await self.send(message[await self._once(anyio.wait_writable, give) :])

    def send_eof(self) -> None:
        """End the bytes of this end."""
        self._socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """Close this end. Tasks that wait on it get `ClosedResourceError`."""
        if self._socket.fileno() >= 0:
            anyio.notify_closing(self._socket)
            self._socket.close()
        await anyio.lowlevel.checkpoint()

    async def _once(self, ready: Callable[[socket.socket], Awaitable[None]], call: Callable[[], T]) -> T:
        """Make a call on the socket once it does not block. Other tasks run before, in any case."""
        await anyio.lowlevel.checkpoint()
        while True:
            try:
                return call()
            except BlockingIOError:
                await ready(self._socket)
            except OSError as error:
                if error.errno in _NO_ROOM:
                    raise
                raise (anyio.ClosedResourceError if self._socket.fileno() < 0 else anyio.BrokenResourceError) from error
