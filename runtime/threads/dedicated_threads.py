"""Dedicated threads: an offload on threads that nobody else uses."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from operator import attrgetter
from typing import Any, Final, Self, TypeVar, cast

import anyio
import anyio.to_thread

from staged_pool.runtime.threads.worker import Core, Job, Worker, loop_poster, take_first
from staged_pool.stages.errors import Abandoned, DeviceLost, EngineStopped, StagedPoolError, detached
from staged_pool.stages.user_code import as_exception

A = TypeVar("A")
T = TypeVar("T")

WATCH_S: Final = 1.0
"""Most seconds between two looks at a job with a limit."""

WATCHES: Final = 8
"""Fewest looks at a job before its limit is over."""


class DedicatedThreads:
    """An `Offload` on threads of its own.

    A thread keeps its changed settings, such as its niceness, so these are not anyio's. A call waits for a thread if
    none is free, and can be cancelled while it waits. A call that has begun is not interrupted: a cancellation is
    raised when it has ended. A thread goes on by itself with the next call that waits, without an iteration
    of the event loop, which may be busy.

    Args:
        name: Name of the threads, for debuggers and profilers.
        nice: Niceness of the threads above that of the process, 0 to 19. Linux only. Lowering it again takes
            privileges, so anyio's threads, which all limiters share, cannot be nice.
        on_idle: Called once in a thread each time that it gets idle. Must not raise.
    """

    def __init__(self, name: str, *, nice: int = 0, on_idle: Callable[[], object] | None = None) -> None:
        self._name = name
        self._nice = nice
        self._on_idle = on_idle
        self._workers: list[Worker] = []
        self._leaving: list[Worker] = []
        """Threads that end with their running calls; see `shrink`."""
        self._idle: list[Worker] = []
        self._waiting: deque[Job[Any, Any]] = deque()
        """Jobs that found no idle thread. The only attribute that the threads use."""
        self._running: set[Job[Any, Any]] = set()
        """Jobs that run or wait."""
        self._lost = self._ended = False
        self._post: Callable[..., object]
        """Calls a function in the event loop; see `loop_poster`."""
        self.core: Core = contextlib.nullcontext
        """Makes the block in which a thread runs each call, from now on."""

    @contextlib.asynccontextmanager
    async def running(self, threads: int = 1) -> AsyncIterator[Self]:
        """Start threads, and stop them at the end of the block, after their calls.

        A thread that is stuck is left behind: only the end of the process ends it.
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
                for worker in (*self._workers, *self._leaving):
                    if not worker.stuck:
                        await anyio.to_thread.run_sync(worker.join)

    def grow(self, threads: int) -> None:
        """Grow to this number of threads; see `shrink`."""
        for number in range(len(self._workers), threads):
            worker = Worker(
                self._name,
                number,
                nice=self._nice,
                on_idle=self._on_idle,
                waiting=self._waiting,
                ended=self._has_ended,
                core=self._enter_core,
            )
            self._workers.append(worker)
            self._make_idle(worker)

    def shrink(self, threads: int) -> None:
        """Shrink to this number of threads. Each of the others ends at once, or with its running call."""
        self._leaving = [worker for worker in self._leaving if worker.is_alive]
        for worker in self._workers[threads:]:
            worker.is_leaving = True
            if worker in self._idle:
                self._idle.remove(worker)
                worker.finish()
            self._leaving.append(worker)
        del self._workers[threads:]

    def _enter_core(self) -> contextlib.AbstractContextManager[None]:
        return self.core()

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        return await self.run(function, argument)

    async def run(
        self,
        function: Callable[[A], T],
        argument: A,
        *,
        timeout_s: float | None = None,
        among: set[Job[Any, Any]] | None = None,
    ) -> T:
        """Run a function on a free thread.

        Args:
            function: Called with `argument`.
            argument: See `function`.
            timeout_s: Longest duration of the call, in seconds. None: no limit.
            among: Jobs that are abandoned together; this one is among them until it has ended. None: those of all.

        Raises:
            DeviceLost: The call took longer than `timeout_s`, or an earlier call did.
        """
        if self._lost:
            raise _device_lost()
        if self._ended:
            raise EngineStopped("The threads of the engine have ended.")
        job = Job(function, argument, self._post)
        jobs = self._running if among is None else among
        jobs.add(job)
        try:
            await self._run_job(job, timeout_s)
        finally:
            jobs.discard(job)
        if job.error is None:
            return job.value
        try:
            raise as_exception(job.error)
        finally:
            del job  # break the cycle of the job, its error, the traceback and this frame

    async def _run_job(self, job: Job[A, T], timeout_s: float | None) -> None:
        if self._idle:
            self._take_idle().put(cast("Job[object, object]", job))
        else:
            self._waiting.append(job)
            try:
                await self._wait_for(job, timeout_s, shield=False)
            except anyio.get_cancelled_exc_class():
                with contextlib.suppress(ValueError):  # a thread has taken it
                    self._waiting.remove(job)
                    raise
                await self._wait_for(job, timeout_s)
                raise
        await self._wait_for(job, timeout_s)

    def abandon(self) -> None:
        """See `Abandonable`. No later call is taken."""
        self._ended = True
        self._fail_waiting(_abandoned())
        self.abandon_jobs(self._running)

    def abandon_jobs(self, jobs: Collection[Job[Any, Any]]) -> None:
        """Fail jobs that wait, and those that run: their threads are stuck. Other jobs go on."""
        for job in jobs:
            if job.done.is_set():
                continue
            if job.worker is not None:
                job.worker.stuck = True
            with contextlib.suppress(ValueError):  # it runs
                self._waiting.remove(job)
            job.error = _abandoned()
            job.done.set()

    def part(self) -> ThreadsPart:
        """Return an offload on these threads, whose calls are abandoned by themselves."""
        return ThreadsPart(self)

    async def run_on_each(self, function: Callable[[A], object], argument: A) -> None:
        """Run a function on all threads at once that are idle now.

        It is not interrupted: a cancellation is raised when all calls have ended. An error of the function is raised.
        """
        jobs = [Job(function, argument, self._post) for _ in self._idle]
        for job in jobs:
            self._idle.pop().put(cast("Job[object, object]", job))
        for job in jobs:
            await self._wait_for(job, None)
        error = next((job.error for job in jobs if job.error is not None), None)
        if error is None:
            return
        del jobs, job
        try:
            raise as_exception(error)
        finally:
            del error  # as in `run`

    async def _wait_for(self, job: Job[A, T], timeout_s: float | None, *, shield: bool = True) -> None:
        """Wait for the end of a job. Its limit begins when a thread begins with it.

        The limit is counted in steps, not by the clock: while the process stands still, so does the job.

        Raises:
            DeviceLost: It has run for too long.
        """
        step_s = None if timeout_s is None else min(WATCH_S, timeout_s / WATCHES)
        while not job.done.is_set():
            has_begun = job.worker is not None
            with anyio.move_on_after(step_s, shield=shield):
                await job.done.wait()
            if has_begun and step_s is not None and timeout_s is not None and not job.done.is_set():
                job.watched_s += step_s
                if job.watched_s >= timeout_s:
                    assert job.worker is not None
                    self._lose(job.worker)
                    raise DeviceLost(f"the device did not answer within {timeout_s:g} s")

    def _has_ended(self, job: Job[object, object], goes_on: bool) -> None:
        """Note the end of a job, on the event loop. `goes_on`: its thread has taken another one."""
        job.done.set()
        if not goes_on and job.worker is not None:
            self._make_idle(job.worker)

    def _take_idle(self) -> Worker:
        """Take the idle thread of the lowest number.

        So calls that are alone mostly run on the first thread, whose caches are warm; see `is_first`.
        """
        worker = min(self._idle, key=attrgetter("number"))
        self._idle.remove(worker)
        return worker

    def _make_idle(self, worker: Worker) -> None:
        """Note that a thread is idle, or give it a job that has come meanwhile. One that leaves ends."""
        if worker.is_leaving:
            worker.finish()
        elif (job := take_first(self._waiting)) is not None:
            worker.put(job)
        else:
            self._idle.append(worker)

    def _lose(self, worker: Worker) -> None:
        self._lost = worker.stuck = True
        self._fail_waiting(_device_lost())

    def _fail_waiting(self, error: StagedPoolError) -> None:
        """Fail all calls that wait for a thread."""
        while (job := take_first(self._waiting)) is not None:
            job.error = detached(error)
            job.done.set()


class ThreadsPart:
    """Offload of one user of threads that several share. See `Abandonable`.

    Args:
        threads: The threads.
    """

    def __init__(self, threads: DedicatedThreads) -> None:
        self._threads = threads
        self._jobs: set[Job[Any, Any]] = set()

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        return await self._threads.run(function, argument, among=self._jobs)

    def abandon(self) -> None:
        """See `Abandonable`. Calls of others go on."""
        self._threads.abandon_jobs(self._jobs)


def _abandoned() -> Abandoned:
    return Abandoned("a call that does not end was abandoned with its thread")


def _device_lost() -> DeviceLost:
    return DeviceLost("one of the device's threads is stuck")
