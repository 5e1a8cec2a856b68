"""Lanes: each kind of input has its own preprocess and batch stage, threads and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Final, TypeAlias, cast

from staged_pool.runtime.admission.controller import Admission
from staged_pool.runtime.card import Lane, ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import Model, ModelInput, Preparer
from staged_pool.runtime.payloads import ModelRow
from staged_pool.runtime.remote.batch import RemoteBatchStage
from staged_pool.runtime.remote.model import RemoteModel
from staged_pool.stages.batch import BatchStage
from staged_pool.stages.batch_parts import BatchDevice, BatchScheduling, NearbyWork
from staged_pool.stages.channel import Channel, Sender
from staged_pool.stages.feeding import FeedQueue
from staged_pool.stages.offload import Offload
from staged_pool.stages.preprocess import Preprocess, PreprocessStage
from staged_pool.stages.scheduling.batch_budget import Budget
from staged_pool.stages.scheduling.batch_former import BatchFormer
from staged_pool.stages.scheduling.coalescing import RowReuse
from staged_pool.stages.scheduling.service_time import LaneServiceTime, ServiceTimeModel
from staged_pool.stages.scheduling.tuning import IMAGE_WAITING_BATCHES
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.ticket import Item

BatchLane: TypeAlias = BatchStage[Any, ModelRow] | RemoteBatchStage
"""The batch stage of a lane, or what stands for it in a front."""

SUFFIX: Final[Mapping[Lane, str]] = {"text": "", "image": "_images", "plugin": ""}
"""Suffix of the names of a lane's stages."""

IMAGE_CHUNK_ITEMS: Final = 1
"""Images in one preprocess call. An image takes tens of milliseconds, so a call of its own costs nothing."""

HOOK_CHUNK_ITEMS: Final = 1
"""Requests in one preprocess call of a plugin. A hook may take any time, so no request waits for another's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneParts:
    """Threads and service time of one lane.

    Lanes share no thread, so no lane waits for a call of another: the operating system shares the cores.
    """

    device: Offload
    """Runs forwards, `model.card.forward_calls` at once."""
    preprocess: Offload
    """Runs preprocess calls."""
    service_time: LaneServiceTime


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """Limits of one lane."""

    preprocess_limit: int
    """Preprocess calls at once."""
    chunk_items: int
    """Inputs of one preprocess call."""
    fed_tokens: int
    """Most tokens between feeding and the end of their forward."""

    @staticmethod
    def of(lane: Lane, config: EngineConfig, batch_tokens: int) -> LaneLimits:
        """Derive the limits of a lane from the settings and a batch's token budget."""
        if lane != "image":
            return LaneLimits(
                preprocess_limit=config.preprocess_limit,
                chunk_items=config.chunk_items if lane == "text" else HOOK_CHUNK_ITEMS,
                fed_tokens=config.waiting_tokens,
            )
        return LaneLimits(
            preprocess_limit=config.image_preprocess_threads,
            chunk_items=IMAGE_CHUNK_ITEMS,
            fed_tokens=min(config.waiting_tokens, IMAGE_WAITING_BATCHES * batch_tokens),
        )

    @staticmethod
    def of_model(lane: Lane, config: EngineConfig, card: ModelCard) -> LaneLimits:
        """Derive the limits of a lane from the settings and the model."""
        return LaneLimits.of(lane, config, config.batch_tokens(card.device, card.memory_tokens))


def lane_service_time(lane: Lane, config: EngineConfig, card: ModelCard) -> LaneServiceTime:
    """Return the service time of a lane before the first measurement."""
    budget = Budget(
        config.batch_tokens(card.device, card.memory_tokens),
        start=config.least_batch_tokens(card.device, card.memory_tokens),
        target_s=config.target_batch_s,
    )
    return LaneServiceTime(
        budget=budget,
        least_tokens=config.least_batch_tokens(card.device, card.memory_tokens),
        preprocess=None if lane == "text" else ServiceTimeModel(),
    )


def input_tokens(config: EngineConfig, card: ModelCard) -> float:
    """Return the most tokens of one text: longer texts are cut or rejected."""
    return inf if config.split_long_inputs else card.max_tokens


def admission_of(
    config: EngineConfig,
    card: ModelCard,
    service_times: Mapping[Lane, LaneServiceTime],
    clock: Callable[[], float],
) -> Admission:
    """Return the admission of a model.

    Args:
        config: Settings of the engine.
        card: Description of the model.
        service_times: Service time of each lane.
        clock: Clock of the stages, in seconds.
    """
    fed_limits = {lane: LaneLimits.of_model(lane, config, card).fed_tokens for lane in service_times}
    return Admission(config, service_times, fed_limits, clock, input_tokens(config, card))


