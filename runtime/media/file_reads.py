"""Reads of files, each in a thread that can be abandoned.

A network disk whose server is gone does not answer, and nothing can end a thread that waits for it. Only the wait for
the thread can end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import anyio

from staged_pool.runtime.threads.worker import loop_poster
from staged_pool.stages.errors import MediaTimedOut, MediaUnavailable
from staged_pool.stages.log import get_logger
from staged_pool.stages.user_code import as_exception

T = TypeVar("T")

log = get_logger("staged_pool.engine")


class FileReads:
    """Runs blocking calls in threads, up to a limit.

    A call that never ends occupies a slot, but blocks neither its caller nor the end of the process.

    Args:
        limit: Most calls at once, abandoned ones included.
        timeout_s: Seconds that a caller waits for a slot, and again for the call.
    """

    def __init__(self, limit: int, timeout_s: float) -> None:
        self._limit = limit
        self._timeout_s = timeout_s
        self._slots = anyio.CapacityLimiter(limit)
        self._running: set[_Call] = set()
        self._alarmed = 0

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function in a thread, and return its result or raise its error.

        Cancellation abandons the call at once. It keeps its slot until it ends.

        Raises:
            MediaTimedOut: The call, or the wait for a slot, took too long.
            MediaUnavailable: Overdue calls occupy all slots.
        """
        if self._overdue() == self._limit:
            raise MediaUnavailable("The disk of the image does not answer.")
        call = _Call(function, self._has_ended)
        with anyio.move_on_after(self._timeout_s):
            await self._slots.acquire_on_behalf_of(call)
            self._start(call)
        if call in self._running:
            with anyio.move_on_after(self._timeout_s):
                await call.done.wait()
        if not call.done.is_set():
            self._overdue()
            raise MediaTimedOut(f"The image could not be read within {self._timeout_s:g} s.")
        if call.error is None:
            value: T = call.value
            return value
        try:
            raise as_exception(call.error)
        finally:
            del call  # breaks a cycle: the error's traceback holds this frame, and the call holds the error

    def _start(self, call: _Call) -> None:
        call.overdue_at = anyio.current_time() + self._timeout_s
        self._running.add(call)
        try:
            # A daemon thread: the interpreter does not wait for it at exit.
            threading.Thread(target=call.run, name="staged-pool file", daemon=True).start()
        except RuntimeError:  # the system has no more threads
            self._has_ended(call)
            raise

    def _has_ended(self, call: _Call) -> None:
        """Free the slot of a call. The thread posts this to the event loop."""
        call.done.set()
        self._running.remove(call)
        self._slots.release_on_behalf_of(call)

    def _overdue(self) -> int:
        """Count the overdue calls, and log if there are more than before."""
        now = anyio.current_time()
        overdue = sum(call.overdue_at <= now for call in self._running)
        if overdue > self._alarmed:
            log.error("media.files_overdue", reads=overdue, limit=self._limit)
        self._alarmed = overdue
        return overdue


class _Call:
    """One call, with its result or error."""

    def __init__(self, function: Callable[[], object], ended: Callable[[_Call], object]) -> None:
        self._function = function
        self._ended = ended
        self._post = loop_poster()
        self.done = anyio.Event()
        self.overdue_at = 0.0
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:  # noqa: BLE001  # re-raised in the task that waits
            self.error = error
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so nobody waits
            self._post(self._ended, self)
        del self  # breaks a cycle: the error's traceback holds this frame, and the call holds the error
