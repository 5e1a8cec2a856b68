"""Engines on shared threads and memory, whose models come and go while others serve."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeAlias, TypeVar

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup, TaskStatus

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.agreement import agreed, check_names
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.model_loading import LoadThread, OverdueLoads, share_memory_of
from staged_pool.runtime.engine.open_plugins import run_plugin
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.engine.shared_threads import SharedThreads, ThreadNeeds, needs_cores
from staged_pool.runtime.engine.weight_memory import expected_bytes
from staged_pool.runtime.load_progress import load_progress
from staged_pool.runtime.media.fetcher import MediaFetcher
from staged_pool.runtime.media.files import check_folder
from staged_pool.runtime.memory.allocator import give_back_freed_memory
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.model import LoadedModel
from staged_pool.runtime.models.find import FoundModel
from staged_pool.runtime.models.sharing import share_bases
from staged_pool.runtime.plugins.processor import PluginClass
from staged_pool.runtime.threads.dedicated_threads import DedicatedThreads
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.stage import StageOptions

E = TypeVar("E", bound="Drainable")


class Drainable(Protocol):
    """An engine, as far as its group is concerned."""

    async def drain(self, timeout_s: float) -> None:
        """See `Engine.drain`."""


@dataclass(slots=True, eq=False)
class Served(Generic[E]):
    """One model with its plugins, or plugins without a model."""

    config: EngineConfig
    plugins: Sequence[PluginClass] = ()
    found: FoundModel | None = None
    model: LoadedModel | None = None
    engines: Mapping[str, E] = field(default_factory=dict)
    leave: anyio.Event = field(default_factory=anyio.Event)
    """Set to end its engines, after a drain."""
    ended: anyio.Event = field(default_factory=anyio.Event)
    """Set when its engines have ended."""
    is_closed: bool = False

    @property
    def has_model(self) -> bool:
        """True if a model is served: one is named, or there are no plugins that could do without."""
        return self.config.model is not None or not self.plugins

    @property
    def needs(self) -> ThreadNeeds:
        """Threads that it can keep busy."""
        return ThreadNeeds.of(self.model, self.config, len(self.plugins))

    async def close(self) -> None:
        """End the processes of its model. Not interrupted by a cancellation."""
        if self.model is not None and not self.is_closed:
            self.is_closed = True
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.model.close)

    def release(self) -> None:
        """Drop every reference to its model and its engines, whose calls have ended."""
        if self.model is not None:
            self.model.release()
        self.model, self.found, self.engines = None, None, {}


Running: TypeAlias = Callable[
    [Served[E], SharedThreads, StageOptions, MemoryGovernor], AbstractAsyncContextManager[Mapping[str, E]]
]
"""Runs the engines of one model for a block."""


class EngineGroup(Mapping[str, E], Generic[E]):
    """Engines by name, on shared threads and memory. Each model has a task of its own.

    `load` adds a model, and `unload` removes one, while the others serve. Of two engines with one name, the mapping has
    the later one.

    Args:
        tasks: Runs the engines.
        threads: Threads that they share.
        governor: Memory governor of this process.
        shared: Settings that all models share.
        running: Runs the engines of each model.
    """

    def __init__(
        self,
        tasks: TaskGroup,
        threads: SharedThreads,
        governor: MemoryGovernor,
        shared: EngineConfig,
        running: Running[E],
    ) -> None:
        self._tasks = tasks
        self._threads = threads
        self._governor = governor
        self._shared = shared
        self._running = running
        self._options = StageOptions()
        self._served: list[Served[E]] = []
        self._engines: dict[str, E] = {}
        self._loading = anyio.Lock()
        self._overdue = OverdueLoads()

    def __getitem__(self, name: str) -> E:
        return self._engines[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    async def open(self, served: Sequence[Served[E]]) -> None:
        """Load the first models, on a device thread, and run their engines.

        Raises:
            ConfigError: A model cannot be loaded, or two have the same name.
        """
        for each in served:
            check_folder(each.config.allow_media_path)
        check_names([each.config.served_name for each in served if each.config.served_name])  # loading takes minutes
        await self._start(served, self._loader(self._threads.device))

    async def load(self, config: EngineConfig, admit: Callable[[int], None] | None = None) -> E:
        """Load one more model, and run an engine on it. Loads have a thread of their own, and wait for each other.

        A model of the same name goes on until it is unloaded. A load that has begun cannot be interrupted: a
        cancellation is raised when it has ended. A failed load changes nothing. One that takes longer than
        `load_timeout_s` is given up: its thread is left behind with the memory that it holds, and until it ends, other
        loads are rejected at once.

        Args:
            config: Settings of the model. `config.plugin` is not read.
            admit: Called with the bytes of the weights, as far as files tell, before they are read. It may raise.

        Raises:
            ConfigError: The model cannot be loaded, or settings of shared resources differ.
            LoadTimedOut: It took too long, or an earlier load hangs.
            NoRoom: There was no memory for it.
        """
        agreed((self._shared, config))
        check_folder(config.allow_media_path)
        served: Served[E] = Served(config)
        async with (
            self._loading,
            DeviceThreads("staged-pool loader", watchdog_s=self._shared.watchdog_s).running() as loader,
        ):
            self._overdue.check()
            await self._start([served], self._loader(loader), admit)
        return next(iter(served.engines.values()))

    async def unload(self, engine: E) -> None:
        """End the engine of a model: drain it, and give its threads and memory back. Not interrupted once begun.

        Its plugins end with it.
        """
        with anyio.CancelScope(shield=True):
            for served in [each for each in self._served if engine in each.engines.values()]:
                served.leave.set()
                await served.ended.wait()
            await anyio.to_thread.run_sync(give_back_freed_memory)
            await anyio.to_thread.run_sync(self._governor.measure, self._cache_bytes())

    async def drain(self) -> None:
        """End all engines, and wait for them."""
        for each in self._served:
            each.leave.set()
        for each in list(self._served):
            await each.ended.wait()

    def _loader(self, threads: DedicatedThreads) -> LoadThread:
        return LoadThread(threads, self._shared.load_timeout_s, self._governor, self._overdue)

    async def _start(
        self, served: Sequence[Served[E]], loader: LoadThread, admit: Callable[[int], None] | None = None
    ) -> None:
        """Load models, and start their engines. After a failure nothing of them is left."""
        self._served += served
        try:
            await self._load_all(served, loader, admit)
            await anyio.to_thread.run_sync(self._governor.measure, self._cache_bytes())
            for each in served:
                await self._tasks.start(self._run, each)
        except BaseException:
            for each in served:
                await each.close()
                self._forget(each)
            raise

    async def _load_all(
        self, served: Sequence[Served[E]], loader: LoadThread, admit: Callable[[int], None] | None
    ) -> None:
        """Load and warm up models."""
        progress = load_progress()
        with_model = [each for each in served if each.has_model]
        for each in with_model:
            each.found = await loader.find(each.config, progress)  # before torch is imported
        check_names(
            [each.found.name for each in with_model if each.found]
            + [plugin.name for each in served for plugin in each.plugins]
        )
        if admit is not None:
            admit(sum([await loader.run(self._expected_bytes, each) for each in with_model]))
        found = [(each.config, each.found) for each in with_model if each.found is not None]
        for sharing in await loader.run(share_bases, found):
            loaded_together = await loader.load(found, sharing, progress)
            for place, model in zip(sharing.places, loaded_together, strict=True):
                with_model[place].model = model
        self._threads.fit([each.needs for each in self._served])
        loaded = [each.model for each in with_model if each.model is not None]
        if loaded:
            beside = [each.model for each in self._served if each.model is not None and each not in served]
            shared = await loader.run(share_memory_of, [*beside, *loaded])
            for each, model in zip(with_model, shared[len(beside) :], strict=True):
                each.model = model
                self._threads.limit_cores(model)
                await self._threads.warm_up(model)

    async def _run(self, served: Served[E], *, task_status: TaskStatus[None]) -> None:
        """Run the engines of one model until it leaves."""
        try:
            async with self._running(served, self._threads, self._options, self._governor) as served.engines:
                try:
                    self._engines |= served.engines
                    task_status.started()
                    await served.leave.wait()
                    async with anyio.create_task_group() as draining:
                        for engine in served.engines.values():
                            draining.start_soon(engine.drain, self._shared.drain_timeout_s)
                finally:
                    # Before engines and threads wait for running calls: a call that hangs in a process ends with it.
                    await served.close()
        finally:
            self._forget(served)

    def _forget(self, served: Served[E]) -> None:
        """Give the threads of a model back, and every reference to it."""
        if served in self._served:
            self._served.remove(served)
        for name, engine in served.engines.items():
            if self._engines.get(name) is engine:
                del self._engines[name]
        served.release()
        self._threads.fit([each.needs for each in self._served])
        served.ended.set()

    def _expected_bytes(self, served: Served[E]) -> int:
        """Return the bytes that the weights of a model will take, by its files.

        The data type `auto` is that of another model here, as the machine decides it.
        """
        wanted = served.config.dtype
        alike = [each.model.card.dtype for each in self._served if each.model and each.config.dtype == wanted]
        return 0 if served.found is None else expected_bytes(served.found, served.config, [*alike, "float32"][0])

    def _cache_bytes(self) -> int:
        """Return the bytes that caches may take."""
        return sum(10**6 * (each.config.image_cache_mb + each.config.result_cache_mb) for each in self._served)


@asynccontextmanager
async def run_engines(
    served: Served[Engine], threads: SharedThreads, options: StageOptions, governor: MemoryGovernor
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
                preprocess=threads.preprocess.part(),
                image_preprocess=threads.image_preprocess.part(),
                offload=threads.offload.part(),
                fetch=MediaFetcher(config).fetch,
                shared_cores=threads.cores if needs_cores(model) else None,
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
