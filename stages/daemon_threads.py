"""Daemon threads for calls that may be left behind: no program waits for them at its end.

On asyncio, those of anyio are none. The interpreter waits for each of them, and for one that hangs it waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import sniffio

from staged_pool.stages.wakeup import wakeup

try:  # private: the only way in which `anyio.from_thread` works in a thread that anyio has not made
    from anyio._core._eventloop import claim_worker_thread, get_async_backend, threadlocals

    _can_claim = True
except ImportError:  # another version: its own threads do, and a program waits for those that hang
    _can_claim = False

NAME: Final = "staged-pool call"
"""Name of the threads."""

IDLE_S: Final = 10.0
"""Seconds after which an idle thread ends."""


async def call_in_daemon(function: Callable[[], object]) -> None:
    """Call a function in a thread, in a copy of the task's context. A cancellation leaves the thread at once.

    Args:
        function: Must not raise. It may use `anyio.from_thread`.
    """
    if not _can_claim or sniffio.current_async_library() == "trio":  # whose own threads are daemons
        await anyio.to_thread.run_sync(function, limiter=anyio.CapacityLimiter(1), abandon_on_cancel=True)
        return
    await anyio.lowlevel.checkpoint_if_cancelled()
    with anyio.CancelScope() as scope:
        call = _Call(function, scope)
        _idle_thread().put(call)
        await call.done.wait()


class _Call:
    """One call on its way to a thread and back, on asyncio."""

    __slots__ = ("_context", "_function", "_loop", "_scope", "done")

    def __init__(self, function: Callable[[], object], scope: anyio.CancelScope) -> None:
        self._function = function
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._context.run(sniffio.current_async_library_cvar.set, None)
        self.done = wakeup()

    def run(self) -> None:
        """Call the function, in the thread."""
        with claim_worker_thread(get_async_backend("asyncio"), self._loop):
            threadlocals.current_cancel_scope = self._scope  # for `anyio.from_thread.check_cancelled`
            try:
                self._context.run(self._function)
            finally:
                del threadlocals.current_cancel_scope

    def post(self) -> None:
        """Wake the task that waits."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self.done.set)


class _Thread:
    """One thread, which makes calls of any event loop until it is idle for long."""

    def __init__(self) -> None:
        self._given: SimpleQueue[_Call] = SimpleQueue()
        threading.Thread(target=self._serve, name=NAME, daemon=True).start()

    def put(self, call: _Call) -> None:
        """Give a call to the thread, which is new or was idle."""
        self._given.put(call)

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            try:
                call.run()
            except BaseException:  # a bug of ours, which ends the thread
                call.post()
                raise
            _idle.append(self)  # before the task wakes, whose next call finds it
            call.post()
            del call  # an idle thread keeps nothing alive

    def _next(self) -> _Call | None:
        """Wait for a call. None: the thread was idle for long."""
        while True:
            try:
                return self._given.get(timeout=IDLE_S)
            except Empty:
                with contextlib.suppress(ValueError):  # it has just been taken for a call
                    _idle.remove(self)
                    return None


_idle: Final[list[_Thread]] = []
"""Idle threads, the latest last, so that those that are not needed end. A list is safe against other threads."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)


def _idle_thread() -> _Thread:
    try:
        return _idle.pop()
    except IndexError:
        return _Thread()
