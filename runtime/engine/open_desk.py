"""Opening of the engine process's part: models are loaded, and compute for fronts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import anyio
import anyio.to_thread

from staged_pool.runtime.caching.fingerprints import new_secret
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.agreement import agreed
from staged_pool.runtime.engine.device_engine import DeviceEngine
from staged_pool.runtime.engine.engine_group import EngineGroup, Served
from staged_pool.runtime.engine.front_desk import FrontDesk
from staged_pool.runtime.engine.lanes import LaneLimits, LaneParts, lane_service_time
from staged_pool.runtime.engine.shared_threads import SharedThreads, needs_cores, shared_threads
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.remote.messages import ModelTerms
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.stage import StageOptions


@asynccontextmanager
async def open_desk(configs: Sequence[EngineConfig], memory: MemoryGovernor) -> AsyncIterator[FrontDesk]:
    """Load models, and compute for fronts for the length of a block.

    Args:
        configs: At least one, without plugins. Settings of shared resources must be equal in all of them.
        memory: Memory governor of this process, which its owner must run.

    Raises:
        ConfigError: A model cannot be loaded, or two have the same name.
    """
    first, desk = agreed(configs), FrontDesk()
    async with shared_threads(first) as threads:
        with single_errors():
            async with anyio.create_task_group() as tasks:
                running = partial(_run_device_engine, desk)
                group = EngineGroup[DeviceEngine](tasks, threads, memory, first, running)
                # Fronts prepare the inputs. Code of a folder is tried once at load, and never in this process.
                await group.open([Served(replace(config, preprocess_workers=None)) for config in configs])
                yield desk
                await group.drain()


@asynccontextmanager
async def _run_device_engine(
    desk: FrontDesk,
    served: Served[DeviceEngine],
    threads: SharedThreads,
    options: StageOptions,
    memory: MemoryGovernor,
) -> AsyncIterator[Mapping[str, DeviceEngine]]:
    model, config = cast(Encoder, served.model), served.config
    card = model.card
    engine = DeviceEngine(
        config,
        model,
        lanes={
            lane: LaneParts(
                device=threads.image_device if lane == "image" else threads.device,
                preprocess=threads.preprocess,
                service_time=lane_service_time(lane, config, card),
            )
            for lane in card.lanes
        },
        give=partial(desk.give, len(desk.engines)),
        shared_cores=threads.cores if needs_cores(model) else None,
        options=options,
        memory=memory,
    )
    async with engine.running():
        desk.add(engine, await anyio.to_thread.run_sync(_terms, config, model))
        yield {card.name: engine}


def _terms(config: EngineConfig, model: Encoder) -> ModelTerms:
    card = model.card
    preparation = model.preparation
    model.close()  # its worker processes
    fed_limits = {lane: LaneLimits.of_model(lane, config, card).fed_tokens for lane in card.lanes}
    return ModelTerms(card, preparation, fed_limits, new_secret())
