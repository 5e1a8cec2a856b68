"""Patience: requests that wait, where admission has no room for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import anyio

from staged_pool.stages.errors import ADMISSION, DeadlineExceeded, Overloaded

R = TypeVar("R")

_LEAST_PAUSE_S: Final = 0.01
_MOST_PAUSE_S: Final = 1.0


async def patiently(ask: Callable[[float], Awaitable[R]], timeout_s: float) -> R:
    """Ask an engine again each time that it rejects a request because of its load.

    Args:
        ask: Makes the request, with a time limit in seconds.
        timeout_s: Limit for the result, in seconds.

    Raises:
        DeadlineExceeded: The limit passed.
        StagedPoolError: Any error of the request but `Overloaded`.
    """
    ends_at = anyio.current_time() + timeout_s
    while (left_s := ends_at - anyio.current_time()) > 0:
        try:
            return await ask(left_s)
        except Overloaded as error:
            await anyio.sleep(min(max(error.retry_after_s, _LEAST_PAUSE_S), _MOST_PAUSE_S, left_s))
    raise DeadlineExceeded("The time limit of the call passed.", stage=ADMISSION)
