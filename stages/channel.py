"""The bounded channel between two stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream

from staged_pool.stages.wakeup import Wakeup, wakeup

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


ENDED: Final = (anyio.BrokenResourceError, anyio.ClosedResourceError)
"""Errors of a send that nobody will receive: the receiving stage is gone, or this end is closed."""

IN_A_ROW: Final = 8
"""Messages taken from one channel in a row before every other task runs."""


class WorkerNotifier:
    """Wakes workers that wait for work, one at a time.

    While a woken worker is on its way, no other is woken. A worker that takes work and leaves some must notify again.
    So the messages of one iteration of the event loop wake as many workers as they need, and not one each.
    """

    __slots__ = ("_is_coming", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[Wakeup] = deque()
        self._is_coming = False

    def notify(self) -> None:
        """Wake a worker, unless one is on its way."""
        if self._waiting and not self._is_coming:
            self._is_coming = True
            self._waiting.popleft().set()

    def notify_all(self) -> None:
        """Wake all workers."""
        for worker in self._waiting:
            worker.set()
        self._waiting.clear()

    async def wait(self) -> None:
        """Wait until there may be work; another worker may have taken it by then."""
        woken = wakeup()
        self._waiting.append(woken)
        try:
            await woken.wait()
        except BaseException:
            if woken.is_set():
                self._is_coming = False
                self.notify()  # another worker must come instead
            else:
                self._waiting.remove(woken)
            raise
        self._is_coming = False


class Contents(Generic[T]):
    """State that both ends of a channel share.

    The stream's own `receive` and `send` are not used: they let every other task run even where there is nothing to
    wait for. Each iteration of the event loop may release the interpreter's lock, and a forward is slow to give it
    back.
    """

    def __init__(self, name: str, capacity: int, size: Callable[[T], int]) -> None:
        self.name = name
        self.size = size
        self.messages = 0
        self.notifier = WorkerNotifier()
        self.room_freed: Callable[[], object] = lambda: None
        self.senders: deque[tuple[int, Wakeup]] = deque()
        """Senders that wait for room: the size that each needs, and its wakeup."""
        self._capacity = capacity
        self._used = 0
        """Room taken by messages, and reserved for senders that were woken."""

    @property
    def waiting(self) -> int:
        return self.messages + len(self.senders)

    @property
    def fullness(self) -> float:
        """Used part of the capacity, at most 1."""
        return min(1.0, self._used / self._capacity)

    def take(self, size: int) -> bool:
        """Reserve room if there is enough and nobody waits for it."""
        if not self.has_room(size):
            return False
        self._used += size
        return True

    def has_room(self, size: int) -> bool:
        return not self.senders and self._has(size)

    async def wait_for(self, size: int) -> None:
        """Wait for room behind earlier senders, and reserve it."""
        woken = wakeup()
        sender = size, woken
        self.senders.append(sender)
        try:
            await woken.wait()
        except BaseException:
            if woken.is_set():
                self.give_back(size)
            else:
                self.senders.remove(sender)
                self.give_back(0)  # senders behind it may need less
            raise

    def give_back(self, size: int) -> None:
        """Release room, and wake the senders that it is enough for."""
        self._used -= size
        while self.senders and self._has(self.senders[0][0]):
            self._tell_first()

    def has_left(self, message: T) -> None:
        """Count a message that a worker has taken out."""
        self.left(self.size(message))

    def left(self, size: int) -> None:
        """Count a message of a size that has left."""
        self.messages -= 1
        self.give_back(size)
        self.room_freed()

    def give_up(self) -> None:
        """Wake all senders that wait for room: nobody receives any more."""
        while self.senders:
            self._tell_first()

    def _tell_first(self) -> None:
        size, woken = self.senders.popleft()
        self._used += size
        woken.set()

    def _has(self, size: int) -> bool:
        return not self._used or self._used + size <= self._capacity


class SendStream(Protocol[T_contra]):
    """The way of a message to the receiver, such as `MemoryObjectSendStream`. It needs no bound of its own."""

    def send_nowait(self, item: T_contra) -> None: ...

    def clone(self) -> SendStream[T_contra]: ...

    def close(self) -> None: ...


class Sender(Generic[T]):
    """A sending end of a channel, owned by the earlier stage or by the engine."""

    def __init__(self, stream: SendStream[T], contents: Contents[T]) -> None:
        self._stream = stream
        self._contents = contents

    @property
    def name(self) -> str:
        """Name of the stage behind the channel."""
        return self._contents.name

    async def send(self, message: T) -> None:
        """Send a message, waiting for room behind earlier senders.

        Raises:
            anyio.BrokenResourceError: The receiving stage is gone.
            anyio.ClosedResourceError: This end is closed.
        """
        size = self._contents.size(message)
        if not self._contents.take(size):
            await self._contents.wait_for(size)
        self._put(message, size)

    def send_nowait(self, message: T) -> bool:
        """Send a message if there is room and nobody waits for it. Returns False if there is not.

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
        """Return True if there is room for a message and nobody waits for it."""
        return self._contents.has_room(self._contents.size(message))

    def on_room(self, call: Callable[[], object]) -> None:
        """Call a function whenever a message has left the channel. A channel has one such function."""
        self._contents.room_freed = call

    def clone(self) -> Sender[T]:
        """Return another sending end of the same channel, to be closed by its own owner."""
        return Sender(self._stream.clone(), self._contents)

    def close(self) -> None:
        """Close this end. When all sending ends are closed, the receiver gets the rest, then the end."""
        self._stream.close()
        self._contents.notifier.notify_all()  # this may have been the last open end


