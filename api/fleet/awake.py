"""Waits by the time in which this process ran: a freeze of it (SIGSTOP, a paused container) does not count.

After a freeze, all clocks have moved on, and nothing that others have sent meanwhile is read. A limit by the clock would
pass before the first of it is. So these waits are made of steps, and a freeze is part of one step.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio
from anyio import CancelScope

STEP_S: Final = 0.5
"""Most seconds of one step."""

STEPS: Final = 4
"""Fewest steps of a wait: even a short one outlasts a freeze, and what is read after it."""


async def sleep_awake(seconds: float) -> None:
    """Sleep for some seconds in which this process runs."""
    steps = max(STEPS, math.ceil(seconds / STEP_S))
    for _ in range(steps):
        await anyio.sleep(seconds / steps)


@asynccontextmanager
async def move_on_awake_after(seconds: float) -> AsyncIterator[CancelScope]:
    """Cancel a block after some seconds in which this process runs; its scope tells so, as `anyio.move_on_after` does."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def limit() -> None:
                await sleep_awake(seconds)
                scope.cancel()

            tasks.start_soon(limit)
            yield scope
            tasks.cancel_scope.cancel()
