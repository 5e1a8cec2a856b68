"""The device's thread: one dedicated thread that loads a model and runs every forward."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from queue import SimpleQueue
from typing import Generic, TypeVar, cast

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

    `anyio.from_thread` only offers to wait, which would hang a device's thread for ever on a loop that has just ended.
    """
    native = anyio.lowlevel.current_token().native_token
    if isinstance(native, asyncio.AbstractEventLoop):
        return native.call_soon_threadsafe
    from trio.lowlevel import TrioToken  # only where the host runs trio

    return cast(TrioToken, native).run_sync_soon


class DeviceThread:
    """An `Offload` on one thread of its own, because a device context belongs to the thread that made it.

    Cancellation never interrupts a call: it is raised when the call has ended.

    Args:
        name: The thread's name, for debuggers and profilers.
        watchdog_s: A call that takes longer counts as stuck: the waiting task gets `DeviceLost`, and the thread is
            not used again.
    """

    def __init__(self, name: str, *, watchdog_s: float) -> None:
        self._name = name
        self._watchdog_s = watchdog_s
        self._jobs: SimpleQueue[_Job[object, object] | None] = SimpleQueue()
        self._lost = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[DeviceThread]:
        """Start the thread, and stop it at the end of the block, after the call that it may be in.

        A thread that is stuck is left behind: it cannot be ended, only its process can.
        """
        thread = threading.Thread(target=self._serve, name=self._name)
        thread.start()
        try:
            yield self
        finally:
            self._jobs.put(None)
            if not self._lost:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(thread.join)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # an idle thread must not keep the last batch alive

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        return await self.run(function, argument, patience_s=self._watchdog_s)

    async def run(self, function: Callable[[A], T], argument: A, *, patience_s: float | None = None) -> T:
        """Run a function on the thread, for as long as it takes where `patience_s` is None.

        Raises:
            DeviceLost: It took longer, now or in an earlier call.
        """
        if self._lost:
            raise DeviceLost("the device's thread is stuck")
        job = _Job(function, argument)
        self._jobs.put(job)  # type: ignore[arg-type]  # a queue of calls of any types
        with anyio.move_on_after(patience_s, shield=True):
            await job.done.wait()
        if not job.done.is_set():
            self._lost = True
            raise DeviceLost(f"the device did not answer within {patience_s:g} s")
        if job.error is not None:
            raise job.error
        return job.value