class Receiver(Generic[T]):
    """The receiving end of a channel: the workers of one stage iterate over it.

    Cancellation by an anyio scope loses nothing. Native asyncio cancellation may lose a message that is on its way, so
    stage workers run in the engine's own task group only.
    """

    def __init__(self, stream: MemoryObjectReceiveStream[T], contents: Contents[T]) -> None:
        self._stream = stream
        self._contents = contents
        self._in_a_row = 0

    def __aiter__(self) -> Receiver[T]:
        return self

    async def __anext__(self) -> T:
        """Wait for the next message. The iteration ends when all senders are closed and the channel is empty."""
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
        """Return the next message if one waits, else None."""
        try:
            message = self._stream.receive_nowait()
        except (anyio.WouldBlock, anyio.EndOfStream):
            return None
        self._contents.has_left(message)
        return message

    @property
    def waiting(self) -> int:
        """Messages that no worker has taken yet, and senders that wait for room."""
        return self._contents.waiting

    def close(self) -> list[T]:
        """Close this end and return the messages that were still in the channel."""
        left: list[T] = []
        self._contents.room_freed = lambda: None
        while (message := self.receive_waiting()) is not None:
            left.append(message)
        self._stream.close()
        self._contents.give_up()
        self._contents.notifier.notify_all()
        return left


class Channel(Generic[T]):
    """A bounded channel: its sending and its receiving end.

    Choose a small capacity. A message that waits here only adds latency: bursts are better smoothed by the fair queue
    in front of the device.

    Args:
        name: Name of the receiving stage.
        capacity: Largest sum of message sizes, 1 or more. A larger message waits until the channel is empty.
        size: Returns the size of a message, 1 or more. By default each message counts as one.
    """

    def __init__(self, name: str, capacity: int, size: Callable[[T], int] = lambda _: 1) -> None:
        self.name = name
        send, receive = anyio.create_memory_object_stream[T](capacity)
        self._contents = contents = Contents[T](name, capacity, size)
        self.sender = Sender(send, contents)
        self.receiver = Receiver(receive, contents)

    @property
    def waiting(self) -> int:
        """See `Receiver.waiting`."""
        return self._contents.waiting

    @property
    def fullness(self) -> float:
        """Used part of the capacity, 0 to 1. Room that a woken sender has reserved counts as used."""
        return self._contents.fullness
