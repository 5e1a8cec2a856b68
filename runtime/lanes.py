"""What each lane of a model has for itself, and how large it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import Lane, ModelCard
from staged_pool.stages.budget import Budget
from staged_pool.stages.offload import Offload
from staged_pool.stages.pace import LanePace, Pace

MIN_SHARE_TOKENS = 128
"""What a free forward worker leaves to the other free ones at least: a forward of fewer tokens costs nearly as much."""

IMAGE_MIN_SHARE_TOKENS = 300
"""The same of pictures: theirs is a larger transformer, whose weights are read from memory for each batch. With
ViT-B/32 that is 6 of them, at 46.7 ms each on a core; 1 takes 52, 2 take 51, 4 take 48 and 8 take 46.5 ms each. That is
little enough for a core to begin with a single one rather than to do nothing, so theirs do not gather."""

SUFFIX: Final[Mapping[Lane, str]] = {"text": "", "image": "_images"}
"""Of the names of a lane's stages."""

IMAGE_CHUNK_ITEMS: Final = 1
"""Every picture is a call of its own: it takes tens of milliseconds, and a thread that is done takes the next one."""

IMAGE_WAITING_BATCHES: Final = 4
"""Full batches of pictures that wait for the device, at most, before preprocess is held back: a picture that waits
takes a few kilobytes a token, a thousand times what a text takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneParts:
    """What a lane has for itself: threads above all, so that it is the operating system that shares the cores, and no
    lane waits for a call of another."""

    device: Offload
    """Runs forwards, `model.card.forward_calls` at once."""
    preprocess: Offload
    """Runs preprocess."""
    pace: LanePace


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """The sizes of a lane."""

    preprocess_limit: int
    chunk_items: int
    min_share_tokens: int
    waiting_tokens: int
    request_waiting_tokens: int

    @staticmethod
    def of(lane: Lane, config: EngineConfig, batch_tokens: int) -> LaneLimits:
        if lane == "text":
            return LaneLimits(
                preprocess_limit=config.preprocess_limit,
                chunk_items=config.chunk_items,
                min_share_tokens=MIN_SHARE_TOKENS,
                waiting_tokens=config.waiting_tokens,
                request_waiting_tokens=config.request_waiting_tokens,
            )
        waiting_tokens = min(config.waiting_tokens, IMAGE_WAITING_BATCHES * batch_tokens)
        return LaneLimits(
            preprocess_limit=config.image_preprocess_threads,
            chunk_items=IMAGE_CHUNK_ITEMS,
            min_share_tokens=IMAGE_MIN_SHARE_TOKENS,
            waiting_tokens=waiting_tokens,
            request_waiting_tokens=min(config.request_waiting_tokens, max(1, waiting_tokens // 2)),
        )


def lane_pace(lane: Lane, config: EngineConfig, card: ModelCard) -> LanePace:
    """How fast a lane is, before anything has been measured."""
    budget = Budget(
        config.batch_tokens(card.device, card.memory_tokens),
        start=config.least_batch_tokens(card.device, card.memory_tokens),
        target_s=config.target_batch_s,
    )
    return LanePace(budget=budget, preprocess=Pace() if lane == "image" else None)
