"""Means over the last seconds: of a level, such as busy slots, or of events a second."""

from __future__ import annotations

import math
from typing import Final

RECENT_S: Final = 3.0
"""Memory of the means that a router reads, in seconds: what was this long ago weighs 1/e.

A choice: several times the interval at which gateways read, and short enough to show a burst.
"""


class RecentMean:
    """A mean that fades: what was `RECENT_S` seconds ago weighs 1/e.

    Pure: callers pass the time. It begins at 0, so it is too low for the first seconds. All means of one process are
    too low by the same factor then, and their ratios are right.
    """

    __slots__ = ("_at", "_level", "_mean")

    def __init__(self) -> None:
        self._at = 0.0
        self._level = self._mean = 0.0

    def set_level(self, level: float, now: float) -> None:
        """Note that the level is this one from now on."""
        self._advance(now)
        self._level = level

    def count(self, now: float) -> None:
        """Count an event."""
        self._advance(now)
        self._mean += 1.0 / RECENT_S

    def value(self, now: float) -> float:
        """Return the mean level, or the events a second."""
        self._advance(now)
        return self._mean

    def _advance(self, now: float) -> None:
        if now > self._at:  # the event loop may hear of ends out of order
            fade = math.exp((self._at - now) / RECENT_S)
            self._mean = self._mean * fade + self._level * (1.0 - fade)
            self._at = now
