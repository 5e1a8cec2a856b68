"""Lines of a preparer: one to each engine replica, with front engines of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import anyio
from anyio.abc import TaskGroup

from staged_pool.ray.door import Door, walk_in
from staged_pool.ray.registry import LineRegistry
from staged_pool.runtime.engine.open_front import FrontParts, run_front_engines
from staged_pool.runtime.engine.spread_engine import SpreadEngine
from staged_pool.runtime.remote.line import BEAT_S, FrontLine, ModelsChanged
from staged_pool.stages.log import get_logger
from staged_pool.stages.stage import StageOptions

LOOK_S: Final = 1.0
"""Seconds between two looks for engine replicas. One that leaves says so itself."""

QUICK_LOOK_S: Final = 0.25
"""The same, while there is no line."""

log = get_logger("staged_pool.ray")


class Lines:
    """Opens a line to each engine replica, and ends it with the replica.

    Args:
        find: Returns the doors of all replicas that run now.
        parts: Threads and preparers, which all lines share.
        registry: Gets the engines of each line.
    """

    def __init__(
        self, find: Callable[[], Awaitable[Sequence[Door]]], parts: FrontParts, registry: LineRegistry
    ) -> None:
        self._find = find
        self._parts = parts
        self._registry = registry
        self._open: set[Door] = set()
        self._closing = anyio.Event()
        self._joined = anyio.Event()

    async def wait(self) -> None:
        """Wait until requests can be taken: a first line is open."""
        await self._joined.wait()

    async def run(self) -> None:
        """Look for replicas and serve their lines, until `close` and the end of all requests."""
        async with anyio.create_task_group() as tasks:
            await self._look(tasks)

    def close(self) -> None:
        """Let the engines of all lines drain, and end."""
        self._closing.set()

    async def _look(self, tasks: TaskGroup) -> None:
        while not self._closing.is_set():
            for door in await self._find():
                if door not in self._open:
                    self._open.add(door)
                    tasks.start_soon(self._serve, door)
            with anyio.move_on_after(LOOK_S if self._registry.has_line else QUICK_LOOK_S):
                await self._closing.wait()

    async def _serve(self, door: Door) -> None:
        """Serve the line to one replica until it ends."""
        line, ended = FrontLine(StageOptions().clock, patience_s=0.0), anyio.Event()

        async def run() -> None:
            reason = "nobody answers"
            try:
                reason = await walk_in(line, door)
            except (OSError, anyio.BrokenResourceError) as error:
                reason = str(error) or reason
            except ModelsChanged as error:
                reason = str(error)
            finally:
                ended.set()
                log.warning("engine.lost", replica=door.replica, reason=reason)

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                await _first(line.welcomed, ended)
                if line.fault is None:
                    await self._join(door, line, ended)
                line.close()
                await ended.wait()
        finally:
            self._open.discard(door)

    async def _join(self, door: Door, line: FrontLine, ended: anyio.Event) -> None:
        """Send requests over a line until it ends, an engine breaks, or this preparer closes."""
        if len(line.terms) != len(self._parts.configs):
            log.warning("engine.other", replica=door.replica, models=len(line.terms))
            await _first(ended, self._closing)
            return
        async with run_front_engines(line, self._parts, engine_class=SpreadEngine) as engines:
            self._registry.join(engines.values(), line)
            self._joined.set()
            log.info("engine.joined", replica=door.replica)
            broken = [engine.wait_broken for engine in engines.values()]
            await _first(ended, self._closing, partial(_beat, line), *broken)
            if not self._closing.is_set():
                self._registry.part(engines.values())


async def _beat(line: FrontLine) -> None:
    while True:
        await anyio.sleep(BEAT_S)
        line.beat()


async def _first(*events: anyio.Event | Callable[[], Awaitable[object]]) -> None:
    """Wait for the first of several events, or calls."""
    async with anyio.create_task_group() as waiting:

        async def wait(event: anyio.Event | Callable[[], Awaitable[object]]) -> None:
            await (event.wait() if isinstance(event, anyio.Event) else event())
            waiting.cancel_scope.cancel()

        for event in events:
            waiting.start_soon(wait, event)
