"""Opening of engines: models are loaded, and an engine runs on each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import anyio.to_thread

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.agreement import agreed
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.engine_group import EngineGroup, Served, run_engines
from staged_pool.runtime.engine.host_loop import OwnTask
from staged_pool.runtime.engine.shared_threads import shared_threads
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.plugins.find import all_plugins
from staged_pool.runtime.plugins.processor import Plugin
from staged_pool.stages.exception_groups import single_errors


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
) -> OwnTask[EngineGroup[Engine]]:
    """Load several models and run an engine on each, and on each plugin. The block gets the engines by name.

    Each engine has its own stages, queues and limits. Engines share the device threads, where their batches take turns,
    and the preprocess threads; texts and images have separate threads. Loading, draining and stopping are as for
    `open_engine`. An engine that breaks does not affect the others. `EngineGroup.load` and `EngineGroup.unload` add and
    remove models while the others serve.

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


@asynccontextmanager
async def _all_running(
    configs: Sequence[EngineConfig], memory: MemoryGovernor | None, plugins: Sequence[Plugin]
) -> AsyncIterator[EngineGroup[Engine]]:
    """See `open_engines`; but one task must both enter and leave it."""
    first = agreed(configs)
    served = await anyio.to_thread.run_sync(_with_plugins, configs, plugins)  # reads the metadata of all packages
    governor = memory or governor_for(first)
    async with shared_threads(first) as threads:
        with single_errors():
            async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
                group = EngineGroup(tasks, threads, governor, first, run_engines)
                await group.open(served)
                if memory is None:
                    await stack.enter_async_context(_watched(governor))
                yield group
                await group.drain()


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


def _with_plugins(configs: Sequence[EngineConfig], given: Sequence[Plugin]) -> list[Served[Engine]]:
    """Return each model with its plugins. One that several models name belongs to the first of them."""
    named: set[str] = set()
    served: list[Served[Engine]] = []
    for place, config in enumerate(configs):
        names = [name for name in config.plugin if name not in named]
        named.update(names)
        served.append(Served(config, all_plugins(names, given if place == 0 else ())))
    return served
