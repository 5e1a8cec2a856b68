"""The bounded channel between two stages."""

from __future__ import annotations

from typing import Generic, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

T = TypeVar("T")


class Outlet(Generic[T]):
    """A sending end, owned by a stage before (or, for the first channel, by the engine's door)."""

    def __init__(self, stream: MemoryObjectSendStream[T]) -> None:
        self._stream = stream

    async def send(self, message: T) -> None:
        """Hand a message over, waiting for room.

        Cancellation: a send that raises may have delivered all the same. Whoever sends must therefore settle what it
        holds through the ticket, where the first writer wins, and never conclude that the message was not taken.

        Raises:
            anyio.BrokenResourceError: The receiving stage is gone.
        """
        try:
            self._stream.send_nowait(message)  # `send` gives every other task a turn first
        except anyio.WouldBlock:
            await self._stream.send(message)

    def clone(self) -> Outlet[T]:
        """One more sending end of the same channel, for another owner, who must close it too."""
        return Outlet(self._stream.clone())

    def close(self) -> None:
        """Say that nothing more will come: once all ends have, the stage behind finishes what is in the channel."""
        self._stream.close()


class Inlet(Generic[T]):
    """The receiving end, owned by the stage behind and shared by its workers, who iterate over it.

    Cancellation by an anyio scope loses nothing. Native asyncio cancellation may lose a message that is on its way,
    which is why stage workers live in the engine's own task group and nowhere else.
    """

    def __init__(self, stream: MemoryObjectReceiveStream[T]) -> None:
        self._stream = stream

    def __aiter__(self) -> Inlet[T]:
        return self

    async def __anext__(self) -> T:
        """The next message; the iteration ends when the outlet is closed and the channel is empty."""
        try:
            return await self._stream.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

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
        return left


class Channel(Generic[T]):
    """Both ends of a channel that holds `capacity` messages; a further send waits.

    Choose a small capacity. Every message that waits here is latency promised to nobody; a larger one smooths
    nothing that a bounded waiting room in front of the device does not smooth better.

    Args:
        name: Of the stage behind it.
        capacity: Messages, 0 or more.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        send, receive = anyio.create_memory_object_stream[T](capacity)
        self.outlet = Outlet(send)
        self.inlet = Inlet(receive)
        self._statistics = send.statistics

    @property
    def waiting(self) -> int:
        """Messages that no worker has taken yet, those of senders that wait for room included."""
        statistics = self._statistics()
        return statistics.current_buffer_used + statistics.tasks_waiting_send
