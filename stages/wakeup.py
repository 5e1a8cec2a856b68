"""What one task waits for, and another sets: an event with a single waiter.

Each text that goes through the stages waits for several of these, and `anyio.Event` takes several times as long to be
made and waited for: there it is an object around an event of the loop's, which has a queue for any number of waiters.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import sniffio


class Wakeup(Protocol):
    """Set once, and for ever. Made, set and waited for on one event loop, by one task at a time."""

    def set(self) -> None:
        """Wake the waiter, now or when it comes."""

    def is_set(self) -> bool: ...

    async def wait(self) -> object:
        """Wait until it is set. Cancelled, it may be waited for again."""


def wakeup() -> Wakeup:
    """One for the loop that runs."""
    if sniffio.current_async_library() == "trio":
        import trio  # only where the host runs it

        return trio.Event()
    return _Future()


class _Future:
    """On asyncio: a future, while somebody waits."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def is_set(self) -> bool:
        return self._is_set

    async def wait(self) -> None:
        if self._is_set:
            await asyncio.sleep(0)  # as anyio's does: whoever waits gives others a turn
            return
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