class SharedCores:
    """The use that all lanes make of the CPU cores.

    Args:
        count: Number of cores that forwards and preprocess share. None: forwards compute on another device.
    """

    def __init__(self, count: int | None) -> None:
        self._count = count
        self.lanes: Mapping[Lane, LaneStages] = {}
        """All lanes of the engine; set when they are built."""

    def calls_elsewhere(self, lane: Lane) -> int:
        """Count the forwards and preprocess calls of the other lanes on the shared cores.

        A forward that shares its work with a second thread waits for it, again and again, while such a call has its
        core.
        """
        if self._count is None:
            return 0
        return sum(other.batch.running + other.preprocess.calls for name, other in self.lanes.items() if name != lane)

    def is_free(self, lane: Lane) -> bool:
        """Return True if a core is left over by the calls of this lane.

        Text calls are short, and bypass the `CoreLimiter`: for them a core is always free.
        """
        if self._count is None or lane != "image":
            return True
        stages = self.lanes[lane]
        return stages.batch.running + stages.preprocess.calls < self._count


class LaneStages:
    """feed -> preprocess -> batch: the stages of one lane, and the channels in front of them.

    Args:
        lane: Name of the lane.
        parts: Its threads and service time.
        rows: The channel to postprocess.
        config: Source of its limits.
        model: Prepares inputs, and runs the forwards if `remote` is None.
        preprocess: Runs in the preprocess stage.
        reuse: See `BatchScheduling.reuse`.
        cores: The use that all lanes make of the cores.
        options: See `StageOptions`.
        remote: The engine process that computes in place of `model`. None: this process does.
    """

    def __init__(
        self,
        lane: Lane,
        parts: LaneParts,
        rows: Sender[Sequence[Item[ModelRow]]],
        *,
        config: EngineConfig,
        model: Preparer,
        preprocess: Preprocess[ModelInput, Any],
        reuse: RowReuse[Any, Any] | None,
        cores: SharedCores,
        options: StageOptions,
        remote: RemoteModel | None = None,
    ) -> None:
        limits = LaneLimits.of_model(lane, config, model.card)
        suffix, lists = SUFFIX[lane], config.channel_capacity
        self.inputs: Channel[Any] = options.channel(f"preprocess{suffix}", lists * limits.chunk_items, len)
        self.prepared: Channel[Any] = options.channel(f"batch{suffix}", lists)
        self.feed = FeedQueue[ModelInput](lane, self.inputs.sender, chunk_items=limits.chunk_items, clock=options.clock)
        nearby = NearbyWork(
            preparing=lambda: self.preprocess.preparing,
            ready_s=lambda: self.preprocess.call_s,
            elsewhere=partial(cores.calls_elsewhere, lane),
            core_is_free=partial(cores.is_free, lane),
        )
        self.batch: BatchLane = (
            build_batch_stage(
                lane,
                parts,
                self.prepared,
                rows,
                config=config,
                model=cast(Model, model),  # it computes here
                reuse=reuse,
                nearby=nearby,
                options=options,
            )
            if remote is None
            else remote.batch_stage(lane, self.prepared, rows, nearby=nearby, options=options)
        )
        self.preprocess = PreprocessStage[ModelInput, Any](
            self.inputs.receiver,
            self.prepared.sender,
            preprocess=preprocess,
            offload=parts.preprocess,
            ahead_s=self.batch.ahead_s,
            service_time=parts.service_time.preprocess,
            options=options,
            chunk_items=limits.chunk_items,
            workers=limits.preprocess_limit,
            lane=lane,
            name=self.inputs.name,
        )


def build_batch_stage(
    lane: Lane,
    parts: LaneParts,
    prepared: Channel[Any],
    rows: Sender[Sequence[Item[ModelRow]]],
    *,
    config: EngineConfig,
    model: Model,
    reuse: RowReuse[Any, Any] | None,
    nearby: NearbyWork,
    options: StageOptions,
) -> BatchStage[Any, ModelRow]:
    """Build the batch stage of a lane.

    Args:
        lane: Name of the lane.
        parts: Its threads and service time.
        prepared: The channel in front of the stage.
        rows: The channel behind it.
        config: Source of its limits.
        model: Runs the forwards.
        reuse: See `BatchScheduling.reuse`.
        nearby: See `NearbyWork`.
        options: See `StageOptions`.
    """
    card = model.card
    return BatchStage[Any, ModelRow](
        prepared.receiver,
        rows,
        device=BatchDevice(
            forward=model.forward,
            offload=parts.device,
            slots=card.forward_workers,
            ahead=max(1, card.forward_workers * card.launched_ahead),
        ),
        scheduling=BatchScheduling(
            former=_batch_former(lane, parts, config, model),
            service_time=parts.service_time.device,
            budget=parts.service_time.budget,
            fed_tokens=LaneLimits.of_model(lane, config, card).fed_tokens,
            reuse=reuse,
        ),
        nearby=nearby,
        options=options,
        name=prepared.name,
    )


def _batch_former(lane: Lane, parts: LaneParts, config: EngineConfig, model: Model) -> BatchFormer[Item[Any]]:
    card = model.card
    return BatchFormer(
        max_items=config.max_batch_items,
        max_batch_tokens=parts.service_time.budget.tokens,
        min_batch_tokens=config.least_batch_tokens(card.device, card.memory_tokens),
        pads=model.pads(lane),
        slots=card.forward_workers,
        lane=lane,
    )
