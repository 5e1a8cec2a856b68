"""How late the event loop comes to what is due: the one number that shows that something blocks it."""

from __future__ import annotations

import time
from typing import Final

import anyio

from staged_pool.stages.log import get_logger
from staged_pool.stages.meter import Histogram, HistogramSnapshot

EVERY_S: Final = 0.1
ALARM_S: Final = 1.0
"""A loop that is late by more than this has a line in the log: health checks time out soon after."""

log = get_logger("staged_pool.server")


class LoopLag:
    """Sleeps again and again, and notes by how much too long."""

    def __init__(self) -> None:
        self._lateness = Histogram()

    async def watch(self) -> None:
        """Measure until cancelled, ten times a second."""
        while True:
            due = time.perf_counter() + EVERY_S
            await anyio.sleep(EVERY_S)
            late_s = max(0.0, time.perf_counter() - due)
            self._lateness.observe(late_s)
            if late_s > ALARM_S:
                log.warning("event_loop.late", late_s=round(late_s, 3))

    def snapshot(self) -> HistogramSnapshot:
        return self._lateness.snapshot()
