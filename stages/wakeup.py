"""Wakeups: events with a single waiter.

Each text waits for several of these on its way through the stages. `anyio.Event` takes several times as long to make
and to wait for: it wraps an event of the event loop, which has a queue for any number of waiters.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import sniffio


class Wakeup(Protocol):
    """An event that is set once. One event loop makes, sets and awaits it; one task waits at a time."""

    def set(self) -> None:
        """Set the event, and wake the waiter."""

    def is_set(self) -> bool: ...

    async def wait(self) -> object:
        """Wait until the event is set. After a cancellation it may be awaited again."""


def wakeup() -> Wakeup:
    """Make a wakeup for the running event loop."""
    if sniffio.current_async_library() == "trio":
        import trio  # only if the host runs it

        return trio.Event()
    return _Future()


class _Future:
    """A wakeup for asyncio: a future while a task waits."""

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
            await asyncio.sleep(0)  # like `anyio.Event`: a wait lets other tasks run
            return
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
