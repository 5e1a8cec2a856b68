"""Log lines for a few of many events that are alike."""

from __future__ import annotations

import time


class Sample:
    """Lets one event in a while through, and counts the others.

    Args:
        every_s: Seconds between two that are let through.
    """

    def __init__(self, *, every_s: float) -> None:
        self._every_s = every_s
        self._next_at = 0.0
        self._left_out = 0

    def count(self) -> int:
        """Of an event that is let through, how many were left out since the last; -1 for one that is left out."""
        if time.monotonic() < self._next_at:
            self._left_out += 1
            return -1
        self._next_at = time.monotonic() + self._every_s
        left_out, self._left_out = self._left_out, 0
        return left_out
