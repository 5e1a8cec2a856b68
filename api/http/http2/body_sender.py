"""Response bodies over HTTP/2: sent frame by frame, as flow control allows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
import anyio.lowlevel

from staged_pool.api.http.http2.connection import StrictConnection
from staged_pool.api.http.http2.frames import FRAME_BYTES
from staged_pool.api.http.protocol.streams import RequestStream
from staged_pool.api.limits.allowance import Allowance

DATA_UNITS: Final = 4
"""Units that a frame of a response earns: for each one, a client may send two window updates and change a setting."""

LEAST_BYTES: Final = 2**10
"""Minimum bytes of a frame that earns units, except for the last of a piece."""


class Http2Stream(RequestStream):
    """A request on a stream, and the state of its response."""

    def __init__(self, *args: Any, price: int) -> None:
        super().__init__(*args)
        self.price = price
        """Units that its head has cost."""
        self.is_sent = False
        """The whole response is sent: the client may count the stream as closed."""
        self.opened = anyio.Event()
        """Set when the window of the stream has changed, or the client has left."""

    def leave(self) -> None:
        super().leave()
        self.opened.set()


class BodySender:
    """Sends the bodies of one connection: streams send one frame each in turn.

    Args:
        connection: Frames the bodies, and counts the windows.
        flush: Sends the frames that `connection` has made.
        allowance: Earns units for each frame.
    """

    def __init__(
        self, connection: StrictConnection, flush: Callable[[], Awaitable[None]], allowance: Allowance
    ) -> None:
        self._connection = connection
        self._flush = flush
        self._allowance = allowance
        self._lock = anyio.Lock(fast_acquire=True)
        """Held while a task makes a frame, or waits for the connection's window."""
        self._opened = anyio.Event()
        """Set when the window of the connection has changed, or a stream has ended."""
        self._closed = False

    def notify(self) -> None:
        """Wake the sending task: the window of the connection has changed, or a stream has ended."""
        self._opened.set()

    def close(self) -> None:
        """Make all `send` calls return, for the connection is closed."""
        self._closed = True
        self._opened.set()

    def must_wait(self, stream_id: int, count: int) -> bool:
        """Tell if a body of `count` bytes cannot be sent at once, in one frame."""
        return self._lock.locked() or count > self._room(stream_id)

    async def send(self, stream: Http2Stream, stream_id: int, piece: bytes, *, ends: bool) -> None:
        """Send a piece of a body, in as many frames as flow control needs."""
        while True:
            async with self._lock:
                while not (over := stream.left or self._closed) and piece and not self._has_window:
                    self._opened = anyio.Event()
                    await self._opened.wait()  # the lock stays held: no other stream could send either
                if over:
                    return
                room = self._room(stream_id)
                if not piece or room > 0:
                    part, piece = piece[:room], piece[room:]
                    stream.is_sent = ends and not piece
                    self._connection.send_data(stream_id, part, end_stream=stream.is_sent)
                    if not piece or len(part) >= LEAST_BYTES:
                        self._allowance.earn(DATA_UNITS)
                    await self._flush()
                    if not piece:
                        return
                    await anyio.lowlevel.checkpoint()
                    continue
                stream.opened = anyio.Event()
            await stream.opened.wait()

    @property
    def _has_window(self) -> bool:
        return self._connection.outbound_flow_control_window > 0

    def _room(self, stream_id: int) -> int:
        """Return the maximum bytes of the next frame. Clients may allow longer frames, which this server never uses."""
        return max(0, min(self._connection.local_flow_control_window(stream_id), FRAME_BYTES))
