"""Streams: the outcomes of one request, as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from staged_pool.runtime.pipelines.items import Outcome
from staged_pool.runtime.pipelines.run import Items, PipelineRun
from staged_pool.runtime.results import Usage
from staged_pool.stages.errors import StagedPoolError, detached
from staged_pool.stages.exception_groups import single_errors


class ItemStream(AsyncIterator[Outcome]):
    """Outcomes of items, as they come. One task iterates."""

    def __init__(self) -> None:
        self._sender, self._receiver = anyio.create_memory_object_stream[Outcome](0)
        self._failure: StagedPoolError | None = None
        self.usage = Usage(0)
        """Tokens that the request used; known at the end of the iteration."""

    async def give(self, order: tuple[int, ...], outcome: Outcome) -> None:
        """Hand an outcome to the reader, and wait until it is taken."""
        await self._sender.send(outcome)

    async def __anext__(self) -> Outcome:
        try:
            return await self._receiver.receive()
        except anyio.EndOfStream:
            if self._failure is not None:
                raise detached(self._failure) from None
            raise StopAsyncIteration from None

    @asynccontextmanager
    async def filled_by(self, run: PipelineRun, items: Items) -> AsyncIterator[None]:
        """Run a request for a block, which reads its outcomes. The end of the block is the end of the request."""
        with single_errors(), self._sender, self._receiver:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._fill, run, items)
                yield
                tasks.cancel_scope.cancel()

    async def _fill(self, run: PipelineRun, items: Items) -> None:
        try:
            await run.run(items)
            self.usage = Usage(run.tokens)
        except StagedPoolError as error:
            self._failure = detached(error)
        finally:
            self._sender.close()
