"""Block watch: find hooks that block the event loop, and name them."""

from __future__ import annotations

import sys
import threading
import time
import traceback
import types
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread

from staged_pool.stages.log import get_logger

R = TypeVar("R")

BLOCKS_S: Final = 0.1
"""Seconds without a return to the event loop that count as blocking: ten times a slow step of our own code."""

_LOOKS_EVERY_S: Final = 0.05

log = get_logger("staged_pool.plugins")


@dataclass(slots=True)
class _Step:
    """One step of a hook: its code between two waits."""

    hook: str
    thread: int
    began_at: float
    is_logged: bool = False


class BlockWatch:
    """Times each step of awaited hooks, and watches for one that does not end.

    A thread names the line while the loop is blocked. A step that holds the interpreter's lock, in C, is only found
    when it has ended.

    Args:
        plugin: Name of the plugin, for the log.
    """

    def __init__(self, plugin: str) -> None:
        self._plugin = plugin
        self._step: _Step | None = None
        self.blocked: Counter[str] = Counter()
        """Steps that blocked the event loop, by hook. Written on the event loop alone."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch for the length of a block."""
        ended = threading.Event()
        thread = threading.Thread(target=self._look, args=(ended,), name="staged-pool block watch", daemon=True)
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(thread.start)
        try:
            yield
        finally:
            ended.set()
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(thread.join)

    @types.coroutine
    def watched(self, hook: str, coroutine: Coroutine[Any, Any, R]) -> Generator[Any, Any, R]:
        """Await a coroutine, and time its steps."""
        value: Any = None
        error: BaseException | None = None
        while True:
            self._step = step = _Step(hook, threading.get_ident(), time.perf_counter())
            try:
                waits_for = coroutine.send(value) if error is None else coroutine.throw(error)
            except StopIteration as ended:
                result: R = ended.value
                return result
            finally:
                self._step = error = None
                self._count(step)
            try:
                value = yield waits_for
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as raised:  # noqa: BLE001  # a cancellation too belongs to the hook
                error = raised

    def _count(self, step: _Step) -> None:
        seconds = time.perf_counter() - step.began_at
        if seconds >= BLOCKS_S:
            self.blocked[step.hook] += 1
            if not step.is_logged:
                log.error("plugin.hook_blocked", plugin=self._plugin, hook=step.hook, seconds=round(seconds, 3))

    def _look(self, ended: threading.Event) -> None:
        while not ended.wait(_LOOKS_EVERY_S):
            step = self._step
            if step is None or step.is_logged or time.perf_counter() - step.began_at < BLOCKS_S:
                continue
            step.is_logged = True
            frame = sys._current_frames().get(step.thread)
            where = "" if frame is None else _innermost(frame)
            log.error("plugin.hook_blocks", plugin=self._plugin, hook=step.hook, where=where)


def _innermost(frame: types.FrameType) -> str:
    (place,) = traceback.extract_stack(frame, limit=1)
    return f"{place.filename}:{place.lineno} in {place.name}"
