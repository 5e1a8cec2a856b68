"""Threads of our own, for calls that must not share anyio's: a thread keeps what was done to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from operator import attrgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar, cast

import anyio
import anyio.to_thread
import sniffio

from staged_pool.stages.errors import Abandoned, DeviceLost, EngineStopped, StagedPoolError, detached
from staged_pool.stages.offload import as_exception
from staged_pool.stages.wakeup import wakeup

A = TypeVar("A")
T = TypeVar("T")

AT_REST_S: Final = 0.05
"""A thread that has waited for a call for so long rests."""

_own = threading.local()
"""`number`: of a thread of `DedicatedThreads`, among these."""

Core: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]
"""Makes a block that a thread is in while it computes: see `CoreLimiter`."""


class _Job(Generic[A, T]):
    """One call on its way to a thread and back."""

    def __init__(self, function: Callable[[A], T], argument: A, post: Callable[..., object]) -> None:
        self._function = function
        self._argument = argument
        self.post = post
        self.done = wakeup()
        self.worker: _Worker | None = None
        """That has begun with it."""
        self.began_at = 0.0
        """By `time.monotonic()`, once it has begun."""
        self.value: T
        self.error: BaseException | None = None

    def run(self, worker: _Worker) -> None:
        self.began_at = time.monotonic()
        self.worker = worker
        try:
            self.value = self._function(self._argument)
        except BaseException as error:  # noqa: BLE001  # carried to the task that waits
            self.error = error
        finally:
            del self  # the frames in the error's traceback have this one behind them, and the job has the error


def loop_poster() -> Callable[..., object]:
    """How another thread has this event loop call a function with arguments, without waiting for it.

    `anyio.from_thread` only offers to wait, which would hang a thread for ever on a loop that has just ended.
    """
    if sniffio.current_async_library() == "trio":
        import trio  # only where the host runs it

        return trio.lowlevel.current_trio_token().run_sync_soon
    return asyncio.get_running_loop().call_soon_threadsafe


def is_first() -> bool:
    """True on the thread that its `DedicatedThreads` give a call first, and on threads of others."""
    return getattr(_own, "number", 0) == 0


class _Worker:
    """One thread, and the call that it is given.

    Args:
        name: Of the threads.
        number: Of this one among them.
        nice: See `DedicatedThreads`.
        on_idle: See `DedicatedThreads`.
        waiting: Calls that wait for any thread.
        ended: Called on the event loop after each call, and told whether this thread has gone on with another one.
        core: See `DedicatedThreads.core`.
    """

    def __init__(
        self,
        name: str,
        number: int,
        *,
        nice: int,
        on_idle: Callable[[], object] | None,
        waiting: deque[_Job[object, object]],
        ended: Callable[[_Job[object, object], bool], object],
        core: Core,
    ) -> None:
        self.number = number
        self._given: SimpleQueue[_Job[object, object] | None] = SimpleQueue()
        self._nice = nice
        self._at_rest = on_idle
        self._waiting = waiting
        self._ended = ended
        self._core = core
        self._thread = threading.Thread(target=self._serve, name=f"{name} {number}", daemon=True)
        self.stuck = False
        """It is in a call that does not end, and is left behind."""
        self._thread.start()

    def put(self, job: _Job[object, object]) -> None:
        """Give it a call while it rests."""
        self._given.put(job)

    def finish(self) -> None:
        """End when it rests; `join` waits for that."""
        self._given.put(None)

    def join(self) -> None:
        self._thread.join()

    def _serve(self) -> None:
        _own.number = self.number
        _show_name(self._thread.name)
        if self._nice:
            _be_nice(self._nice)
        while (job := self._next()) is not None:
            while job is not None:
                with self._core():
                    job.run(self)
                following = _first(self._waiting)
                with contextlib.suppress(RuntimeError):  # the event loop is gone, and with it everyone who could wait
                    job.post(self._ended, job, following is not None)
                job = following  # an idle thread must not keep the last batch alive

    def _next(self) -> _Job[object, object] | None:
        """Wait for a call, or for the end."""
        if self._at_rest is not None:
            try:
                return self._given.get(timeout=AT_REST_S)
            except Empty:
                self._at_rest()
        return self._given.get()


def _first(waiting: deque[_Job[A, T]]) -> _Job[A, T] | None:
    """Take the first call that waits, if there is one. Threads race for it."""
    try:
        return waiting.popleft()
    except IndexError:
        return None


def _show_name(name: str) -> None:
    """Have the system's tools show this thread, and those that torch starts from it, by its name, as far as Linux has
    room for that: 15 bytes."""
    with contextlib.suppress(OSError):  # another system, or a sandbox without /proc
        Path("/proc/thread-self/comm").write_text(name.removeprefix("staged-pool ")[:15])


def _be_nice(nice: int) -> None:
    """Let other threads go first. Linux only: elsewhere it would be the whole process."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox forbids it: then as before
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)


