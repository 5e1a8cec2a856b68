"""Streams: the outcomes of one request, as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import anyio
import anyio.lowlevel

from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.runtime.memory.budget import Holding
from staged_pool.runtime.pipelines.items import Outcome
from staged_pool.runtime.pipelines.run import PipelineRun
from staged_pool.runtime.pipelines.source import Items
from staged_pool.runtime.pipelines.window import Window
from staged_pool.runtime.results import Usage
from staged_pool.stages.errors import StagedPoolError, detached
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.wakeup import wakeup


class ItemStream(AsyncIterator[Outcome]):
    """Outcomes of items, as they come. One task iterates.

    Args:
        unread: Places of the items that the reader has not taken yet. It bounds the outcomes that are kept.
        answer: Memory of the outcomes; each counts until it is read. None: they are the reader's.
        priority: Urgency of the request.
    """

    def __init__(self, unread: Window, answer: AnswerMemory | None, priority: Priority) -> None:
        self._unread = unread
        self._answer = answer
        self._priority = priority
        self._outcomes = deque[tuple[Outcome, Holding | None]]()
        self._more = wakeup()
        """Set once there is more to read, or the end. Only the reader replaces it, before it waits."""
        self._has_ended = False
        self._failure: Exception | None = None
        self.usage = Usage(0)
        """Tokens that the request used; known at the end of the iteration."""

    async def give(self, order: tuple[int, ...], outcome: Outcome, size: int) -> None:
        """Keep an outcome of some bytes for the reader, once there is memory for it."""
        held = None if self._answer is None else await self._answer.part(size, self._priority)
        self._outcomes.append((outcome, held))
        self._more.set()

    async def __anext__(self) -> Outcome:
        await anyio.lowlevel.checkpoint()
        while not self._outcomes:
            if self._has_ended:
                self._raise_end()
            self._more = wakeup()
            await self._more.wait()
        self._unread.leave()
        return self._take()

    def _take(self) -> Outcome:
        outcome, held = self._outcomes.popleft()
        if held is not None:
            held.give_back()
        return outcome

    def _raise_end(self) -> NoReturn:
        if (failure := self._failure) is None:
            raise StopAsyncIteration
        try:
            raise detached(failure) if isinstance(failure, StagedPoolError) else failure
        finally:
            del failure  # break the cycle of the error, its traceback and this frame

    @asynccontextmanager
    async def filled_by(self, run: PipelineRun, items: Items) -> AsyncIterator[None]:
        """Run a request for a block, which reads its outcomes. The end of the block is the end of the request."""
        try:
            with single_errors():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._fill, run, items)
                    yield
                    tasks.cancel_scope.cancel()
        finally:
            while self._outcomes:
                self._take()

    async def _fill(self, run: PipelineRun, items: Items) -> None:
        try:
            await run.run(items)
            self.usage = Usage(run.tokens)
        except StagedPoolError as error:
            self._failure = detached(error)
        except Exception as error:  # noqa: BLE001  # of the source, which is the reader's: its iteration raises it
            self._failure = error
        finally:
            self._has_ended = True
            self._more.set()
