"""The bounded channel between two stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from staged_pool.stages.wakeup import Wakeup, wakeup

T = TypeVar("T")


ENDED: Final = (anyio.BrokenResourceError, anyio.ClosedResourceError)
"""Errors of a send that nobody will receive: the stage behind is gone, or this end is closed."""

IN_A_ROW: Final = 8
"""Messages that are taken from one channel before every other task has its turn."""


class WorkerNotifier:
    """Wakes those who wait for work, one after the other.

    While one that was woken is on its way, nobody else is: whoever takes work and leaves some must ring again. So what
    comes in one turn of the event loop wakes as many workers as it takes, and not one for each message.
    """

    __slots__ = ("_is_coming", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[Wakeup] = deque()
        self._is_coming = False

    def notify(self) -> None:
        """There is work: somebody must come."""
        if self._waiting and not self._is_coming:
            self._is_coming = True
            self._waiting.popleft().set()

    def notify_all(self) -> None:
        """Whatever they wait for: all must come."""
        for rung in self._waiting:
            rung.set()
        self._waiting.clear()

    async def wait(self) -> None:
        """Wait until there may be work: somebody else may have been quicker."""
        rung = wakeup()
        self._waiting.append(rung)
        try:
            await rung.wait()
        except BaseException:
            if rung.is_set():
                self._is_coming = False
                self.notify()  # somebody else must come instead
            else:
                self._waiting.remove(rung)
            raise
        self._is_coming = False


class _Contents(Generic[T]):
    """State that both ends of a channel share.

    The stream's own `receive` and `send` give every other task a turn first, even where there is nothing to wait for.
    Each turn gives up the interpreter's lock, and a forward that runs takes its time to give it back.
    """

    def __init__(self, name: str, capacity: int, size: Callable[[T], int]) -> None:
        self.name = name
        self.size = size
        self.messages = 0
        self.notifier = WorkerNotifier()
        self.room_freed: Callable[[], object] = lambda: None
        self.senders: deque[tuple[int, Wakeup]] = deque()
        """Senders that wait for room: how much each needs, and its wakeup."""
        self._capacity = capacity
        self._used = 0
        """Room that messages take, and that is kept for senders who have been told."""

    @property
    def waiting(self) -> int:
        return self.messages + len(self.senders)

    def take(self, size: int) -> bool:
        """Take room, if it is there and nobody waits for it."""
        if not self.has_room(size):
            return False
        self._used += size
        return True

    def has_room(self, size: int) -> bool:
        return not self.senders and self._has(size)

    async def wait_for(self, size: int) -> None:
        """Take room, after those who came before."""
        told = wakeup()
        sender = size, told
        self.senders.append(sender)
        try:
            await told.wait()
        except BaseException:
            if told.is_set():
                self.give_back(size)
            else:
                self.senders.remove(sender)
                self.give_back(0)  # those behind it may need less
            raise

    def give_back(self, size: int) -> None:
        """Give room back, and to whom it is enough for."""
        self._used -= size
        while self.senders and self._has(self.senders[0][0]):
            self._tell_first()

    def has_left(self, message: T) -> None:
        """Somebody has taken it out."""
        self.messages -= 1
        self.give_back(self.size(message))
        self.room_freed()

    def give_up(self) -> None:
        """Nobody receives any more: those who wait for room are to find that out."""
        while self.senders:
            self._tell_first()

    def _tell_first(self) -> None:
        size, told = self.senders.popleft()
        self._used += size
        told.set()

    def _has(self, size: int) -> bool:
        return not self._used or self._used + size <= self._capacity


class Sender(Generic[T]):
    """A sending end, owned by a stage before (or, for the first channel, by the engine's door)."""

    def __init__(self, stream: MemoryObjectSendStream[T], contents: _Contents[T]) -> None:
        self._stream = stream
        self._contents = contents

    @property
    def name(self) -> str:
        """Name of the stage behind the channel."""
        return self._contents.name

    async def send(self, message: T) -> None:
        """Hand a message over, waiting for room behind those who came before.

        Raises:
            anyio.BrokenResourceError: The receiving stage is gone.
            anyio.ClosedResourceError: This end is closed.
        """
        size = self._contents.size(message)
        if not self._contents.take(size):
            await self._contents.wait_for(size)
        self._put(message, size)

    def send_nowait(self, message: T) -> bool:
        """Hand a message over if there is room, and nobody waits for it. False: it stays with the sender.

        Raises:
            anyio.BrokenResourceError, anyio.ClosedResourceError: As for `send`.
        """
        size = self._contents.size(message)
        if not self._contents.take(size):
            return False
        self._put(message, size)
        return True

    def _put(self, message: T, size: int) -> None:
        contents = self._contents
        try:
            self._stream.send_nowait(message)
        except BaseException:
            contents.give_back(size)
            raise
        contents.messages += 1
        contents.notifier.notify()

    def has_room(self, message: T) -> bool:
        """There is room for a message, and nobody waits for it."""
        return self._contents.has_room(self._contents.size(message))

    def on_room(self, call: Callable[[], object]) -> None:
        """Have a function called whenever a message has left the channel. There is one at most."""
        self._contents.room_freed = call

    def clone(self) -> Sender[T]:
        """One more sending end of the same channel, for another owner, who must close it too."""
        return Sender(self._stream.clone(), self._contents)

    def close(self) -> None:
        """Say that nothing more will come: once all ends have, the stage behind finishes what is in the channel."""
        self._stream.close()
        self._contents.notifier.notify_all()  # it may have been the last one


class Receiver(Generic[T]):
    """The receiving end, owned by the stage behind and shared by its workers, who iterate over it.

    Cancellation by an anyio scope loses nothing. Native asyncio cancellation may lose a message that is on its way,
    which is why stage workers live in the engine's own task group and nowhere else.
    """

    def __init__(self, stream: MemoryObjectReceiveStream[T], contents: _Contents[T]) -> None:
        self._stream = stream
        self._contents = contents
        self._in_a_row = 0

    def __aiter__(self) -> Receiver[T]:
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
                await self._contents.notifier.wait()
            except anyio.EndOfStream:
                raise StopAsyncIteration from None
            else:
                self._in_a_row += 1
                contents = self._contents
                contents.has_left(message)
                if contents.messages:
                    contents.notifier.notify()
                return message

    def receive_waiting(self) -> T | None:
        """The next message if one waits; None otherwise."""
        try:
            message = self._stream.receive_nowait()
        except (anyio.WouldBlock, anyio.EndOfStream):
            return None
        self._contents.has_left(message)
        return message

    @property
    def waiting(self) -> int:
        """Messages that no worker has taken yet, those of senders that wait for room included."""
        return self._contents.waiting

    def close(self) -> list[T]:
        """Close this end and return what was still in the channel: closing alone would drop it unseen."""
        left: list[T] = []
        self._contents.room_freed = lambda: None
        while (message := self.receive_waiting()) is not None:
            left.append(message)
        self._stream.close()
        self._contents.give_up()
        self._contents.notifier.notify_all()
        return left


class Channel(Generic[T]):
    """Both ends of a channel; a send waits while there is no room for its message.

    Choose a small capacity. Every message that waits here is latency promised to nobody; a larger one smooths
    nothing that the fair queue in front of the device does not smooth better.

    Args:
        name: Of the stage behind it.
        capacity: Of all messages together, 1 or more; one that has more waits until it is alone.
        size: Of a message, 1 or more. By default each counts as one.
    """

    def __init__(self, name: str, capacity: int, size: Callable[[T], int] = lambda _: 1) -> None:
        self.name = name
        send, receive = anyio.create_memory_object_stream[T](capacity)
        self._contents = contents = _Contents[T](name, capacity, size)
        self.outlet = Sender(send, contents)
        self.inlet = Receiver(receive, contents)

    @property
    def waiting(self) -> int:
        """See `Receiver.waiting`."""
        return self._contents.waiting
