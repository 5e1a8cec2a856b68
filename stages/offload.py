"""How a stage runs something that would block the event loop: a seam, so that a simulator can take its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import anyio
import anyio.to_thread

A = TypeVar("A")
T = TypeVar("T")


class Offload(Protocol):
    """Runs a function of one argument elsewhere.

    Cancellation waits for the function's end: its thread works on, and returning earlier would give its limiter
    token to a second thread.
    """

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T: ...


class ThreadOffload:
    """Runs functions in worker threads, `limit` of them at once."""

    def __init__(self, limit: int) -> None:
        self.limiter = anyio.CapacityLimiter(limit)

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        return await anyio.to_thread.run_sync(function, argument, limiter=self.limiter)
