"""The files and batches of one server: opened from their folder, and run by its engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.to_thread

from staged_pool.api.app.batch_work import BatchWork
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.batches.folder import Folder
from staged_pool.api.batches.runner import BatchRunner
from staged_pool.api.batches.store import Store
from staged_pool.api.bulk.batch_lines import BatchAnswers
from staged_pool.api.config import ServerConfig
from staged_pool.stages.exception_groups import single_errors


@dataclass(frozen=True, slots=True)
class Batches:
    """Files and batches of one server."""

    store: Store
    runner: BatchRunner


@asynccontextmanager
async def batches_of(config: ServerConfig, registry: EngineRegistry) -> AsyncIterator[Batches | None]:
    """Open the files and batches of a server for the length of a block; None if they are off.

    Batches run from `runner.start()` on. At the end of the block, requests in flight end and are saved. The rest
    goes on when the folder is opened again.

    Args:
        config: Settings of the server.
        registry: The engines.

    Raises:
        ConfigError: The folder cannot be used.
    """
    if config.batch_dir is None:
        yield None
        return

    def make_work(answers: BatchAnswers, tenant: Hashable) -> BatchWork:
        return BatchWork(registry, answers, auto_truncate=config.auto_truncate, tenant=tenant)

    folder = await anyio.to_thread.run_sync(Folder, config.batch_dir)
    try:
        store = Store(folder, config.batch_dir_limit_bytes)
        await store.load()
        runner = BatchRunner(store, make_work)
        with single_errors():
            async with anyio.create_task_group() as running:
                running.start_soon(runner.run)
                try:
                    yield Batches(store, runner)
                finally:
                    runner.stop()
    finally:
        folder.close()
