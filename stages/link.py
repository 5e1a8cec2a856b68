"""Link: frames to and from one peer, over a byte stream that either end may lose at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import anyio
from anyio.abc import TaskGroup

from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.wakeup import Wakeup, wakeup
from staged_pool.stages.wire import Bytes, Frame, FrameReader, LimitsOf, WireError, frame

RECEIVE_BYTES: Final = 1 << 18
"""Most bytes of one read."""

SEND_BYTES: Final = 1 << 18
"""Most bytes of one write: the end of each shows that the peer reads."""

MOST_UNREAD_BYTES: Final = 64 << 20
"""Bytes that may be posted while the peer reads nothing; the link ends beyond them.

A peer that is stopped would otherwise cost memory until somebody kills it. One that reads slowly never comes near it.
"""


class Stream(Protocol):
    """The byte stream under a link, such as `UnixStream`."""

    async def receive(self, max_bytes: int = ...) -> bytes: ...

    async def send(self, item: bytes) -> None: ...

    async def aclose(self) -> None: ...


class Link:
    """Sends and receives frames.

    One task writes and one reads, and neither is ever cancelled for the sake of a single request: a cancelled write
    would leave a cut frame. The reader waits for no stage. What may wait to be written is bounded by the credits of the
    channels, and by the requests that admission lets in. If a peer reads nothing, by `MOST_UNREAD_BYTES`.

    Args:
        stream: The link closes it.
        handle: Takes each frame; runs on the event loop. A `WireError` from it ends the link.
        limits_of: See `FrameReader`.
    """

    def __init__(self, stream: Stream, handle: Callable[[Frame], object], limits_of: LimitsOf) -> None:
        self._stream = stream
        self._limits_of = limits_of
        self._handle = handle
        self._unsent: list[Bytes] = []
        self._waiting: Wakeup | None = None
        """Wakes the writer, which waits for frames."""
        self._is_writing = False
        """True while the writer waits for the peer to read."""
        self._unread_bytes = 0
        """Bytes that were posted since the peer has read something."""
        self.unsent_bytes = 0
        """Bytes that the peer has not taken yet."""
        self._closing = False
        self._tasks: TaskGroup | None = None
        self._wrong: str | None = None
        """Reason for the end that this end has found."""
        self.is_open = True
        """False once the link has ended: frames that are posted then are dropped."""

    def post(self, kind: int, head: bytes, *raw: Bytes) -> None:
        """Send a frame as soon as possible, behind earlier ones. The link ends if the peer has long read nothing."""
        if not self.is_open:
            return
        if self._is_writing and self._unread_bytes > MOST_UNREAD_BYTES:
            self._give_up(f"the peer reads nothing, and {self.unsent_bytes >> 20} MiB wait for it")
            return
        parts = frame(kind, head, *raw)
        size = sum(map(len, parts))
        self._unsent += parts
        self._unread_bytes += size
        self.unsent_bytes += size
        if self._waiting is not None:
            self._waiting.set()

    def _give_up(self, reason: str) -> None:
        self.is_open = False
        self._unsent.clear()
        self._wrong = reason
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    def close(self) -> None:
        """End the link once everything that was posted is sent."""
        self._closing = True
        if self._waiting is not None:
            self._waiting.set()

    async def run(self) -> str:
        """Send and receive until either end closes or fails.

        Returns:
            The reason of the end.

        Raises:
            Exception: The one that `handle` has raised, if it is no `WireError`.
        """
        reason = "it was closed"
        try:
            with single_errors():
                async with anyio.create_task_group() as tasks:
                    self._tasks = tasks
                    tasks.start_soon(self._write, tasks.cancel_scope)
                    reason = await self._read()
                    tasks.cancel_scope.cancel()
        finally:
            self.is_open = False
            self._unsent.clear()
            self._tasks = None
            with anyio.CancelScope(shield=True):
                await self._stream.aclose()
        return self._wrong or reason

    async def _read(self) -> str:
        frames = FrameReader(self._limits_of)
        while True:
            try:
                data = await self._stream.receive(RECEIVE_BYTES)
            except anyio.EndOfStream:
                return "the peer closed it" if not frames.held_bytes else "the peer ended within a frame"
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return "the peer ended"
            except OSError as error:
                return _no_room(error)
            try:
                for one in frames.feed(data):
                    self._handle(one)
            except WireError as error:
                return str(error)

    async def _write(self, link: anyio.CancelScope) -> None:
        while True:
            if not self._unsent:
                if self._closing:
                    link.cancel()
                    return
                self._waiting = wakeup()
                await self._waiting.wait()
                self._waiting = None
                continue
            parts, self._unsent = self._unsent, []
            if not await self._send(b"".join(parts)):
                return  # the reader still gets what the peer had sent, and then the end

    async def _send(self, data: bytes) -> bool:
        """Send bytes, piece by piece. Returns False if the peer is gone, or the system has no room for them."""
        self._is_writing = True
        for start in range(0, len(data), SEND_BYTES):
            piece = data if len(data) <= SEND_BYTES else data[start : start + SEND_BYTES]
            try:
                await self._stream.send(piece)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return False
            except OSError as error:
                self._give_up(_no_room(error))  # the peer is there, and would wait for the rest of this frame
                return False
            self._unread_bytes = 0
            self.unsent_bytes -= len(piece)
        self._is_writing = False
        return True


def _no_room(error: OSError) -> str:
    return f"the system has no room for it: {error.strerror}"
