"""Opening of engines: models are loaded, and an engine runs on each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final

import anyio
import anyio.to_thread

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.engine_stages import POSTPROCESS_WORKERS
from staged_pool.runtime.engine.host_loop import OwnTask
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.machine.cores import usable_cores
from staged_pool.runtime.media.fetcher import MediaFetcher
from staged_pool.runtime.media.files import check_folder
from staged_pool.runtime.memory.budget import MemoryBudget
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.model import LoadedModel
from staged_pool.runtime.models.find import FoundModel, find_model
from staged_pool.runtime.models.images.torchvision import leave_out_broken_torchvision
from staged_pool.runtime.threads.core_limiter import CoreLimiter
from staged_pool.runtime.threads.dedicated_threads import DedicatedThreads
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.errors import ConfigError
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


def open_engine(config: EngineConfig | None = None) -> OwnTask[Engine]:
    """Load a model and run an engine on it, in the caller's event loop.

    Use it as `async with open_engine(config) as engine`, on asyncio or trio. One task may enter the block and another
    task of the same event loop leave it, with `contextlib.AsyncExitStack` or by `__aenter__` and `__aexit__`.

    Several engines may be open at once. Each then has its own device threads and limits; engines of `open_engines`
    share them. Loading cannot be interrupted: a cancellation is raised when it has ended. At the end of the block the
    engine drains for `config.drain_timeout_s` seconds. If the block raised or was cancelled, the engine stops as soon
    as running forwards have ended.

    Raises:
        ConfigError: On entering: the settings, the model folder or the machine do not allow it.
    """
    return OwnTask(lambda: _one_running(config or EngineConfig()), "The engine")


def open_engines(
    configs: Sequence[EngineConfig], memory: MemoryGovernor | None = None
) -> OwnTask[Mapping[str, Engine]]:
    """Load several models and run an engine on each. The block gets the engines by served name.

    Each engine has its own stages, queues and limits. Engines share the device threads, where their batches take turns,
    and the preprocess threads; texts and images have separate threads. Loading, draining and stopping are as for
    `open_engine`. An engine that breaks does not affect the others.

    Args:
        configs: At least one. Settings of shared resources must be equal in all of them.
        memory: Memory governor of this process, which its owner must run. None: the engines have one of their own.

    Raises:
        ConfigError: As for `open_engine`; or two models have the same name, or settings of shared resources differ.
    """
    return OwnTask(lambda: _all_running(configs, memory), "The engines")


@asynccontextmanager
async def _one_running(config: EngineConfig) -> AsyncIterator[Engine]:
    async with _all_running([config]) as engines:
        (engine,) = engines.values()
        yield engine


@asynccontextmanager
async def _all_running(
    configs: Sequence[EngineConfig], memory: MemoryGovernor | None = None
) -> AsyncIterator[Mapping[str, Engine]]:
    """See `open_engines`; but one task must both enter and leave it."""
    first = _agreed(configs)
    for config in configs:
        check_folder(config.allow_media_path)
    _check_names([config.served_name for config in configs if config.served_name])  # loading may take minutes
    options = StageOptions()
    governor = memory or governor_for(first)
    cores = usable_cores()
    limiter = CoreLimiter(cores)
    preprocess, offload = ThreadOffload(first.preprocess_limit), ThreadOffload(POSTPROCESS_WORKERS)
    async with (
        DeviceThreads("staged-pool device", watchdog_s=first.watchdog_s).running() as device,
        DeviceThreads("staged-pool image device", watchdog_s=first.watchdog_s, nice=IMAGE_NICE).running(
            0
        ) as image_device,
        DedicatedThreads("staged-pool image preprocess", nice=IMAGE_NICE).running(0) as image_preprocess,
        AsyncExitStack() as stack,
    ):
        models: list[LoadedModel] = []
        try:
            found = [await device.run(find_model, config) for config in configs]  # before torch is imported
            _check_names([one.name for one in found])
            for config, one in zip(configs, found, strict=True):
                models.append(model := await device.run(partial(_load, config, governor.budget), one))
                threads = model.card.forward_calls
                device.grow(threads)
                if "image" in model.card.lanes:
                    image_device.grow(threads)
                    image_preprocess.grow(first.image_preprocess_threads)
                    image_preprocess.core = limiter.acquire
                    if _needs_cores(model):
                        image_device.core, device.core = limiter.acquire, limiter.bypass
            models[:] = await device.run(_share_memory, models)
            for model in models:
                for lane in model.card.lanes:
                    await (image_device if lane == "image" else device).run_on_each(model.warm_up, lane)
            caches = sum(10**6 * (config.image_cache_mb + config.result_cache_mb) for config in configs)
            await device.run(governor.measure, caches)
            if memory is None:
                await stack.enter_async_context(_watched(governor))
            engines: dict[str, Engine] = {}
            for config, model in zip(configs, models, strict=True):
                running = run_engine(
                    config,
                    model,
                    device=device,
                    image_device=image_device,
                    preprocess=preprocess,
                    image_preprocess=image_preprocess,
                    offload=offload,
                    fetch=MediaFetcher(config).fetch,
                    shared_cores=cores if _needs_cores(model) else None,
                    options=options,
                    memory=governor,
                )
                engines[model.card.name] = await stack.enter_async_context(running)
            yield engines
            async with anyio.create_task_group() as draining:
                for engine in engines.values():
                    draining.start_soon(engine.drain, first.drain_timeout_s)
        finally:
            # Before engines and threads wait for running calls: a call that hangs in a process ends with it.
            with anyio.CancelScope(shield=True):
                for model in models:
                    await anyio.to_thread.run_sync(model.close)


def governor_for(config: EngineConfig) -> MemoryGovernor:
    """Make the memory governor for the settings of an engine."""
    return MemoryGovernor(config.memory_limit_bytes)


@asynccontextmanager
async def _watched(governor: MemoryGovernor) -> AsyncIterator[None]:
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


def _check_names(names: Sequence[str]) -> None:
    if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
        raise ConfigError(f"served_name={twice!r}: two models have this name; name them apart")


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
