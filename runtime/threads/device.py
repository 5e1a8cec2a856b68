"""Device threads: one of them loads the model, and all run its forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from staged_pool.runtime.threads.dedicated_threads import DedicatedThreads
from staged_pool.runtime.threads.openmp import release_omp_team

A = TypeVar("A")
T = TypeVar("T")


class DeviceThreads(DedicatedThreads):
    """Dedicated threads with a watchdog: a device context belongs to the thread that made it.

    An idle thread releases its OpenMP team, so that the team of another thread can spin; see `openmp`.

    Args:
        name: Name of the threads, for debuggers and profilers.
        watchdog_s: Longest duration of a call, in seconds. After a longer call its task, and every later call on any
            thread, gets `DeviceLost`. Other running calls end as usual.
        nice: See `DedicatedThreads`.
    """

    def __init__(self, name: str, *, watchdog_s: float, nice: int = 0) -> None:
        super().__init__(name, nice=nice, on_idle=release_omp_team)
        self._watchdog_s = watchdog_s

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        return await self.run(function, argument, timeout_s=self._watchdog_s)
