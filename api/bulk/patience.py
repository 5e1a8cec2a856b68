"""Patience with overload: work of a job waits, and is never rejected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import anyio

from staged_pool.stages.errors import Overloaded

R = TypeVar("R")

_LEAST_PAUSE_S: Final = 0.02
_MOST_PAUSE_S: Final = 5.0


async def until_admitted(call: Callable[[], Awaitable[R]]) -> R:
    """Repeat a call while it is rejected for overload, after the pauses asked for."""
    while True:
        try:
            return await call()
        except Overloaded as error:
            pause_s = min(max(error.retry_after_s, _LEAST_PAUSE_S), _MOST_PAUSE_S)
        await anyio.sleep(pause_s)
