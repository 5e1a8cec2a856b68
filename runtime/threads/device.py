"""The device's threads: dedicated ones, of which one loads a model and all run its forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from staged_pool.runtime.threads.openmp import release_omp_team
from staged_pool.runtime.threads.workers import DedicatedThreads

A = TypeVar("A")
T = TypeVar("T")


class DeviceThreads(DedicatedThreads):
    """Threads of the device's own, because a device context belongs to the thread that made it. See `DedicatedThreads`.

    One that rests keeps no helpers that it shared a forward with: those of another could not spin, see `openmp`.

    Args:
        name: Of the threads, for debuggers and profilers.
        watchdog_s: A call that takes longer, counted from when it begins, is stuck: the waiting task gets `DeviceLost`,
            and so does every later call, on whatever thread. Calls that run meanwhile end as they would.
        nice: See `DedicatedThreads`.
    """

    def __init__(self, name: str, *, watchdog_s: float, nice: int = 0) -> None:
        super().__init__(name, nice=nice, on_idle=release_omp_team)
        self._watchdog_s = watchdog_s

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        return await self.run(function, argument, patience_s=self._watchdog_s)
