"""A worker thread, and the jobs that it runs for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeAlias, TypeVar

import sniffio

from staged_pool.stages.wakeup import wakeup

A = TypeVar("A")
T = TypeVar("T")

IDLE_AFTER_S: Final = 0.05
"""Seconds without a job after which a thread calls `on_idle`."""

_own = threading.local()
"""`number`: the number of this thread in its `DedicatedThreads`."""

Core: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]
"""Makes a block in which a thread computes; see `CoreLimiter`."""


class Job(Generic[A, T]):
    """One call on its way to a thread and back.

    Args:
        function: Runs in the thread.
        argument: Its argument.
        post: Calls a function in the event loop that waits; see `loop_poster`.
    """

    def __init__(self, function: Callable[[A], T], argument: A, post: Callable[..., object]) -> None:
        self._function = function
        self._argument = argument
        self.post = post
        self.done = wakeup()
        self.worker: Worker | None = None
        """The thread that has begun with it."""
        self.watched_s = 0.0
        """Seconds of its run in which somebody has watched its limit."""
        self.value: T
        self.error: BaseException | None = None

    def run(self, worker: Worker) -> None:
        """Run the call in the thread of a worker, and keep its value or error."""
        self.worker = worker
        try:
            self.value = self._function(self._argument)
        except BaseException as error:  # noqa: BLE001  # raised in the task that waits
            self.error = error
        finally:
            del self  # break the cycle of the job, its error, the traceback and this frame


def loop_poster() -> Callable[..., object]:
    """Return a function by which other threads call into this event loop, without waiting.

    `anyio.from_thread` always waits. On a loop that has just ended, that would hang a thread for ever.
    """
    if sniffio.current_async_library() == "trio":
        import trio  # only if the host runs it

        return trio.lowlevel.current_trio_token().run_sync_soon
    return asyncio.get_running_loop().call_soon_threadsafe


def is_first() -> bool:
    """Return True on the first thread of `DedicatedThreads`, and on any other kind of thread."""
    return getattr(_own, "number", 0) == 0


class Worker:
    """One thread, which runs one job at a time.

    Args:
        name: Name of the threads.
        number: Number of this one among them.
        nice: See `DedicatedThreads`.
        on_idle: See `DedicatedThreads`.
        waiting: Jobs that wait for any thread.
        ended: Called on the event loop after each job. Its second argument is True if this thread goes on with another.
        core: See `DedicatedThreads.core`.
    """

    def __init__(
        self,
        name: str,
        number: int,
        *,
        nice: int,
        on_idle: Callable[[], object] | None,
        waiting: deque[Job[object, object]],
        ended: Callable[[Job[object, object], bool], object],
        core: Core,
    ) -> None:
        self.number = number
        self._given: SimpleQueue[Job[object, object] | None] = SimpleQueue()
        self._nice = nice
        self._on_idle = on_idle
        self._waiting = waiting
        self._ended = ended
        self._core = core
        self._thread = threading.Thread(target=self._serve, name=f"{name} {number}", daemon=True)
        self.stuck = False
        """Its job does not end, and it is left behind."""
        self.is_leaving = False
        """It takes no job that waits: it ends with its running job."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True until the thread has ended."""
        return self._thread.is_alive()

    def put(self, job: Job[object, object]) -> None:
        """Give a job to the idle thread."""
        self._given.put(job)

    def finish(self) -> None:
        """Ask the thread to end when it is idle."""
        self._given.put(None)

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _serve(self) -> None:
        _own.number = self.number
        _show_name(self._thread.name)
        if self._nice:
            _add_niceness(self._nice)
        while (job := self._next()) is not None:
            while job is not None:
                with self._core():
                    job.run(self)
                following = None if self.is_leaving else take_first(self._waiting)
                with contextlib.suppress(RuntimeError):  # the event loop has ended, and nobody waits
                    job.post(self._ended, job, following is not None)
                job = following  # an idle thread must not keep the last batch alive

    def _next(self) -> Job[object, object] | None:
        """Wait for a job. None: the thread must end."""
        if self._on_idle is not None:
            try:
                return self._given.get(timeout=IDLE_AFTER_S)
            except Empty:
                self._on_idle()
        return self._given.get()


def take_first(waiting: deque[Job[A, T]]) -> Job[A, T] | None:
    """Take the first waiting job, if there is one. Safe against other threads."""
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _show_name(name: str) -> None:
    """Set the name that the system's tools show for this thread.

    Threads that torch starts from it inherit the name. Linux has room for 15 bytes.
    """
    with contextlib.suppress(OSError):  # another system, or a sandbox without /proc
        Path("/proc/thread-self/comm").write_text(name.removeprefix("staged-pool ")[:15])


def _add_niceness(nice: int) -> None:
    """Raise the niceness of this thread. Only on Linux: elsewhere it would be that of the process."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox forbids it
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)
