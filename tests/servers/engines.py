"""Engines on models that a test holds, opened as a server opens its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeAlias

from staged_pool.api.http.server import OpenEngines
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engines
from staged_pool.runtime.engine.open_plugins import run_plugin
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.media.image_completer import Fetch, reject_fetch
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.model import Model
from staged_pool.runtime.plugins.processor import PluginClass, PluginLike, Processor, name_of
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.stage import StageOptions

Given: TypeAlias = Model | EngineConfig | Processor
"""A model that the test holds, settings of one to load, or a plugin."""


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


@asynccontextmanager
async def engine_of_plugin(
    plugin: PluginLike,
    model: Model | None = None,
    config: EngineConfig | None = None,
    memory: MemoryGovernor | None = None,
    *,
    options: StageOptions | None = None,
) -> AsyncIterator[Engine]:
    """Run a real engine on a plugin, with a device thread. Its name is that of its class."""
    config = config or EngineConfig()
    name = name_of(plugin)
    async with (
        DeviceThreads(f"test device of {name}", watchdog_s=config.watchdog_s).running(1) as device,
        run_plugin(
            PluginClass(name, lambda: plugin), config, model, device=device, options=options, memory=memory
        ) as engine,
    ):
        engine.plugins = {name: engine}
        yield engine


def engines_on(
    *models: Model | Processor, options: StageOptions | None = None, fetch: Fetch = reject_fetch
) -> OpenEngines:
    """Return a function that opens an engine on each model and plugin.

    All have the same settings. A plugin stands beside the first model.
    """

    @asynccontextmanager
    async def open_(configs: Sequence[EngineConfig], memory: MemoryGovernor) -> AsyncIterator[Mapping[str, Engine]]:
        (config,) = configs
        async with AsyncExitStack() as stack:
            base = next((model for model in models if not isinstance(model, Processor)), None)
            opened = [
                engine_of_plugin(model, base, config, memory, options=options)
                if isinstance(model, Processor)
                else engine_on(model, config, memory, options=options, fetch=fetch)
                for model in models
            ]
            engines = [await stack.enter_async_context(each) for each in opened]
            for engine in engines:
                engine.plugins = {each.card.name: each for each in engines if each.card.is_plugin}
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
