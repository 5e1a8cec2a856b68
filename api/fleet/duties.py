"""Duties of the supervisor and its children: tasks that must go on until the process is told to end."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Final, TypeVarTuple

from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.log import get_logger
from staged_pool.stages.user_code import user_code

EXIT_ORPHANED: Final = 4
"""Exit code of a child whose supervisor is gone."""

Args = TypeVarTuple("Args")

log = get_logger("staged_pool.fleet")


async def go_on(duty: Callable[[*Args], Awaitable[object]], *args: *Args) -> None:
    """Run a task that ends only when it is cancelled.

    Raises:
        StagedPoolError: It has ended by itself.
        Exception: It has failed; a stray cancellation and any other `BaseException` count as an error, too.
    """
    async with user_code():
        await duty(*args)
    raise StagedPoolError(f"{duty.__qualname__} has ended, and nobody has asked for it")


async def obey(serve: Callable[[], Awaitable[str]], is_ending: Callable[[], bool]) -> None:
    """Serve the control line of this process. If it ends before the process does, the process ends at once.

    Args:
        serve: Serves the line, and returns the reason of its end.
        is_ending: True once the process is about to end, as it was told.
    """
    async with user_code():
        reason = await serve()
    if not is_ending():
        log.error("supervisor.gone", reason=reason)
        os._exit(EXIT_ORPHANED)  # its requests are nobody's any more
