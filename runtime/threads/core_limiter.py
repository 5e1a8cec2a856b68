"""The core limiter: threads that compute for long take turns at the cores.

If more threads compute than there are cores, the system's scheduler takes a core from one thread to give it to another,
for milliseconds at a time. The thread that has lost its core may hold the interpreter's lock. Then every thread that
needs the lock waits for it, the event loop included, whatever its priority. So no more of these threads run than there
are cores. Urgent calls begin anyway, and one of the others then waits longer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from staged_pool.stages.scheduling.tuning import CORE_TIMEOUT_S


class CoreLimiter:
    """A limit on threads that compute at once. A thread holds a core while it computes.

    Args:
        count: Number of cores.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        """Free cores. Negative: the number of urgent calls that run above the limit."""
        self._changed = threading.Condition(threading.Lock())

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """Hold a core for the block, which begins at the latest after `CORE_TIMEOUT_S`."""
        with self._changed:
            self._changed.wait_for(lambda: self._free > 0, CORE_TIMEOUT_S)
            self._free -= 1
        try:
            yield
        finally:
            self._give_back()

    @contextmanager
    def bypass(self) -> Iterator[None]:
        """Hold a core for the block without waiting. If none is free, the next core given back goes to this block."""
        with self._changed:
            self._free -= 1
        try:
            yield
        finally:
            self._give_back()

    def _give_back(self) -> None:
        with self._changed:
            self._free += 1
            if self._free > 0:
                self._changed.notify()
