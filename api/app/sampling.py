"""Sampling of repeated log events."""

from __future__ import annotations

import time


class Sample:
    """Selects one event per period for the log, and counts the others.

    Args:
        every_s: Seconds between two logged events.
    """

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._next_at = 0.0
        self._left_out = 0

    def count(self) -> int:
        """Return the number of events left out since the last logged one; -1: leave this one out."""
        if time.monotonic() < self._next_at:
            self._left_out += 1
            return -1
        self._next_at = time.monotonic() + self._every_s
        left_out, self._left_out = self._left_out, 0
        return left_out
