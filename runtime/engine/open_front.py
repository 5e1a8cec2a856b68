"""Engines of a front: their models compute in the engine process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

import anyio
import anyio.to_thread

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.lanes import input_tokens, lane_service_time
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.engine.shared_threads import SharedThreads, ThreadNeeds, shared_threads
from staged_pool.runtime.media.fetcher import MediaFetcher
from staged_pool.runtime.media.image_completer import Fetch, reject_fetch
from staged_pool.runtime.memory.budget import MemoryBudget
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.model import Preparer
from staged_pool.runtime.models.input_preparer import load_preparer
from staged_pool.runtime.remote.line import FrontLine, kept
from staged_pool.runtime.remote.messages import ModelTerms
from staged_pool.runtime.remote.model import RemoteModel
from staged_pool.stages.offload import Offload
from staged_pool.stages.stage import StageOptions

A = TypeVar("A")
T = TypeVar("T")


@asynccontextmanager
async def run_front_engine(
    config: EngineConfig,
    model: Preparer,
    line: FrontLine,
    *,
    preprocess: Offload | None = None,
    image_preprocess: Offload | None = None,
    offload: Offload | None = None,
    fetch: Fetch = reject_fetch,
    options: StageOptions | None = None,
    memory: MemoryGovernor | None = None,
    engine_class: type[Engine] = Engine,
) -> AsyncIterator[Engine]:
    """Run an engine for a block: it prepares here, and computes in the engine process.

    Args:
        config: Settings of the engine.
        model: Prepares requests. Its forward is never called.
        line: The line to the engine process, which has welcomed this front. The models must come in its order.
        preprocess: See `run_engine`.
        image_preprocess: See `run_engine`.
        offload: See `run_engine`.
        fetch: See `run_engine`.
        options: See `run_engine`.
        memory: See `run_engine`.
        engine_class: See `run_engine`.
    """
    options, number, card = options or StageOptions(), len(line.models), model.card
    remote = RemoteModel(
        line,
        number,
        config,
        line.terms[number],
        service_times={lane: lane_service_time(lane, config, card) for lane in card.lanes},
        input_tokens=input_tokens(config, card),
        clock=options.clock,
    )
    remote.clear_images = model.clear_image_cache
    async with run_engine(
        config,
        model,
        device=_computes_elsewhere,
        preprocess=preprocess,
        image_preprocess=image_preprocess,
        offload=offload,
        fetch=fetch,
        options=options,
        memory=memory,
        remote=remote,
        engine_class=engine_class,
    ) as engine:
        line.add(remote)
        yield engine


class FrontParts:
    """Threads and preparers of one front. Its lines to several engine processes share them.

    Args:
        configs: Settings of the models, in the order of the engine processes.
        threads: Threads of the front.
        memory: Memory governor of this process, which its owner must run.
    """

    def __init__(self, configs: Sequence[EngineConfig], threads: SharedThreads, memory: MemoryGovernor) -> None:
        self.configs = configs
        self.threads = threads
        self.memory = memory
        self._loaded: list[tuple[EngineConfig, tuple[object, ...], Preparer]] = []
        self._loading = anyio.Lock()

    async def preparer(self, config: EngineConfig, terms: ModelTerms) -> Preparer:
        """Return the preparer of a model. It is loaded once for equal terms.

        Raises:
            ConfigError: The model cannot be prepared for here.
        """
        async with self._loading:
            key = kept(terms)
            for known, its_key, preparer in self._loaded:
                if known == config and its_key == key:
                    return preparer
            preparer = await anyio.to_thread.run_sync(_load, config, terms, self.memory.budget)
            self._loaded.append((config, key, preparer))
            return preparer

    def close(self) -> None:
        """Close all preparers."""
        for _, _, preparer in self._loaded:
            preparer.close()


@asynccontextmanager
async def front_parts(configs: Sequence[EngineConfig], memory: MemoryGovernor) -> AsyncIterator[FrontParts]:
    """Start the threads of a front, for the length of a block.

    Args:
        configs: See `FrontParts`.
        memory: See `FrontParts`.
    """
    async with shared_threads(configs[0]) as threads:
        parts = FrontParts(configs, threads, memory)
        try:
            yield parts
        finally:
            parts.close()


@asynccontextmanager
async def run_front_engines(
    line: FrontLine, parts: FrontParts, *, engine_class: type[Engine]
) -> AsyncIterator[Mapping[str, Engine]]:
    """Run an engine for each model of an engine process, which has welcomed this front. They drain with the block.

    Args:
        line: The line to the engine process, which its owner runs.
        parts: Threads and preparers of the front.
        engine_class: Class of the engines.

    Raises:
        ConfigError: A model cannot be prepared for here.
    """
    configs, threads, memory = parts.configs, parts.threads, parts.memory
    async with AsyncExitStack() as stack:
        engines: dict[str, Engine] = {}
        for config, terms in zip(configs, line.terms, strict=True):
            model = await parts.preparer(config, terms)
            threads.fit([ThreadNeeds(image_preprocess=config.image_preprocess_threads)])
            engines[model.card.name] = await stack.enter_async_context(
                run_front_engine(
                    config,
                    model,
                    line,
                    preprocess=threads.preprocess.part(),
                    image_preprocess=threads.image_preprocess.part(),
                    offload=threads.offload.part(),
                    fetch=MediaFetcher(config).fetch,
                    memory=memory,
                    engine_class=engine_class,
                )
            )
        await anyio.to_thread.run_sync(memory.measure, sum(10**6 * config.image_cache_mb for config in configs))
        yield engines
        async with anyio.create_task_group() as draining:
            for engine in engines.values():
                draining.start_soon(engine.drain, configs[0].drain_timeout_s)


@asynccontextmanager
async def open_front_engines(
    line: FrontLine, configs: Sequence[EngineConfig], memory: MemoryGovernor
) -> AsyncIterator[Mapping[str, Engine]]:
    """Wait for the engine process, and run an engine for each of its models.

    Args:
        line: The line to the engine process, which its owner runs.
        configs: The settings that the engine process has, too.
        memory: Memory governor of this process, which its owner must run.

    Raises:
        ConfigError: A model cannot be prepared for here.
    """
    await line.welcomed.wait()
    async with (
        front_parts(configs, memory) as parts,
        run_front_engines(line, parts, engine_class=Engine) as engines,
    ):
        yield engines


def _load(config: EngineConfig, terms: ModelTerms, memory: MemoryBudget) -> Preparer:
    assert terms.preparation is not None
    preparer = load_preparer(config, terms.card, terms.preparation, memory)
    for lane in preparer.card.lanes:
        preparer.warm_up(lane)
    return preparer


async def _computes_elsewhere(function: Callable[[A], T], argument: A, /) -> T:
    raise RuntimeError("a front computes nothing")
