"""Calls that would block the event loop, run elsewhere; a simulator can take the place of the threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import anyio
import anyio.lowlevel
import anyio.to_thread

from staged_pool.stages.errors import Abandoned

A = TypeVar("A")
T = TypeVar("T")


class Offload(Protocol):
    """Runs a function of one argument elsewhere.

    Cancellation waits for the function's end: its thread works on, and returning earlier would give its limiter token
    to a second thread.
    """

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T: ...


@runtime_checkable
class Abandonable(Protocol):
    """An `Offload` whose calls may be abandoned."""

    def abandon(self) -> None:
        """Let all who wait for a call go, with `Abandoned`, when a thread hangs and its host must end."""


class Panic(Exception):
    """A function in a thread raised what is no `Exception`: a panic of a library in Rust, or `SystemExit`."""


def as_exception(error: BaseException) -> BaseException:
    """Make an exception of whatever a thread raised, so that it ends the call alone and not the host.

    Call it in the task that waits for the thread. Cancellation stays what it is.
    """
    if isinstance(error, Exception | anyio.get_cancelled_exc_class()):
        return error
    panic = Panic(f"{type(error).__name__}: {error}")
    panic.__cause__ = error
    return panic


class ThreadOffload:
    """Runs functions in worker threads of anyio, `limit` of them at once."""

    def __init__(self, limit: int) -> None:
        self.limiter = anyio.CapacityLimiter(limit)
        self._unlimited = anyio.CapacityLimiter(math.inf)
        self._calls: set[anyio.CancelScope] = set()

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        outcome: list[tuple[T] | BaseException] = []
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                async with self.limiter:  # whoever waits for a thread may leave: nothing has begun
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
            del kept, argument  # this frame is in the error's traceback now

    def abandon(self) -> None:
        """See `Abandonable`."""
        for scope in self._calls:
            scope.cancel()


def _keep_outcome(function: Callable[[A], T], argument: A, outcome: list[tuple[T] | BaseException]) -> None:
    """Run a function without an error that passes through the frames of whoever lends the thread.

    They keep the error in a circle, and with it the frames of the function and a caller's data, until the garbage
    collector comes by.
    """
    try:
        outcome.append((function(argument),))
    except BaseException as error:  # noqa: BLE001  # it is raised in the task that waits
        outcome.append(error)
    finally:
        del argument, outcome
