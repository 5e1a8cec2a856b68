"""Engines of a front: their models compute in the engine process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.lanes import input_tokens, lane_service_time
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.media.image_completer import Fetch, reject_fetch
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.model import Model
from staged_pool.runtime.remote.line import FrontLine
from staged_pool.runtime.remote.model import RemoteModel
from staged_pool.stages.offload import Offload
from staged_pool.stages.stage import StageOptions

A = TypeVar("A")
T = TypeVar("T")


@asynccontextmanager
async def run_front_engine(
    config: EngineConfig,
    model: Model,
    line: FrontLine,
    *,
    preprocess: Offload | None = None,
    image_preprocess: Offload | None = None,
    offload: Offload | None = None,
    fetch: Fetch = reject_fetch,
    options: StageOptions | None = None,
    memory: MemoryGovernor | None = None,
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
    ) as engine:
        line.add(remote)
        yield engine


async def _computes_elsewhere(function: Callable[[A], T], argument: A, /) -> T:
    raise RuntimeError("a front computes nothing")
