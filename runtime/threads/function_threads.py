"""Threads of plain functions, which their callers can leave."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import anyio
import anyio.to_thread

from staged_pool.runtime.threads.worker import loop_poster
from staged_pool.stages.user_code import as_exception

A = TypeVar("A")
T = TypeVar("T")


class FunctionThreads:
    """An `Offload` whose calls are left behind if they are cancelled: a function that hangs holds up no caller.

    A call that was left keeps its place until its thread has ended. So threads that hang are no more than `limit`. On
    asyncio the interpreter waits for them at its end, as for every thread of anyio's or of asyncio's own.

    Args:
        limit: Most calls at once, those that were left included.
        log_left: Called with the number of calls that were left, whenever there are more than before.
    """

    def __init__(self, limit: int, log_left: Callable[[int], object]) -> None:
        self.limit = limit
        self.left = 0
        """Calls that still run, though nobody waits for them any more."""
        self._logged = 0
        """Number of such calls that the log knows of."""
        self._places = anyio.CapacityLimiter(limit)
        self._threads = anyio.CapacityLimiter(math.inf)
        self._log_left = log_left

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        call = _Call(function, argument, self._end_left)
        await self._places.acquire_on_behalf_of(call)
        try:
            await anyio.to_thread.run_sync(call.run, limiter=self._threads, abandon_on_cancel=True)
        finally:
            if call.leave():
                self._count_left(1)
            else:
                self._places.release_on_behalf_of(call)
        if (error := call.taken_error()) is None:
            return call.value
        try:
            raise as_exception(error)
        finally:
            del call, argument, error  # the traceback of the error holds this frame

    def _end_left(self, call: _Call[Any, Any]) -> None:
        self._places.release_on_behalf_of(call)
        self._count_left(-1)

    def _count_left(self, more: int) -> None:
        """Count the calls that were left, and log if there are more than before."""
        self.left += more
        if self.left > self._logged:
            self._log_left(self.left)
        if self.left > self._logged or not self.left:
            self._logged = self.left


class _Call(Generic[A, T]):
    """One call in a thread, with its result or error."""

    def __init__(self, function: Callable[[A], T], argument: A, ended: Callable[[_Call[Any, Any]], object]) -> None:
        self._work: tuple[Callable[[A], T], A] | None = (function, argument)
        self._ended = ended
        self._post = loop_poster()
        self._lock = threading.Lock()  # guards the next two
        self._runs = False
        self._is_left = False
        self._error: BaseException | None = None
        self.value: T

    def run(self) -> None:
        """Run the function, in the thread. An error must not pass through the frames of the thread."""
        with self._lock:
            work, self._work = self._work, None
            if work is None:  # it was left before it began
                return
            self._runs = True
        try:
            self.value = work[0](work[1])
        except BaseException as error:  # noqa: BLE001  # raised again in the task that waits
            self._error = error
        with self._lock:
            self._runs = False
            is_left = self._is_left
        if is_left:
            self._error = None  # nobody raises it, and its traceback holds this frame
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._post(self._ended, self)

    def leave(self) -> bool:
        """Wait no more, in the event loop. True if the function runs on; if it has not begun, it never will."""
        with self._lock:
            self._is_left, self._work = True, None
            return self._runs

    def taken_error(self) -> BaseException | None:
        """Return the error of the function, and forget it: its traceback holds this call."""
        error, self._error = self._error, None
        return error
