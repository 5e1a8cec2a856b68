"""Threads of our own, for calls that must not share anyio's: a thread keeps what was done to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from queue import SimpleQueue
from typing import Generic, Self, TypeVar, cast

import anyio
import anyio.lowlevel
import anyio.to_thread

from staged_pool.stages.errors import DeviceLost

A = TypeVar("A")
T = TypeVar("T")


class _Job(Generic[A, T]):
    """One call on its way to the thread and back."""

    def __init__(self, function: Callable[[A], T], argument: A) -> None:
        self._function = function
        self._argument = argument
        self._post = _poster()
        self.done = anyio.Event()
        self.value: T
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.value = self._function(self._argument)
        except BaseException as error:  # noqa: BLE001  # carried to the task that waits
            self.error = error
        with contextlib.suppress(RuntimeError):  # the event loop is gone, and with it everyone who could wait
            self._post(self.done.set)


def _poster() -> Callable[[Callable[[], object]], object]:
    """How another thread has this event loop call something, without waiting for it.

    `anyio.from_thread` only offers to wait, which would hang a thread for ever on a loop that has just ended.
    """
    native = anyio.lowlevel.current_token().native_token
    if isinstance(native, asyncio.AbstractEventLoop):
        return native.call_soon_threadsafe
    from trio.lowlevel import TrioToken  # only where the host runs trio

    return cast(TrioToken, native).run_sync_soon


class _Worker:
    """One thread, and the calls that wait for it."""

    def __init__(self, name: str, nice: int) -> None:
        self._jobs: SimpleQueue[_Job[object, object] | None] = SimpleQueue()
        self._nice = nice
        self._thread = threading.Thread(target=self._serve, name=name)
        self.stuck = False
        self._thread.start()

    def put(self, job: _Job[A, T]) -> None:
        self._jobs.put(job)  # type: ignore[arg-type]  # a queue of calls of any types

    def finish(self) -> None:
        """End after the calls that were put before; `join` waits for that."""
        self._jobs.put(None)

    def join(self) -> None:
        self._thread.join()

    def _serve(self) -> None:
        if self._nice:
            _be_nice(self._nice)
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # an idle thread must not keep the last batch alive


def _be_nice(nice: int) -> None:
    """Let other threads go first. Linux only: elsewhere it would be the whole process."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox forbids it: then as before
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)


class OwnThreads:
    """An `Offload` on threads that nobody else uses.

    As many as `grow` says. A call beyond their number waits for a thread, and can be cancelled as long as it waits. One
    that has begun is never interrupted: a cancellation is raised when it has ended.

    Args:
        name: Of the threads, for debuggers and profilers.
        nice: How much further than the process they stand back when something else wants a core, on Linux: 0 to 19.
            A thread that is nice does not become less so without privileges, which is why anyio's threads, which all
            limiters share, cannot be.
    """

    def __init__(self, name: str, *, nice: int = 0) -> None:
        self._name = name
        self._nice = nice
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        """The one used last is used next: its caches are warm."""
        self._free = anyio.Semaphore(0, fast_acquire=True)
        self._lost = False

    @contextlib.asynccontextmanager
    async def running(self, threads: int = 1) -> AsyncIterator[Self]:
        """Start so many threads, and stop all of them at the end of the block, after the calls that they may be in.

        A thread that is stuck is left behind: it cannot be ended, only its process can.
        """
        self.grow(threads)
        try:
            yield self
        finally:
            for worker in self._workers:
                worker.finish()
            with anyio.CancelScope(shield=True):
                for worker in self._workers:
                    if not worker.stuck:
                        await anyio.to_thread.run_sync(worker.join)

    def grow(self, threads: int) -> None:
        """Have so many threads; never fewer than before."""
        for number in range(len(self._workers), threads):
            worker = _Worker(f"{self._name} {number}", self._nice)
            self._workers.append(worker)
            self._idle.append(worker)
            self._free.release()

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        return await self.run(function, argument)

    async def run(self, function: Callable[[A], T], argument: A, *, patience_s: float | None = None) -> T:
        """Run a function on a free thread, for as long as it takes where `patience_s` is None.

        Raises:
            DeviceLost: It took longer, or an earlier call did.
        """
        await self._free.acquire()
        try:
            if self._lost:  # now or while this call waited
                raise DeviceLost("one of the device's threads is stuck")
            worker = self._idle.pop()
            try:
                return await self._run_on(worker, _Job(function, argument), patience_s)
            finally:
                self._idle.append(worker)
        finally:
            self._free.release()

    async def _run_on(self, worker: _Worker, job: _Job[A, T], patience_s: float | None) -> T:
        worker.put(job)
        with anyio.move_on_after(patience_s, shield=True):
            await job.done.wait()
        if not job.done.is_set():
            self._lost = worker.stuck = True
            raise DeviceLost(f"the device did not answer within {patience_s:g} s")
        if job.error is not None:
            raise job.error
        return job.value
