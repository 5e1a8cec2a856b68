"""The core limiter: threads that compute for long take turns at the cores.

If more threads compute than there are cores, the system's scheduler takes a core from one thread to give it to another,
for milliseconds at a time. The thread that has lost its core may hold the interpreter's lock. Then every thread that
needs the lock waits for it, the event loop included, whatever its priority. So no more of these threads run than there
are cores. Urgent calls begin anyway, and one of the others then waits longer. A long call, such as the decoding of a
video, lends them its core between its parts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from staged_pool.stages.scheduling.tuning import CORE_TIMEOUT_S, CORE_TURN_S

_own = threading.local()
"""`holding`: the core that this thread holds by `acquire`."""


class CoreLimiter:
    """A limit on threads that compute at once. A thread holds a core while it computes.

    Args:
        count: Number of cores.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        """Free cores. Negative: the number of urgent calls that run above the limit."""
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[object] = deque()
        """A token of each thread that waits, the first to wait first."""

    @contextmanager
    def acquire(self) -> Iterator[None]:
        """Hold a core for the block, which begins at the latest after `CORE_TIMEOUT_S`."""
        with self._changed:
            self._take()
        _own.holding = _Holding(self, time.monotonic())
        try:
            yield
        finally:
            _own.holding = None
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

    def is_short(self, turn_s: float) -> bool:
        """Return True if a thread that has computed for `turn_s` is to lend its core."""
        return self._free < 0 or (bool(self._queue) and turn_s >= CORE_TURN_S)

    def lend(self) -> bool:
        """Give the core of this thread to another, and wait for one. Returns False if that took `CORE_TIMEOUT_S`."""
        with self._changed:
            self._free += 1
            self._changed.notify_all()
            return self._take()

    def _take(self) -> bool:
        """Wait for a core, behind those that wait already. Returns False if none was free in time."""
        token = object()
        self._queue.append(token)
        found = self._changed.wait_for(lambda: self._free > 0 and self._queue[0] is token, CORE_TIMEOUT_S)
        self._queue.remove(token)
        self._free -= 1
        if self._free > 0 and self._queue:
            self._changed.notify_all()
        return found

    def _give_back(self) -> None:
        with self._changed:
            self._free += 1
            if self._free > 0:
                self._changed.notify_all()


@dataclass(slots=True)
class _Holding:
    """A core that a thread holds."""

    limiter: CoreLimiter
    since: float
    """Time from which it has computed without a pause, by `time.monotonic()`."""


def lend_core() -> None:
    """Lend the core of this thread to another call that needs one.

    A long call does so between its parts. If cores stay away, because a call hangs, the rest of it lends no more.
    """
    holding: _Holding | None = getattr(_own, "holding", None)
    if holding is None or not holding.limiter.is_short(time.monotonic() - holding.since):
        return
    if holding.limiter.lend():
        holding.since = time.monotonic()
    else:
        _own.holding = None
