"""Link: frames to and from one peer, over a byte stream that either end may lose at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import anyio
from anyio.abc import TaskGroup

from staged_pool.stages.awake import Sleep, sleep_awake
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.wakeup import Wakeup, wakeup
from staged_pool.stages.wire import Bytes, Frame, FrameReader, LimitsOf, WireError, frame

RECEIVE_BYTES: Final = 1 << 18
"""Most bytes of one read."""

SEND_BYTES: Final = 1 << 18
"""Most bytes of one write: the end of each shows that the peer reads."""

MOST_UNREAD_BYTES: Final = 64 << 20
"""Bytes that may wait for a peer that takes nothing. Beyond them, it has `UNREAD_S`, and then the link ends.

A peer that is stopped would otherwise cost memory until somebody kills it. A burst of more is no reason for an end: no
peer can take any of it before the writer has run.
"""

UNREAD_S: Final = 5.0
"""Seconds in which the peer may take nothing of much that waits.

They count while this process runs: a freeze of both ends no link."""


class Stream(Protocol):
    """The byte stream under a link, such as `UnixStream`."""

    async def receive(self, max_bytes: int = ...) -> bytes: ...

    async def send(self, item: bytes) -> None: ...

    async def aclose(self) -> None: ...


class Link:
    """Sends and receives frames.

    One task writes and one reads, and neither is ever cancelled for the sake of a single request: a cancelled write
    would leave a cut frame. The reader waits for no stage. What may wait to be written is bounded by the credits of the
    channels, and by the requests that admission lets in. If a peer takes nothing of more than `MOST_UNREAD_BYTES`, the
    link ends after `UNREAD_S`, and nothing waits any more.

    Args:
        stream: The link closes it.
        handle: Takes each frame; runs on the event loop. A `WireError` from it ends the link.
        limits_of: See `FrameReader`.
        sleep: Sleeps for some seconds by the clock.
    """

    def __init__(
        self,
        stream: Stream,
        handle: Callable[[Frame], object],
        limits_of: LimitsOf,
        *,
        sleep: Sleep = anyio.sleep,
    ) -> None:
        self._stream = stream
        self._limits_of = limits_of
        self._handle = handle
        self._sleep = sleep
        self._unsent: list[Bytes] = []
        self._waiting: Wakeup | None = None
        """Wakes the writer, which waits for frames."""
        self._taken = 0
        """Pieces that the peer has taken."""
        self._is_watched = False
        """True while much waits, and a task looks whether the peer takes any of it."""
        self.unsent_bytes = 0
        """Bytes that the peer has not taken yet."""
        self._closing = False
        self._tasks: TaskGroup | None = None
        self._wrong: str | None = None
        """Reason for the end that this end has found."""
        self.is_open = True
        """False once the link has ended: frames that are posted then are dropped."""

    def post(self, kind: int, head: bytes, *raw: Bytes) -> None:
        """Send a frame as soon as possible, behind earlier ones. The link ends if the peer has long taken nothing."""
        if not self.is_open:
            return
        parts = frame(kind, head, *raw)
        self._unsent += parts
        self.unsent_bytes += sum(map(len, parts))
        if self._waiting is not None:
            self._waiting.set()
        self._watch_much()

    def _watch_much(self) -> None:
        if self.unsent_bytes > MOST_UNREAD_BYTES and not self._is_watched and self._tasks is not None:
            self._is_watched = True
            self._tasks.start_soon(self._watch, self._tasks.cancel_scope)

    async def _watch(self, link: anyio.CancelScope) -> None:
        """End the link if the peer takes nothing for `UNREAD_S`. Return once little waits."""
        while self.unsent_bytes > MOST_UNREAD_BYTES:
            taken = self._taken
            await sleep_awake(UNREAD_S, self._sleep)
            if self._taken == taken and self.unsent_bytes > MOST_UNREAD_BYTES:
                self._give_up(f"the peer reads nothing, and {self.unsent_bytes >> 20} MiB wait for it", link)
                return
        self._is_watched = False

    def _give_up(self, reason: str, link: anyio.CancelScope) -> None:
        self.is_open = False
        self._unsent.clear()
        self._wrong = reason
        link.cancel()

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
                    self._watch_much()
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
            if not await self._send(b"".join(parts), link):
                return  # the reader still gets what the peer had sent, and then the end

    async def _send(self, data: bytes, link: anyio.CancelScope) -> bool:
        """Send bytes, piece by piece. Returns False if the peer is gone, or the system has no room for them."""
        for start in range(0, len(data), SEND_BYTES):
            piece = data if len(data) <= SEND_BYTES else data[start : start + SEND_BYTES]
            try:
                await self._stream.send(piece)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return False
            except OSError as error:  # the peer is there, and would wait for the rest of this frame
                self._give_up(_no_room(error), link)
                return False
            self._taken += 1
            self.unsent_bytes -= len(piece)
        return True


def _no_room(error: OSError) -> str:
    return f"the system has no room for it: {error.strerror}"
