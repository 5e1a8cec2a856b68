"""CoreLimiter, which threads that compute for long take turns at.

Where more threads compute than there are cores, the scheduler takes a core from one to give it to another, for
milliseconds at a time. If the one that has lost its core holds the interpreter's lock just then, everybody who needs
the lock waits for it to run again: the event loop, too, however far the others stand back for it. While those are in
the middle of a forward, which needs no lock, nothing ends that soon. So no more of them run than there are cores; what
is urgent begins anyway, and of the others one less goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from staged_pool.stages.scheduling.tuning import CORE_PATIENCE_S


class CoreLimiter:
    """The cores, one of which a thread holds while it computes.

    Args:
        count: How many of them may.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        """Below 0: so many cores more are held than there are."""
        self._changed = threading.Condition(threading.Lock())

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """A block that computes. It begins as soon as a core is free, or anyway after `CORE_PATIENCE_S`."""
        with self._changed:
            self._changed.wait_for(lambda: self._free > 0, CORE_PATIENCE_S)
            self._free -= 1
        try:
            yield
        finally:
            self._give_back()

    @contextmanager
    def bypass(self) -> Iterator[None]:
        """A block that computes and waits for nobody: where no core is free, the next who gives one back gives it to no
        other."""
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
