"""Offloads: run blocking calls outside the event loop, such as in threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import anyio
import anyio.lowlevel
import anyio.to_thread

from staged_pool.stages.errors import Abandoned
from staged_pool.stages.user_code import as_exception

A = TypeVar("A")
T = TypeVar("T")


class Offload(Protocol):
    """Runs a function of one argument outside the event loop. The simulator has one without threads.

    If cancelled, it waits for the end of a running function: the thread works on, and an earlier return would give its
    limiter token to a second thread.
    """

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T: ...


@runtime_checkable
class Abandonable(Protocol):
    """An `Offload` whose calls may be abandoned."""

    def abandon(self) -> None:
        """Fail all running calls with `Abandoned`: a thread hangs, and the engine must stop."""


class ThreadOffload:
    """Runs functions in anyio's worker threads, `limit` of them at once."""

    def __init__(self, limit: int) -> None:
        self.limiter = anyio.CapacityLimiter(limit)
        self._unlimited = anyio.CapacityLimiter(math.inf)
        self._calls: set[anyio.CancelScope] = set()

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        outcome: list[tuple[T] | BaseException] = []
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                async with self.limiter:  # cancellable: nothing has begun yet
                    scope.shield = True
                    await anyio.to_thread.run_sync(
                        _keep_outcome, function, argument, outcome, limiter=self._unlimited, abandon_on_cancel=True
                    )
            finally:
                self._calls.discard(scope)
        if scope.cancelled_caught:
            raise Abandoned("a call that does not end was abandoned with its thread")
        await anyio.lowlevel.checkpoint_if_cancelled()
        kept = outcome.pop()
        if isinstance(kept, tuple):
            return kept[0]
        try:
            raise as_exception(kept)
        finally:
            del kept, argument  # the traceback of the error now holds this frame

    def part(self) -> ThreadOffload:
        """Return an offload under the same limit, whose calls are abandoned by themselves."""
        part = ThreadOffload(1)
        part.limiter = self.limiter
        return part

    def abandon(self) -> None:
        """See `Abandonable`."""
        for scope in self._calls:
            scope.cancel()


def _keep_outcome(function: Callable[[A], T], argument: A, outcome: list[tuple[T] | BaseException]) -> None:
    """Run a function, and keep its result or error in `outcome`.

    An error must not pass through the frames of anyio's thread: they would form a cycle with it, which keeps the
    caller's data alive until the garbage collector runs.
    """
    try:
        outcome.append((function(argument),))
    except BaseException as error:  # noqa: BLE001  # raised again in the task that waits
        outcome.append(error)
    finally:
        del argument, outcome
