"""Transport of a connection on trio."""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import TYPE_CHECKING, Any, Final

import anyio

from staged_pool.api.http.transports import ARRIVAL_BYTES, Look, drop_unsent, read_kernel

if TYPE_CHECKING:
    import trio

CLOSE_NOTIFY_S: Final = 0.5
"""Seconds that a client may take to answer TLS's close notification; few clients wait for it."""

LOOK_S: Final = 0.01
"""Seconds to wait, after a connection's timeout, for the rest of a TLS record."""


class TrioTransport:
    """A `Transport` on trio; `open` makes one."""

    def __init__(self, stream: trio.SocketStream, encrypted: trio.SSLStream[trio.SocketStream] | None) -> None:
        self.socket = stream.socket
        self.alpn: str | None = None if encrypted is None else encrypted.selected_alpn_protocol()
        self._stream: Any = encrypted or stream
        self._encrypted = encrypted
        self._receiving: trio.CancelScope | None = None
        self._unsent = memoryview(b"")

    @staticmethod
    async def open(connection: socket.socket, tls: ssl.SSLContext | None, look: Look) -> TrioTransport:
        """Take over an accepted socket, after a TLS handshake if needed. Cancellation closes it.

        Args:
            connection: The socket.
            tls: TLS settings; None without TLS.
            look: Never called: trio reads only within `receive`.

        Raises:
            OSError: The handshake failed, or the client has left.
        """
        import trio

        stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        if tls is None:
            return TrioTransport(stream, None)
        encrypted = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
        try:
            await encrypted.do_handshake()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise BrokenPipeError(str(error)) from error
        return TrioTransport(stream, encrypted)

    async def receive(self) -> bytes:
        import trio

        self._receiving = trio.CancelScope()
        with self._receiving:
            try:
                return bytes(await self._stream.receive_some(ARRIVAL_BYTES))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            finally:
                self._receiving = None
        return b""

    async def arrived(self) -> bytes:
        with anyio.move_on_after(LOOK_S):  # trio first reads the kernel's buffer
            return await self.receive()
        return b""

    def read_now(self, most: int) -> bytes:
        return b"" if self._encrypted is not None else read_kernel(self.socket.fileno(), most)

    @property
    def has_sent_all(self) -> bool:
        return False

    def send_nowait(self, data: bytes) -> bool:
        return not data  # this transport has no buffer: trio passes all bytes to the kernel

    async def send(self, data: bytes | memoryview) -> None:
        import trio

        self._unsent = memoryview(data)
        try:
            if self._encrypted is None:
                await self.send_rest()
            else:
                await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise BrokenPipeError(str(error)) from error

    async def send_rest(self) -> None:
        if self._encrypted is not None:
            raise BrokenPipeError("TLS cannot continue within a record")
        import trio

        try:
            while self._unsent:
                self._unsent = self._unsent[await self.socket.send(self._unsent) :]
        except trio.ClosedResourceError as error:
            raise BrokenPipeError(str(error)) from error

    async def close(self) -> None:
        if self._encrypted is not None:
            await self._notify_close(self._encrypted)
        self.socket.close()  # the kernel has all bytes, and goes on sending them

    async def _notify_close(self, encrypted: trio.SSLStream[trio.SocketStream]) -> None:
        """Send TLS's close notification, which tells the client that nothing was cut off.

        Trio's `aclose()` sends none for HTTP.
        """
        import trio

        with trio.move_on_after(CLOSE_NOTIFY_S):
            while self._receiving is not None:  # trio allows no receive during the notification
                self._receiving.cancel()
                await trio.lowlevel.checkpoint()
            with contextlib.suppress(trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError):
                await encrypted.unwrap()

    def cut(self) -> None:
        drop_unsent(self.socket)
        self.socket.close()