class DedicatedThreads:
    """An `Offload` on threads that nobody else uses.

    As many as `grow` says. A call beyond their number waits for a thread, and can be cancelled as long as it waits. One
    that has begun is never interrupted: a cancellation is raised when it has ended. A thread that has done a call goes
    on with one that waits by itself: the event loop, which may be busy, is only told.

    Args:
        name: Of the threads, for debuggers and profilers.
        nice: How much further than the process they stand back when something else wants a core, on Linux: 0 to 19.
            A thread that is nice does not become less so without privileges, which is why anyio's threads, which all
            limiters share, cannot be.
        on_idle: What a thread does once, and does not fail at, whenever it rests.
    """

    def __init__(self, name: str, *, nice: int = 0, on_idle: Callable[[], object] | None = None) -> None:
        self._name = name
        self._nice = nice
        self._at_rest = on_idle
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._waiting: deque[_Job[Any, Any]] = deque()
        """Calls for which no thread was idle. The only thing here that the threads touch."""
        self._running: set[_Job[Any, Any]] = set()
        """Calls that have not ended, or that wait."""
        self._lost = self._ended = False
        self._post: Callable[..., object]
        """Of the event loop that runs it: see `loop_poster`."""
        self.core: Core = contextlib.nullcontext
        """What a thread holds while it is in a call; of the calls that begin from now on."""

    @contextlib.asynccontextmanager
    async def running(self, threads: int = 1) -> AsyncIterator[Self]:
        """Start so many threads, and stop all of them at the end of the block, after the calls that they may be in.

        A thread that is stuck is left behind: it cannot be ended, only its process can.
        """
        self._post = loop_poster()
        self.grow(threads)
        try:
            yield self
        finally:
            self._fail_waiting(EngineStopped("The threads of the engine have ended."))
            self._ended = True
            for worker in self._workers:
                worker.finish()
            with anyio.CancelScope(shield=True):
                for worker in self._workers:
                    if not worker.stuck:
                        await anyio.to_thread.run_sync(worker.join)

    def grow(self, threads: int) -> None:
        """Have so many threads; never fewer than before."""
        for number in range(len(self._workers), threads):
            worker = _Worker(
                self._name,
                number,
                nice=self._nice,
                on_idle=self._at_rest,
                waiting=self._waiting,
                ended=self._has_ended,
                core=self._hold,
            )
            self._workers.append(worker)
            self._rests(worker)

    def _hold(self) -> contextlib.AbstractContextManager[None]:
        return self.core()

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        return await self.run(function, argument)

    async def run(self, function: Callable[[A], T], argument: A, *, patience_s: float | None = None) -> T:
        """Run a function on a free thread, for as long as it takes where `patience_s` is None.

        Raises:
            DeviceLost: It took longer, or an earlier call did.
        """
        if self._lost:
            raise _lost()
        if self._ended:
            raise EngineStopped("The threads of the engine have ended.")
        job = _Job(function, argument, self._post)
        self._running.add(job)
        try:
            await self._have_run(job, patience_s)
        finally:
            self._running.discard(job)
        if job.error is None:
            return job.value
        try:
            raise as_exception(job.error)
        finally:
            del job  # this frame is in the error's traceback now, and the job has the error

    async def _have_run(self, job: _Job[A, T], patience_s: float | None) -> None:
        if self._idle:
            self._next_idle().put(cast("_Job[object, object]", job))
        else:
            self._waiting.append(job)
            try:
                await self._end_of(job, patience_s, shield=False)
            except anyio.get_cancelled_exc_class():
                with contextlib.suppress(ValueError):  # a thread has taken it
                    self._waiting.remove(job)
                    raise
                await self._end_of(job, patience_s)
                raise
        await self._end_of(job, patience_s)

    def abandon(self) -> None:
        """See `Abandonable`. No later call is taken."""
        self._ended = True
        self._fail_waiting(Abandoned("a call that does not end was abandoned with its thread"))
        for job in self._running:
            if job.worker is not None and not job.done.is_set():
                job.worker.stuck = True
                job.error = Abandoned("a call that does not end was abandoned with its thread")
                job.done.set()

    async def run_on_each(self, function: Callable[[A], object], argument: A) -> None:
        """Run a function on every thread, on all of them at once, for as long as it takes. Call it while all rest.

        Not interrupted: a cancellation is raised when it has ended everywhere. Raises what it raised, if it did.
        """
        jobs = [_Job(function, argument, self._post) for _ in self._idle]
        for job in jobs:
            self._idle.pop().put(cast("_Job[object, object]", job))
        for job in jobs:
            await self._end_of(job, None)
        error = next((job.error for job in jobs if job.error is not None), None)
        if error is None:
            return
        del jobs, job
        try:
            raise as_exception(error)
        finally:
            del error  # as in `run`

    async def _end_of(self, job: _Job[A, T], patience_s: float | None, *, shield: bool = True) -> None:
        """Wait for it. What a call waits for a thread is not held against it.

        Raises:
            DeviceLost: It has run for too long.
        """
        left_s = patience_s
        while not job.done.is_set():
            with anyio.move_on_after(left_s, shield=shield):
                await job.done.wait()
            if not job.done.is_set() and job.worker is not None and patience_s is not None:
                left_s = job.began_at + patience_s - time.monotonic()
                if left_s <= 0:
                    self._lose(job.worker)
                    raise DeviceLost(f"the device did not answer within {patience_s:g} s")

    def _has_ended(self, job: _Job[object, object], goes_on: bool) -> None:
        """What a thread has the event loop call."""
        job.done.set()
        if not goes_on and job.worker is not None:
            self._rests(job.worker)

    def _next_idle(self) -> _Worker:
        """The first of them, which so has most of what is alone: its caches are warm, and `is_first` says so."""
        worker = min(self._idle, key=attrgetter("number"))
        self._idle.remove(worker)
        return worker

    def _rests(self, worker: _Worker) -> None:
        """It has nothing to do: give it what has come since it looked."""
        if (job := _first(self._waiting)) is not None:
            worker.put(job)
        else:
            self._idle.append(worker)

    def _lose(self, worker: _Worker) -> None:
        self._lost = worker.stuck = True
        self._fail_waiting(_lost())

    def _fail_waiting(self, error: StagedPoolError) -> None:
        """Let those go who wait for a thread."""
        while (job := _first(self._waiting)) is not None:
            job.error = detached(error)
            job.done.set()


def _lost() -> DeviceLost:
    return DeviceLost("one of the device's threads is stuck")
