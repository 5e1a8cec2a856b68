"""Waiting for a condition while other tasks and threads run."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel

ITERATIONS = 100
"""Iterations of the event loop before it may rest: tasks alone have done their part by then."""


async def until(condition: Callable[[], bool], *, within_s: float = 30) -> None:
    """Let the other tasks run until the condition holds; and threads, which need the lock of the interpreter for it."""
    with anyio.fail_after(within_s):
        iterations = 0
        while not condition():
            iterations += 1
            if iterations < ITERATIONS:
                await anyio.lowlevel.checkpoint()
            else:  # a loop that never rests slows a model's load down several times
                await anyio.sleep(0.001)
