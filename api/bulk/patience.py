"""Patience with overload: work of a job waits, and is never rejected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import anyio

from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.stages.errors import Overloaded
from staged_pool.stages.scheduling.entries import Priority

R = TypeVar("R")

_LEAST_PAUSE_S: Final = 0.02
_MOST_PAUSE_S: Final = 5.0


async def until_admitted(call: Callable[[], Awaitable[R]], answer: AnswerMemory | None = None) -> R:
    """Repeat a call while it is rejected for overload, after the pauses asked for.

    Args:
        call: The call.
        answer: Memory of its answer. A call that has found too little of it is repeated once it has that, in its turn,
            and not before: it would do the same work for nothing. None: the answer is of another process.
    """
    while True:
        try:
            return await call()
        except Overloaded as error:
            pause_s = min(max(error.retry_after_s, _LEAST_PAUSE_S), _MOST_PAUSE_S)
        if answer is not None and answer.lacks_room:
            await answer.gather(Priority.BULK)
        else:
            await anyio.sleep(pause_s)
