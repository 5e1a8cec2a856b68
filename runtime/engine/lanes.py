"""What each lane of a model has for itself, and how large it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import Lane, ModelCard
from staged_pool.stages.offload import Offload
from staged_pool.stages.scheduling.batch_budget import Budget
from staged_pool.stages.scheduling.service_time import LaneServiceTime, ServiceTimeModel
from staged_pool.stages.scheduling.tuning import IMAGE_WAITING_BATCHES

SUFFIX: Final[Mapping[Lane, str]] = {"text": "", "image": "_images"}
"""Of the names of a lane's stages."""

IMAGE_CHUNK_ITEMS: Final = 1
"""Every image is a call of its own: it takes tens of milliseconds, and a thread that is done takes the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneParts:
    """What a lane has for itself: threads above all, so that it is the operating system that shares the cores, and no
    lane waits for a call of another."""

    device: Offload
    """Runs forwards, `model.card.forward_calls` at once."""
    preprocess: Offload
    """Runs preprocess."""
    service_time: LaneServiceTime


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """The sizes of a lane."""

    preprocess_limit: int
    chunk_items: int
    fed_tokens: int
    """Tokens that preprocess and the device hold at most, from feeding to the end of the forward."""

    @staticmethod
    def of(lane: Lane, config: EngineConfig, batch_tokens: int) -> LaneLimits:
        if lane == "text":
            return LaneLimits(
                preprocess_limit=config.preprocess_limit,
                chunk_items=config.chunk_items,
                fed_tokens=config.waiting_tokens,
            )
        return LaneLimits(
            preprocess_limit=config.image_preprocess_threads,
            chunk_items=IMAGE_CHUNK_ITEMS,
            fed_tokens=min(config.waiting_tokens, IMAGE_WAITING_BATCHES * batch_tokens),
        )


def lane_service_time(lane: Lane, config: EngineConfig, card: ModelCard) -> LaneServiceTime:
    """The service time of a lane before anything has been measured."""
    budget = Budget(
        config.batch_tokens(card.device, card.memory_tokens),
        start=config.least_batch_tokens(card.device, card.memory_tokens),
        target_s=config.target_batch_s,
    )
    return LaneServiceTime(budget=budget, preprocess=ServiceTimeModel() if lane == "image" else None)
