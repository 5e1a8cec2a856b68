"""Processes of their own for plain hooks that would hold the interpreter's lock."""

from __future__ import annotations

import os
from functools import cache
from types import TracebackType
from typing import Any

import anyio
import anyio.to_process

from staged_pool.runtime.plugins.hooks import Hook
from staged_pool.runtime.plugins.processor import PluginContext
from staged_pool.runtime.workers.program import NICE
from staged_pool.stages.user_code import user_code


class HookProcesses:
    """Runs hooks in worker processes of anyio. Its block takes one of `limit` places.

    A process is started at its first call, and kept for further ones. A cancelled call ends with its process at once.

    Args:
        limit: Most calls at once.
    """

    def __init__(self, limit: int) -> None:
        self._places = anyio.CapacityLimiter(limit)

    async def __aenter__(self) -> None:
        await self._places.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._places.release()

    async def run(self, hook: Hook, value: object, context: PluginContext) -> tuple[Any, Any]:
        """Run a hook on copies of the value and the context. Returns its result, and the state of the context.

        Raises:
            BrokenWorkerProcess: The process has ended, such as for lack of memory.
        """
        unlimited = anyio.CapacityLimiter(1)  # a place is taken already
        return await anyio.to_process.run_sync(
            _run, hook, value, context.id, context.state, cancellable=True, limiter=unlimited
        )


@cache
def _yield_the_cores() -> None:
    """Lower the priority of this process, once: the server goes first, above all its event loop."""
    os.nice(NICE)


def _run(hook: Hook, value: object, request_id: str, state: Any) -> tuple[Any, Any]:
    _yield_the_cores()
    context = PluginContext(request_id)
    context.state, context.hook = state, hook.name
    with user_code():
        return hook(value, context), context.state
