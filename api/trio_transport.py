"""A connection on trio."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio

from staged_pool.api.transports import RECEIVE_BYTES, Cancellable, Spawner, drop_unsent

if TYPE_CHECKING:
    import trio

    TrioTls: TypeAlias = trio.SSLStream[trio.SocketStream]

GOODBYE_S: Final = 0.5
"""How long a client may take to answer TLS's goodbye, which few insist on."""


class TrioTransport:
    def __init__(self, stream: trio.SocketStream | TrioTls) -> None:
        import trio

        self.time = trio.current_time
        self._stream = stream
        transport: Any = getattr(stream, "transport_stream", stream)
        self._socket = transport.socket
        self._is_tls = transport is not stream
        self._receiving: trio.CancelScope | None = None

    @property
    def socket(self) -> Any:
        return self._socket

    def spawner(self) -> Spawner:
        from hypercorn.trio.task_group import TaskGroup

        group: Spawner = TaskGroup()
        return group

    def cancellable(self) -> Cancellable:
        return anyio.CancelScope()

    async def handshake(self) -> str | None:
        import trio

        stream: Any = self._stream
        try:
            await stream.do_handshake()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise BrokenPipeError(str(error)) from error
        chosen: str | None = stream.selected_alpn_protocol()
        return chosen

    def show_first(self, look: Callable[[bytes], bool]) -> None:
        """Nobody can be shown anything: trio receives where it is waited for."""

    def rest(self) -> None:
        """It always does."""

    async def receive(self) -> bytes:
        return await self._receive_some(RECEIVE_BYTES)

    async def receive_into(self, room: memoryview, within_s: float) -> int | None:
        import trio

        count: int | None = None
        with anyio.move_on_after(within_s) as patience, contextlib.suppress(OSError, trio.ClosedResourceError):
            if self._is_tls:
                data = await self._receive_some(len(room))
                room[: len(data)] = data
                count = len(data)
            else:
                count = await self._socket.recv_into(room)
        return 0 if patience.cancelled_caught else count or None

    async def _receive_some(self, most: int) -> bytes:
        import trio

        self._receiving = trio.CancelScope()
        with self._receiving:
            try:
                return bytes(await self._stream.receive_some(most))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            finally:
                self._receiving = None
        return b""

    @property
    def has_sent_all(self) -> bool:
        return False

    def send_nowait(self, data: bytes) -> bool:
        return not data  # nothing waits here: trio hands all of it to the kernel

    async def send(self, data: bytes | memoryview) -> None:
        import trio

        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise BrokenPipeError(str(error)) from error

    async def close(self) -> None:
        if self._is_tls:
            await self._say_goodbye()
        self._socket.close()  # what was sent is the kernel's already, which goes on sending it

    async def _say_goodbye(self) -> None:
        """Of TLS, so that the client knows that nothing was cut off. Trio's `aclose()` says none to clients of HTTP."""
        import trio

        stream: Any = self._stream
        with trio.move_on_after(GOODBYE_S):
            while self._receiving is not None:  # it and the goodbye exclude each other
                self._receiving.cancel()
                await trio.lowlevel.checkpoint()
            with contextlib.suppress(trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError):
                await stream.unwrap()

    def cut(self) -> None:
        drop_unsent(self._socket)
        self._socket.close()
