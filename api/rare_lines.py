"""Log lines of an event that may come in a flood: at most one a second, with a count."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import anyio

EVERY_S: Final = 1.0
"""Fewest seconds between two lines of one event."""


class RareLines:
    """Logs an event each time, or once for many times.

    The first time is logged at once. Later ones wait for the first that comes `EVERY_S` after the last line, and are
    counted in its field `times`.

    Args:
        log: Writes a line: from the name of the event, and its fields.
        event: The name.
        clock: In seconds. None: that of the event loop.
    """

    def __init__(self, log: Callable[..., object], event: str, clock: Callable[[], float] | None = None) -> None:
        self._log = log
        self._event = event
        self._clock = anyio.current_time if clock is None else clock
        self._times = 0
        self._next_at = -math.inf

    def add(self, **fields: Any) -> None:
        """Log the event with these fields, or count it."""
        self._times += 1
        now = self._clock()
        if now >= self._next_at:
            self._next_at = now + EVERY_S
            times, self._times = self._times, 0
            self._log(self._event, times=times, **fields)
