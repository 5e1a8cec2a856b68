"""The bounded channel between two stages."""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

T = TypeVar("T")


IN_A_ROW: Final = 8
"""Messages that are taken from one channel before every other task has its turn."""


class _Bell:
    """Wakes workers that wait for a message, one for each that comes.

    The stream's own `receive` and `send` give every other task a turn first, even where there is nothing to wait for.
    Each turn gives up the interpreter's lock, and a forward that runs takes its time to give it back.
    """

    def __init__(self) -> None:
        self._waiting: deque[anyio.Event] = deque()

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiting)

    def ring(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()

    def ring_for_all(self) -> None:
        while self._waiting:
            self.ring()

    async def wait(self) -> None:
        rung = anyio.Event()
        self._waiting.append(rung)
        try:
            await rung.wait()
        except BaseException:
            if rung.is_set():
                self.ring()  # somebody else must come instead
            else:
                self._waiting.remove(rung)
            raise


class Outlet(Generic[T]):
    """A sending end, owned by a stage before (or, for the first channel, by the engine's door)."""

    def __init__(self, stream: MemoryObjectSendStream[T], bell: _Bell) -> None:
        self._stream = stream
        self._bell = bell

    async def send(self, message: T) -> None:
        """Hand a message over, waiting for room.

        Cancellation: a send that raises may have delivered all the same. Whoever sends must therefore settle what it
        holds through the ticket, where the first writer wins, and never conclude that the message was not taken.

        Raises:
            anyio.BrokenResourceError: The receiving stage is gone.
        """
        try:
            self._stream.send_nowait(message)
        except anyio.WouldBlock:
            await self._stream.send(message)
        self._bell.ring()

    def clone(self) -> Outlet[T]:
        """One more sending end of the same channel, for another owner, who must close it too."""
        return Outlet(self._stream.clone(), self._bell)

    def close(self) -> None:
        """Say that nothing more will come: once all ends have, the stage behind finishes what is in the channel."""
        self._stream.close()
        self._bell.ring_for_all()  # it may have been the last one


class Inlet(Generic[T]):
    """The receiving end, owned by the stage behind and shared by its workers, who iterate over it.

    Cancellation by an anyio scope loses nothing. Native asyncio cancellation may lose a message that is on its way,
    which is why stage workers live in the engine's own task group and nowhere else.
    """

    def __init__(self, stream: MemoryObjectReceiveStream[T], bell: _Bell) -> None:
        self._stream = stream
        self._bell = bell
        self._in_a_row = 0

    def __aiter__(self) -> Inlet[T]:
        return self

    async def __anext__(self) -> T:
        """The next message; the iteration ends when the outlet is closed and the channel is empty."""
        if self._in_a_row == IN_A_ROW:
            self._in_a_row = 0
            await anyio.lowlevel.checkpoint()
        while True:
            try:
                message = self._stream.receive_nowait()
            except anyio.WouldBlock:
                self._in_a_row = 0
                await self._bell.wait()
            except anyio.EndOfStream:
                raise StopAsyncIteration from None
            else:
                self._in_a_row += 1
                if self._bell and self._stream.statistics().current_buffer_used:
                    self._bell.ring()  # one may be from a sender that waited for room: nobody was woken for it
                return message

    def receive_waiting(self) -> T | None:
        """The next message if one waits; None otherwise."""
        try:
            return self._stream.receive_nowait()
        except (anyio.WouldBlock, anyio.EndOfStream):
            return None

    def close(self) -> list[T]:
        """Close this end and return what was still in the channel: closing alone would drop it unseen."""
        left: list[T] = []
        while (message := self.receive_waiting()) is not None:
            left.append(message)
        self._stream.close()
        self._bell.ring_for_all()
        return left


class Channel(Generic[T]):
    """Both ends of a channel that holds `capacity` messages; a further send waits.

    Choose a small capacity. Every message that waits here is latency promised to nobody; a larger one smooths
    nothing that a bounded waiting room in front of the device does not smooth better.

    Args:
        name: Of the stage behind it.
        capacity: Messages, 1 or more.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        send, receive = anyio.create_memory_object_stream[T](capacity)
        bell = _Bell()
        self.outlet = Outlet(send, bell)
        self.inlet = Inlet(receive, bell)
        self._statistics = send.statistics

    @property
    def waiting(self) -> int:
        """Messages that no worker has taken yet, those of senders that wait for room included."""
        statistics = self._statistics()
        return statistics.current_buffer_used + statistics.tasks_waiting_send
