"""Calls that read files, each in a thread that can be left behind.

A disk in a network whose server is gone answers nobody, and nothing can end a thread that waits for it: only the wait
for that thread can end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import anyio

from staged_pool.runtime.threads.workers import loop_poster
from staged_pool.stages.errors import MediaTimedOut, MediaUnavailable
from staged_pool.stages.log import get_logger
from staged_pool.stages.offload import as_exception

T = TypeVar("T")

log = get_logger("staged_pool.engine")


class FileReads:
    """Runs calls, so many at once. One that never ends keeps its place, and neither its caller nor the process.

    Args:
        limit: Calls at once, those included that nobody waits for any more.
        patience_s: How long a caller waits for a place, and as long for the call.
    """

    def __init__(self, limit: int, patience_s: float) -> None:
        self._limit = limit
        self._patience_s = patience_s
        self._places = anyio.CapacityLimiter(limit)
        self._running: set[_Call] = set()
        self._alarmed = 0

    async def run(self, function: Callable[[], T]) -> T:
        """What a call gives or raises.

        Cancelled, the call is left behind at once: it goes on, and keeps its place until it ends.

        Raises:
            MediaTimedOut: It took too long, or those before it.
            MediaUnavailable: Every place is held by a call that takes too long.
        """
        if self._overdue() == self._limit:
            raise MediaUnavailable("The disk of the image does not answer.")
        call = _Call(function, self._has_ended)
        with anyio.move_on_after(self._patience_s):
            await self._places.acquire_on_behalf_of(call)
            self._start(call)
        if call in self._running:
            with anyio.move_on_after(self._patience_s):
                await call.done.wait()
        if not call.done.is_set():
            self._overdue()
            raise MediaTimedOut(f"The image could not be read within {self._patience_s:g} s.")
        if call.error is None:
            value: T = call.value
            return value
        try:
            raise as_exception(call.error)
        finally:
            del call  # this frame is in the error's traceback now, and the call has the error

    def _start(self, call: _Call) -> None:
        call.overdue_at = anyio.current_time() + self._patience_s
        self._running.add(call)
        try:
            # A daemon: the interpreter waits for all others before it ends.
            threading.Thread(target=call.run, name="staged-pool file", daemon=True).start()
        except RuntimeError:  # no more threads are to be had
            self._has_ended(call)
            raise

    def _has_ended(self, call: _Call) -> None:
        """What a thread has the event loop call."""
        call.done.set()
        self._running.remove(call)
        self._places.release_on_behalf_of(call)

    def _overdue(self) -> int:
        """Calls that take too long; raises the alarm where they have become more."""
        now = anyio.current_time()
        overdue = sum(call.overdue_at <= now for call in self._running)
        if overdue > self._alarmed:
            log.error("media.files_overdue", reads=overdue, limit=self._limit)
        self._alarmed = overdue
        return overdue


class _Call:
    """One call on its way to a thread and back."""

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
        except BaseException as error:  # noqa: BLE001  # carried to the task that waits
            self.error = error
        with contextlib.suppress(RuntimeError):  # the event loop is gone, and with it everyone who could wait
            self._post(self._ended, self)
        del self  # the frames in the error's traceback have this one behind them, and the call has the error
