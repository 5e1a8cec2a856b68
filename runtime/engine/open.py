"""Opening of engines: models are loaded, and an engine runs on each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import anyio
import anyio.to_thread

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.engine_stages import POSTPROCESS_WORKERS
from staged_pool.runtime.engine.host_loop import OwnTask
from staged_pool.runtime.engine.open_plugins import run_plugin
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.machine.cores import usable_cores
from staged_pool.runtime.media.fetcher import MediaFetcher
from staged_pool.runtime.media.files import check_folder
from staged_pool.runtime.memory.budget import MemoryBudget
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.model import LoadedModel
from staged_pool.runtime.models.find import FoundModel, find_model
from staged_pool.runtime.models.images.torchvision import leave_out_broken_torchvision
from staged_pool.runtime.plugins.find import all_plugins
from staged_pool.runtime.plugins.processor import Plugin, PluginClass
from staged_pool.runtime.threads.core_limiter import CoreLimiter
from staged_pool.runtime.threads.dedicated_threads import DedicatedThreads
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.offload import ThreadOffload
from staged_pool.stages.stage import StageOptions

SHARED_SETTINGS = (
    "device", "forward_workers", "preprocess_limit", "image_preprocess_limit", "torch_threads", "watchdog_s",
    "drain_timeout_s", "memory_limit_bytes",
)  # fmt: skip
"""Settings that must be equal in all engines which share threads and memory."""

IMAGE_NICE: Final = 10
"""Niceness of threads that decode images or compute them on the CPU.

