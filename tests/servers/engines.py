"""Engines on models that a test holds, opened as a server opens its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

from staged_pool.api.http.server import OpenEngines
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engines
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.media.image_completer import Fetch, reject_fetch
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.model import Model
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.stage import StageOptions

Given: TypeAlias = Model | EngineConfig
"""A model that the test holds, or the settings of one that is loaded."""


@asynccontextmanager
async def engine_on(
    model: Model,
    config: EngineConfig | None = None,
    memory: MemoryGovernor | None = None,
    *,
    options: StageOptions | None = None,
    fetch: Fetch = reject_fetch,
) -> AsyncIterator[Engine]:
    """Run a real engine on a model, with device threads for each lane."""
    config = config or EngineConfig()
    async with AsyncExitStack() as stack:
        devices = {}
        for lane in model.card.lanes:
            threads = DeviceThreads(f"test device of {lane}", watchdog_s=config.watchdog_s)
            devices[lane] = await stack.enter_async_context(threads.running(model.card.forward_workers))
        yield await stack.enter_async_context(
            run_engine(
                config,
                model,
                device=devices[model.card.lanes[0]],
                image_device=devices.get("image"),
                fetch=fetch,
                options=options,
                memory=memory,
            )
        )


def engines_on(*models: Model, options: StageOptions | None = None, fetch: Fetch = reject_fetch) -> OpenEngines:
    """Return a function that opens an engine on each model, with the same settings."""

    @asynccontextmanager
    async def open_(configs: Sequence[EngineConfig], memory: MemoryGovernor) -> AsyncIterator[Mapping[str, Engine]]:
        (config,) = configs
        async with AsyncExitStack() as stack:
            opened = [engine_on(model, config, memory, options=options, fetch=fetch) for model in models]
            engines = [await stack.enter_async_context(each) for each in opened]
            yield {engine.card.name: engine for engine in engines}

    return open_


def opening(
    models: Sequence[Given],
    engine: EngineConfig | None = None,
    options: StageOptions | None = None,
    fetch: Fetch = reject_fetch,
) -> tuple[Sequence[EngineConfig], OpenEngines]:
    """Return the settings of the engines of a server, and the function that opens them.

    Args:
        models: All of one kind.
        engine: Settings of each engine on a double.
        options: As of `run_engine`, for doubles.
        fetch: As of `run_engine`, for doubles.
    """
    loaded = [model for model in models if isinstance(model, EngineConfig)]
    if loaded:
        assert len(loaded) == len(models), "doubles beside models that are loaded"
        assert (engine, options, fetch) == (None, None, reject_fetch), "these are for doubles"
        return loaded, open_engines
    doubles = [model for model in models if not isinstance(model, EngineConfig)]
    return [engine or EngineConfig()], engines_on(*doubles, options=options, fetch=fetch)
