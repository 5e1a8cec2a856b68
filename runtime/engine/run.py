"""The run of an engine on a model that is loaded already."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from staged_pool.runtime.card import Lane
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.engine_stages import POSTPROCESS_WORKERS
from staged_pool.runtime.engine.lanes import LaneParts, lane_service_time
from staged_pool.runtime.engine.reports import CountingCompleter
from staged_pool.runtime.media.image_completer import Fetch, ImageCompleter, reject_fetch
from staged_pool.runtime.memory.governor import UNLIMITED_BYTES, MemoryGovernor
from staged_pool.runtime.model import Preparer
from staged_pool.runtime.plugins.model import PluginModel
from staged_pool.runtime.plugins.request import PluginCompleter
from staged_pool.runtime.remote.model import RemoteModel
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.offload import Offload, ThreadOffload
from staged_pool.stages.stage import StageOptions


@asynccontextmanager
async def run_engine(
    config: EngineConfig,
    model: Preparer,
    *,
    device: Offload,
    image_device: Offload | None = None,
    preprocess: Offload | None = None,
    image_preprocess: Offload | None = None,
    offload: Offload | None = None,
    fetch: Fetch = reject_fetch,
    shared_cores: int | None = None,
    options: StageOptions | None = None,
    memory: MemoryGovernor | None = None,
    remote: RemoteModel | None = None,
    engine_class: type[Engine] = Engine,
) -> AsyncIterator[Engine]:
    """Run an engine on a loaded model for the length of a block.

    At the end of the block the engine drains. If the block raised or was cancelled, it stops.

    Args:
        config: Settings of the engine; those about loading are not read.
        model: See `Model`.
        device: Runs forwards, `model.card.forward_calls` at once.
        image_device: Runs forwards of images, as many at once. None: `device` runs them, and then needs room for both.
        preprocess: Runs preprocess calls. None: `config.preprocess_limit` threads.
        image_preprocess: Runs preprocess calls of images. None: `config.image_preprocess_threads` threads.
        offload: Decodes large requests, and makes large answers. None: threads.
        fetch: Fetches images that are given as URLs. By default these are rejected.
        shared_cores: Number of cores that forwards and preprocess share. None: forwards compute on another device.
        options: Clock, restart policy and channel class of the stages.
        memory: Memory governor, which its owner must run. None: memory has no limit.
        remote: The engine process that computes in place of `model`. None: this process does.
        engine_class: Class of the engine.
    """
    memory, options = memory or MemoryGovernor(UNLIMITED_BYTES), options or StageOptions()
    tokenize = preprocess or ThreadOffload(config.preprocess_limit)
    offloads: dict[Lane, tuple[Offload, Offload]] = {
        "text": (device, tokenize),
        "image": (image_device or device, image_preprocess or ThreadOffload(config.image_preprocess_threads)),
    }
    if isinstance(model, PluginModel):
        offloads["plugin"] = (device, model.host.places.threads)
    engine = engine_class(
        config,
        model,
        lanes={
            lane: LaneParts(
                device=offloads[lane][0],
                preprocess=offloads[lane][1],
                service_time=lane_service_time(lane, config, model.card),
            )
            for lane in model.card.lanes
        },
        tokenize=tokenize,
        offload=offload or ThreadOffload(POSTPROCESS_WORKERS),
        completer=_completer(config, model, fetch, memory, options),
        shared_cores=shared_cores,
        options=options,
        memory=memory,
        remote=remote,
    )
    with single_errors():
        async with engine.running():
            yield engine


def _completer(
    config: EngineConfig, model: Preparer, fetch: Fetch, memory: MemoryGovernor, options: StageOptions
) -> CountingCompleter:
    if isinstance(model, PluginModel):
        return PluginCompleter(model.host)
    return ImageCompleter(
        fetch,
        limit=config.media_limit,
        limit_bytes=config.max_bytes,
        memory=memory.budget.bodies,
        clock=options.clock,
    )