They keep all cores busy, so other threads go first, above all the event loop. On two cores this halves the latency of
`/health` beside images, at no cost for images. Forwards of texts are too short to gain by it.
"""


def open_engine(config: EngineConfig | None = None, *, plugins: Sequence[Plugin] = ()) -> OwnTask[Engine]:
    """Load a model and run an engine on it, in the caller's event loop.

    Use it as `async with open_engine(config) as engine`, on asyncio or trio. One task may enter the block and another
    task of the same event loop leave it, with `contextlib.AsyncExitStack` or by `__aenter__` and `__aexit__`.

    Several engines may be open at once. Each then has its own device threads and limits; engines of `open_engines`
    share them. Loading cannot be interrupted: a cancellation is raised when it has ended. At the end of the block the
    engine drains for `config.drain_timeout_s` seconds. If the block raised or was cancelled, the engine stops as soon
    as running forwards have ended.

    Args:
        config: Settings of the engine. None: the defaults.
        plugins: Plugins beside those that `config.plugin` names: objects, or classes to be made. `engine.process` uses
            them. If there are plugins and `config.model` is None, no model is loaded.

    Raises:
        ConfigError: On entering: the settings, the model folder, a plugin or the machine do not allow it.
    """
    return OwnTask(lambda: _one_running(config or EngineConfig(), plugins), "The engine")


def open_engines(
    configs: Sequence[EngineConfig], memory: MemoryGovernor | None = None, *, plugins: Sequence[Plugin] = ()
) -> OwnTask[Mapping[str, Engine]]:
    """Load several models and run an engine on each, and on each plugin. The block gets the engines by name.

    Each engine has its own stages, queues and limits. Engines share the device threads, where their batches take turns,
    and the preprocess threads; texts and images have separate threads. Loading, draining and stopping are as for
    `open_engine`. An engine that breaks does not affect the others.

    Args:
        configs: At least one. Settings of shared resources must be equal in all of them.
        memory: Memory governor of this process, which its owner must run. None: the engines have one of their own.
        plugins: As for `open_engine`, beside the first model.

    Raises:
        ConfigError: As for `open_engine`; or two models have the same name, or settings of shared resources differ.
    """
    return OwnTask(lambda: _all_running(configs, memory, plugins), "The engines")


@asynccontextmanager
async def _one_running(config: EngineConfig, plugins: Sequence[Plugin]) -> AsyncIterator[Engine]:
    async with _all_running([config], None, plugins) as engines:
        yield next(iter(engines.values()))


@dataclass(slots=True)
class _Served:
    """One model with its plugins, or plugins without a model."""

    config: EngineConfig
    plugins: Sequence[PluginClass]
    found: FoundModel | None = None
    model: LoadedModel | None = None

    @property
    def has_model(self) -> bool:
        """True if a model is served: one is named, or there are no plugins that could do without."""
        return self.config.model is not None or not self.plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class _Threads:
    """Threads that all engines of one opening share."""

    device: DeviceThreads
    image_device: DeviceThreads
    image_preprocess: DedicatedThreads
    preprocess: ThreadOffload
    offload: ThreadOffload
    cores: int

    def grow(self, model: LoadedModel, config: EngineConfig, limiter: CoreLimiter) -> None:
        """Make room for the calls of one more model."""
        threads = model.card.forward_calls
        self.device.grow(threads)
        if "image" in model.card.lanes:
            self.image_device.grow(threads)
            self.image_preprocess.grow(config.image_preprocess_threads)
            self.image_preprocess.core = limiter.acquire
            if _needs_cores(model):
                self.image_device.core, self.device.core = limiter.acquire, limiter.bypass

    async def warm_up(self, model: LoadedModel) -> None:
        """Run a forward of each lane on each thread."""
        for lane in model.card.lanes:
            await (self.image_device if lane == "image" else self.device).run_on_each(model.warm_up, lane)


@asynccontextmanager
async def _all_running(
    configs: Sequence[EngineConfig], memory: MemoryGovernor | None, plugins: Sequence[Plugin]
) -> AsyncIterator[Mapping[str, Engine]]:
    """See `open_engines`; but one task must both enter and leave it."""
    first = _agreed(configs)
    for config in configs:
        check_folder(config.allow_media_path)
    served = await anyio.to_thread.run_sync(_with_plugins, configs, plugins)  # reads the metadata of all packages
    _check_names([config.served_name for config in configs if config.served_name])  # loading may take minutes
    options, governor = StageOptions(), memory or governor_for(first)
    async with (
        DeviceThreads("staged-pool device", watchdog_s=first.watchdog_s).running() as device,
        DeviceThreads("staged-pool image device", watchdog_s=first.watchdog_s, nice=IMAGE_NICE).running(
            0
        ) as image_device,
        DedicatedThreads("staged-pool image preprocess", nice=IMAGE_NICE).running(0) as image_preprocess,
        AsyncExitStack() as stack,
    ):
        threads = _Threads(
            device=device,
            image_device=image_device,
            image_preprocess=image_preprocess,
            preprocess=ThreadOffload(first.preprocess_limit),
            offload=ThreadOffload(POSTPROCESS_WORKERS),
            cores=usable_cores(),
        )
        try:
            await _load_all(served, threads, governor)
            caches = sum(10**6 * (config.image_cache_mb + config.result_cache_mb) for config in configs)
            await device.run(governor.measure, caches)
            if memory is None:
                await stack.enter_async_context(_watched(governor))
            engines: dict[str, Engine] = {}
            for each in served:
                engines |= await stack.enter_async_context(_running(each, threads, options, governor))
            yield engines
            async with anyio.create_task_group() as draining:
                for engine in engines.values():
                    draining.start_soon(engine.drain, first.drain_timeout_s)
        finally:
            # Before engines and threads wait for running calls: a call that hangs in a process ends with it.
            with anyio.CancelScope(shield=True):
                for each in served:
                    if each.model is not None:
                        await anyio.to_thread.run_sync(each.model.close)


async def _load_all(served: Sequence[_Served], threads: _Threads, governor: MemoryGovernor) -> None:
    """Load and warm up all models."""
    device, with_model = threads.device, [each for each in served if each.has_model]
    limiter = CoreLimiter(threads.cores)
    for each in with_model:
        each.found = await device.run(find_model, each.config)  # before torch is imported
    _check_names(
        [each.found.name for each in with_model if each.found]
        + [plugin.name for each in served for plugin in each.plugins]
    )
    for each in with_model:
        if each.found is not None:
            each.model = await device.run(partial(_load, each.config, governor.budget), each.found)
            threads.grow(each.model, each.config, limiter)
    loaded = [each.model for each in with_model if each.model is not None]
    if loaded:
        shared = await device.run(_share_memory, loaded)
        for each, model in zip(with_model, shared, strict=True):
            each.model = model
            await threads.warm_up(model)
    device.grow(sum(len(each.plugins) for each in served))


@asynccontextmanager
async def _running(
    served: _Served, threads: _Threads, options: StageOptions, governor: MemoryGovernor
) -> AsyncIterator[Mapping[str, Engine]]:
    """Run the engines of one model and its plugins, for a block."""
    config, model = served.config, served.model
    folder = None if served.found is None else str(served.found.folder.path)
    engines: dict[str, Engine] = {}
    async with AsyncExitStack() as stack:
        if model is not None:
            running = run_engine(
                config,
                model,
                device=threads.device,
                image_device=threads.image_device,
                preprocess=threads.preprocess,
                image_preprocess=threads.image_preprocess,
                offload=threads.offload,
                fetch=MediaFetcher(config).fetch,
                shared_cores=threads.cores if _needs_cores(model) else None,
                options=options,
                memory=governor,
            )
            engines[model.card.name] = await stack.enter_async_context(running)
        plugins: dict[str, Engine] = {}
        for plugin in served.plugins:
            opened = run_plugin(
                plugin, config, model, device=threads.device, folder=folder, options=options, memory=governor
            )
            plugins[plugin.name] = await stack.enter_async_context(opened)
        engines |= plugins
        for engine in engines.values():
            engine.plugins = plugins
        yield engines


def governor_for(config: EngineConfig) -> MemoryGovernor:
    """Make the memory governor for the settings of an engine."""
    return MemoryGovernor(config.memory_limit_bytes)


@asynccontextmanager
async def _watched(governor: MemoryGovernor) -> AsyncIterator[None]:
    with single_errors():
        async with anyio.create_task_group() as watching:
            watching.start_soon(governor.watch)
            yield
            watching.cancel_scope.cancel()


def _agreed(configs: Sequence[EngineConfig]) -> EngineConfig:
    """Return the first settings, after a check that all agree on shared resources."""
    if not configs:
        raise ConfigError("no model: at least one is needed")
    first = configs[0]
    for name in SHARED_SETTINGS:
        if len(values := {getattr(config, name) for config in configs}) > 1:
            found = " and ".join(sorted(map(repr, values)))
            raise ConfigError(f"{name}={found}: models that share a device must agree on it")
    return first


def _with_plugins(configs: Sequence[EngineConfig], given: Sequence[Plugin]) -> list[_Served]:
    """Return each model with its plugins. One that several models name belongs to the first of them."""
    named: set[str] = set()
    served = []
    for place, config in enumerate(configs):
        names = [name for name in config.plugin if name not in named]
        named.update(names)
        served.append(_Served(config, all_plugins(names, given if place == 0 else ())))
    return served


def _check_names(names: Sequence[str]) -> None:
    if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
        raise ConfigError(f"served_name={twice!r}: two models or plugins have this name; name them apart")


def _needs_cores(model: LoadedModel) -> bool:
    """Return True if forwards compute in their thread, and do not wait for another device."""
    return model.card.device.startswith("cpu")


def _load(config: EngineConfig, memory: MemoryBudget, found: FoundModel) -> LoadedModel:
    leave_out_broken_torchvision()
    from staged_pool.runtime.models.load import load_model  # imports torch, which takes seconds: off the event loop

    return load_model(config, found, memory)


def _share_memory(models: Sequence[LoadedModel]) -> Sequence[LoadedModel]:
    from staged_pool.runtime.models.encoder import Encoder
    from staged_pool.runtime.models.load import share_memory

    shared = iter(share_memory([model for model in models if isinstance(model, Encoder)]))
    return [next(shared) if isinstance(model, Encoder) else model for model in models]
