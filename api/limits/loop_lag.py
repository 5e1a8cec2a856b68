"""Event loop lag: the delay of a timer past its due time, in seconds.

It shows that something blocks the event loop.
"""

from __future__ import annotations

import time
from typing import Final

import anyio

from staged_pool.stages.log import get_logger
from staged_pool.stages.meter import Histogram, HistogramSnapshot

EVERY_S: Final = 0.1
ALARM_S: Final = 1.0
"""Seconds of lag from which on a warning is logged: health checks time out soon after."""

log = get_logger("staged_pool.server")


class LoopLag:
    """Histogram of the event loop's lag, measured by short sleeps."""

    def __init__(self) -> None:
        self._lateness = Histogram()

    async def watch(self) -> None:
        """Measure every `EVERY_S` seconds until cancelled."""
        while True:
            due = time.perf_counter() + EVERY_S
            await anyio.sleep(EVERY_S)
            late_s = max(0.0, time.perf_counter() - due)
            self._lateness.observe(late_s)
            if late_s > ALARM_S:
                log.warning("event_loop.late", late_s=round(late_s, 3))

    def snapshot(self) -> HistogramSnapshot:
        return self._lateness.snapshot()
