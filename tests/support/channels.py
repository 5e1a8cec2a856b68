"""Channels that run a function of the test between two stages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import anyio

from staged_pool.stages.channel import Channel, Receiver, Sender
from staged_pool.stages.parse import Arrival


def acting_channels(act: Callable[[str], Awaitable[None]]) -> type[Channel[Any]]:
    """Channels between whose stages a test acts: for `StageOptions.channel`.

    Args:
        act: Awaited where a worker has taken a message (`take NAME`, of the stage) and where one is about to send one
            (`send NAME`, of the stage behind). An exception there crashes that worker while it holds the message.
    """

    class ActingSender(Sender[Any]):
        async def send(self, message: Any) -> None:
            await act(f"send {self.name}")
            await super().send(message)

        def clone(self) -> Sender[Any]:
            return ActingSender(self._stream.clone(), self._contents)

    class ActingReceiver(Receiver[Any]):
        async def __anext__(self) -> Any:
            message = await super().__anext__()
            try:
                with anyio.CancelScope(shield=True):  # or a cancellation would lose the message
                    await act(f"take {self._contents.name}")
            except Exception as error:  # noqa: BLE001  # it is raised again, in the worker
                return _TrappedArrival(message, error) if isinstance(message, Arrival) else _TrappedList(message, error)
            return message

    class ActingChannel(Channel[Any]):
        def __init__(self, name: str, capacity: int, size: Callable[[Any], int] = lambda _: 1) -> None:
            super().__init__(name, capacity, size)
            self.sender = ActingSender(self.sender._stream, self._contents)
            self.receiver = ActingReceiver(self.receiver._stream, self._contents)

    return ActingChannel


class _TrappedList(list[Any]):
    """A message that crashes its worker once custody of it is taken."""

    def __init__(self, message: Sequence[Any], error: Exception) -> None:
        super().__init__(message)
        self._error = error
        self._looks = 0

    def __iter__(self) -> Iterator[Any]:
        self._looks += 1
        if self._looks > 1:
            raise self._error
        return super().__iter__()


class _TrappedArrival:
    """As `_TrappedList`, for parse."""

    def __init__(self, message: Arrival, error: Exception) -> None:
        self.ticket = message.ticket
        self._error = error

    @property
    def sent_at(self) -> float:
        raise self._error
