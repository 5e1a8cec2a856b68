"""Waits by the time in which this process ran: a freeze of it (SIGSTOP, a paused container) does not count.

After a freeze, all clocks have moved on, and nothing that others have sent meanwhile is read. A limit by the clock
would pass before the first of it is. So these waits are made of steps, and a freeze is part of one step.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

import anyio

STEP_S: Final = 0.5
"""Most seconds of one step."""

STEPS: Final = 4
"""Fewest steps of a wait: even a short one outlasts a freeze, and the first reads after it."""


Sleep: TypeAlias = Callable[[float], Awaitable[None]]
"""Sleeps for some seconds by the clock, as `anyio.sleep` does."""


async def sleep_awake(seconds: float, sleep: Sleep = anyio.sleep) -> None:
    """Sleep for some seconds in which this process runs."""
    steps = _steps(seconds)
    for _ in range(steps):
        await sleep(seconds / steps)


def call_awake_after(
    seconds: float, function: Callable[[], object], sleep: Callable[[float], object] = time.sleep
) -> threading.Thread:
    """Call a function in a thread after some seconds in which this process runs.

    The thread keeps no process alive.

    Args:
        seconds: The seconds.
        function: The function.
        sleep: Sleeps for some seconds by the clock.
    """

    def wait() -> None:
        steps = _steps(seconds)
        for _ in range(steps):
            sleep(seconds / steps)
        function()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def _steps(seconds: float) -> int:
    return max(STEPS, math.ceil(seconds / STEP_S))


@asynccontextmanager
async def move_on_awake_after(seconds: float, sleep: Sleep = anyio.sleep) -> AsyncIterator[anyio.CancelScope]:
    """Cancel a block after some seconds in which this process runs. Its scope tells so."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def limit() -> None:
                await sleep_awake(seconds, sleep)
                scope.cancel()

            tasks.start_soon(limit)
            yield scope
            tasks.cancel_scope.cancel()
