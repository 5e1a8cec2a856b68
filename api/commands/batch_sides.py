"""Sides that answer the lines of `run-batch`: an engine of this process, or a running server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from staged_pool.api.app.batch_work import BatchWork
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.bulk.batch_lines import BatchAnswer, BatchAnswers, BatchLine
from staged_pool.api.bulk.job import Window
from staged_pool.api.bulk.parts import Work
from staged_pool.api.bulk.server_work import BulkClient, ServerWork
from staged_pool.api.bulk.text_work import TextCall
from staged_pool.api.commands.batch_flags import Batch
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.requests import MODEL_MAX
from staged_pool.runtime.settings import DAY_S
from staged_pool.stages.scheduling.entries import Priority

ATTEMPT_TIMEOUT_S: Final = 3600.0
"""Seconds after which an answer of a server is given up."""


class Side(Protocol):
    """Answers the lines: an engine of this process, or a server."""

    def batch_work(self, answers: BatchAnswers) -> Work[BatchLine, BatchAnswer]:
        """Return the work on lines that are requests."""
        ...

    def text_call(self, batch: Batch) -> TextCall:
        """Return the function that asks about texts."""
        ...

    def window(self, whole: Window) -> Window:
        """Return the part of a window that this side can use."""
        ...


class EngineSide:
    """An engine of this process.

    Args:
        engine: The engine.
        auto_truncate: See `ServerConfig`.
    """

    def __init__(self, engine: Engine, *, auto_truncate: bool) -> None:
        self._engine = engine
        self._auto_truncate = auto_truncate

    def batch_work(self, answers: BatchAnswers) -> Work[BatchLine, BatchAnswer]:
        """See `Side`."""
        registry = EngineRegistry()
        registry.open(self._engine)
        return BatchWork(registry, answers, auto_truncate=self._auto_truncate)

    def text_call(self, batch: Batch) -> TextCall:
        """See `Side`."""
        cut = MODEL_MAX if batch.truncate else None
        if batch.classifies:
            return partial(
                self._engine.classify,
                candidate_labels=batch.candidate_labels,
                hypothesis_template=batch.hypothesis_template,
                multi_label=batch.multi_label,
                max_tokens=cut,
                priority=Priority.BULK,
            )
        return partial(
            self._engine.embed,
            dimensions=batch.dimensions,
            prompt_name=batch.prompt_name,
            max_tokens=cut,
            priority=Priority.BULK,
        )

    def window(self, whole: Window) -> Window:
        """See `Side`."""
        return whole


class ServerSide:
    """A running server.

    Args:
        client: Client of the server.
        requests: Requests at once.
    """

    def __init__(self, client: BulkClient, requests: int) -> None:
        self._client = client
        self._requests = requests

    def batch_work(self, answers: BatchAnswers) -> Work[BatchLine, BatchAnswer]:
        """See `Side`."""
        return ServerWork(self._client, answers)

    def text_call(self, batch: Batch) -> TextCall:
        """See `Side`."""
        cut = MODEL_MAX if batch.truncate else None
        if batch.classifies:
            return partial(
                self._client.classify,
                candidate_labels=batch.candidate_labels,
                hypothesis_template=batch.hypothesis_template,
                multi_label=batch.multi_label,
                max_tokens=cut,
            )
        return partial(self._client.embed, dimensions=batch.dimensions, prompt_name=batch.prompt_name, max_tokens=cut)

    def window(self, whole: Window) -> Window:
        """See `Side`."""
        return replace(whole, lines=self._requests * whole.group_lines)


@asynccontextmanager
async def engine_side(config: EngineConfig, *, auto_truncate: bool) -> AsyncIterator[Side]:
    """Load a model for the time of the block."""
    # Nobody waits for an answer: the window bounds the work, and a long queue is no reason to reject a line.
    async with open_engine(replace(config, target_delay_s=float(DAY_S))) as engine:
        yield EngineSide(engine, auto_truncate=auto_truncate)


@asynccontextmanager
async def server_side(batch: Batch, url: str) -> AsyncIterator[Side]:
    """Connect to a server for the time of the block."""
    client = BulkClient(
        url,
        api_key=batch.api_key,
        model=batch.model,
        attempt_timeout_s=ATTEMPT_TIMEOUT_S,
        concurrency=batch.concurrency,
    )
    async with client:
        yield ServerSide(client, batch.concurrency)
