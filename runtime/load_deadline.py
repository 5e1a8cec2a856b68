"""Deadline of a load: the caller gives the load up, or its thread ends it first."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from staged_pool.stages.errors import ConfigError


class LoadTimedOut(ConfigError):
    """The load has passed `load_timeout_s`, or an earlier one that has passed it still runs."""


class LoadDeadline:
    """Deadline of one load, which runs in a thread.

    A thread cannot be ended from outside. So a load looks at its deadline between its steps, and ends itself. One that
    hangs inside a step goes on, but nobody waits for it, and its result is closed when it ends.

    It has no clock: its caller waits, and gives it up. A clock would go on in a freeze of the process, and the load
    does not.

    Args:
        timeout_s: Limit in seconds, for the message.
    """

    def __init__(self, timeout_s: float = math.inf) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._is_over = False
        self.is_settled = False
        """True once the result belongs to the caller."""
        self.is_running = False
        """True while a thread is inside `running`."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Mark the block, in a thread, in which the load runs."""
        self.is_running = True
        try:
            self.check()
            yield
        finally:
            self.is_running = False

    def check(self) -> None:
        """End the load here if its caller has given it up.

        Raises:
            LoadTimedOut: It has.
        """
        if self._is_over:
            raise self.error()

    def settle(self) -> None:
        """End the load in its thread: from now on its result belongs to the caller.

        Raises:
            LoadTimedOut: The caller has given it up.
        """
        with self._lock:
            self.check()
            self._is_over = self.is_settled = True

    def give_up(self) -> bool:
        """Give the load up. False: it has settled, and its result is there."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
        return not was_over

    def error(self) -> LoadTimedOut:
        """Return the error of a load that has passed its deadline."""
        return LoadTimedOut(
            f"load_timeout_s={self._timeout_s:g}: the model was not loaded within that time; a hanging disk is the "
            "usual reason. Set it higher if the files are only slow"
        )
