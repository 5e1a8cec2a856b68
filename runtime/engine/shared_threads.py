"""Threads that the engines of one group share: device threads, and threads of preprocess."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine_stages import POSTPROCESS_WORKERS
from staged_pool.runtime.machine.cores import usable_cores
from staged_pool.runtime.model import LoadedModel
from staged_pool.runtime.threads.core_limiter import CoreLimiter
from staged_pool.runtime.threads.dedicated_threads import DedicatedThreads
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.offload import ThreadOffload

IMAGE_NICE: Final = 10
"""Niceness of threads that decode images or compute them on the CPU.

They keep all cores busy, so other threads go first, above all the event loop. On two cores this halves the latency of
`/health` beside images, at no cost for images. Forwards of texts are too short to gain by it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadNeeds:
    """Threads that one model, or its plugins, can keep busy."""

    device: int = 1
    image_device: int = 0
    image_preprocess: int = 0

    @classmethod
    def of(cls, model: LoadedModel | None, config: EngineConfig, plugins: int) -> ThreadNeeds:
        """Return the needs of a model with its plugins.

        Args:
            model: The model. None: there are only plugins.
            config: Settings of the model.
            plugins: Number of its plugins.
        """
        if model is None:
            return cls(device=max(1, plugins))
        calls = model.card.forward_calls
        if "image" not in model.card.lanes:
            return cls(device=max(calls, plugins))
        return cls(device=max(calls, plugins), image_device=calls, image_preprocess=config.image_preprocess_threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedThreads:
    """Threads that all engines of one group share."""

    device: DeviceThreads
    image_device: DeviceThreads
    image_preprocess: DedicatedThreads
    preprocess: ThreadOffload
    offload: ThreadOffload
    limiter: CoreLimiter
    cores: int

    def fit(self, needs: Collection[ThreadNeeds]) -> None:
        """Grow or shrink to the threads that the largest need takes."""
        for threads, count in (
            (self.device, max([1, *(each.device for each in needs)])),
            (self.image_device, max([0, *(each.image_device for each in needs)])),
            (self.image_preprocess, max([0, *(each.image_preprocess for each in needs)])),
        ):
            threads.grow(count)
            threads.shrink(count)

    def limit_cores(self, model: LoadedModel) -> None:
        """Let the threads of a model's images wait for cores."""
        if "image" in model.card.lanes:
            self.image_preprocess.core = self.limiter.acquire
            if needs_cores(model):
                self.image_device.core, self.device.core = self.limiter.acquire, self.limiter.bypass

    async def warm_up(self, model: LoadedModel) -> None:
        """Run a forward of each lane on each idle thread. Busy threads are warm from other models."""
        for lane in model.card.lanes:
            await (self.image_device if lane == "image" else self.device).run_on_each(model.warm_up, lane)


@asynccontextmanager
async def shared_threads(config: EngineConfig) -> AsyncIterator[SharedThreads]:
    """Start the threads of a group, and end them with the block, after their calls.

    Args:
        config: Settings that all models of the group share.
    """
    async with (
        DeviceThreads("staged-pool device", watchdog_s=config.watchdog_s).running() as device,
        DeviceThreads("staged-pool image device", watchdog_s=config.watchdog_s, nice=IMAGE_NICE).running(
            0
        ) as image_device,
        DedicatedThreads("staged-pool image preprocess", nice=IMAGE_NICE).running(0) as image_preprocess,
    ):
        cores = usable_cores()
        yield SharedThreads(
            device=device,
            image_device=image_device,
            image_preprocess=image_preprocess,
            preprocess=ThreadOffload(config.preprocess_limit),
            offload=ThreadOffload(POSTPROCESS_WORKERS),
            limiter=CoreLimiter(cores),
            cores=cores,
        )


def needs_cores(model: LoadedModel) -> bool:
    """Return True if forwards compute in their thread, and do not wait for another device."""
    return model.card.device.startswith("cpu")
