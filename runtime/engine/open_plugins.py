"""Opening of plugins: each runs on an engine of its own, beside that of the model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.media.fetcher import MediaFetcher
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.model import Model
from staged_pool.runtime.plugins.host import PluginHost
from staged_pool.runtime.plugins.model import PluginModel
from staged_pool.runtime.plugins.processor import Fetch, PluginClass, PluginSetup
from staged_pool.runtime.requests import Image
from staged_pool.stages.offload import Offload
from staged_pool.stages.stage import StageOptions


@asynccontextmanager
async def run_plugin(
    plugin: PluginClass,
    config: EngineConfig,
    model: Model | None,
    *,
    device: Offload,
    folder: str | None = None,
    options: StageOptions | None = None,
    memory: MemoryGovernor | None = None,
) -> AsyncIterator[Engine]:
    """Make a plugin, and run an engine on it for the length of a block.

    Args:
        plugin: Makes the plugin, on the device.
        config: Settings of the engine.
        model: The served model, whose forward a plugin without one of its own uses. None: there is none.
        device: Runs forwards, of the plugin or of the model.
        folder: Folder of the model.
        options: See `run_engine`.
        memory: See `run_engine`.

    Raises:
        ConfigError: The plugin cannot be made, or does not fit the model.
    """
    options = options or StageOptions()
    config = replace(config, coalesce=False, result_cache_mb=0)  # equal data may have other outputs
    setup = PluginSetup(
        config=config, card=None if model is None else model.card, fetch=fetch_under_rules(config), folder=folder
    )
    began = time.perf_counter()
    made = await device(plugin, setup)
    if most := getattr(made, "max_batch_items", None):
        config = replace(config, max_batch_items=min(most, config.max_batch_items))
    host = PluginHost(plugin.name, made, config, options.clock)
    served = PluginModel(host, model, config, load_s=time.perf_counter() - began)
    async with host.running(), run_engine(config, served, device=device, options=options, memory=memory) as engine:
        yield engine


def fetch_under_rules(config: EngineConfig) -> Fetch:
    """Return a function that fetches URLs under the rules for images."""
    fetcher = MediaFetcher(config)

    async def fetch(url: str) -> bytes:
        source = (await fetcher.fetch(Image(url))).source
        if not isinstance(source, bytes):
            raise TypeError("a fetched URL has bytes")
        return source

    return fetch
