"""The four stages, wired: who hands what to whom, with how many workers, through how large a channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import structlog

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import Model, ModelInput, Payload, Row
from staged_pool.runtime.statistics import DeviceStatistics
from staged_pool.stages.batch import BatchStage
from staged_pool.stages.channel import Channel
from staged_pool.stages.forming import BatchBuilder
from staged_pool.stages.meter import StageStatistics
from staged_pool.stages.offload import Offload
from staged_pool.stages.pace import Pace
from staged_pool.stages.parse import Arrival, ParseStage
from staged_pool.stages.postprocess import PostprocessStage
from staged_pool.stages.preprocess import PreprocessStage
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import Item, Plan, Request

PARSE_WORKERS = 64
"""Requests that are being cut at once. One that waits for its own items to be done holds its worker, so this is also
how many large requests share the pipeline before a small one has to wait for one of them to be fed."""

POSTPROCESS_WORKERS = 4

MIN_SHARE_TOKENS = 128
"""What a free forward worker leaves to the other free ones at least: a forward of fewer tokens costs nearly as much."""

log = structlog.get_logger("staged_pool.engine")


class Pipeline:
    """parse -> preprocess -> batch -> postprocess. Requests go in at `door`; answers come out through their tickets.

    Args:
        config: Its sizes.
        model: What preprocess and the device run.
        accept: What parse asks of a decoded request.
        pace: Told how long the device takes.
        device: Runs forwards, `model.card.forward_workers` at once.
        preprocess: Runs preprocess.
        offload: Runs the decoding of large requests and the making of large answers.
        options: For all stages.
        gave_up: Called at once when a stage cannot go on, where `run` first waits for the calls that still run.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        *,
        accept: Callable[[Ticket, Request], Plan[ModelInput]],
        pace: Pace,
        device: Offload,
        preprocess: Offload,
        offload: Offload,
        options: StageOptions,
        gave_up: Callable[[Exception], object],
    ) -> None:
        self._preprocess_limit = config.preprocess_limit
        self._alarm_s = config.preprocess_alarm_s
        size = config.channel_capacity
        requests = Channel[Arrival]("parse", size)
        inputs = Channel[Sequence[Item[ModelInput]]]("preprocess", size)
        prepared = Channel[Sequence[Item[Payload]]]("batch", size)
        rows = Channel[Sequence[Item[Row]]]("postprocess", size)
        self.channels = (requests, inputs, prepared, rows)
        self.door = requests.outlet
        """Closing it ends the pipeline: the end of the stream runs down from stage to stage."""
        self.parse = ParseStage[ModelInput](
            requests.inlet,
            inputs.outlet,
            accept=accept,
            offload=offload,
            options=options,
            chunk_items=config.chunk_items,
            workers=PARSE_WORKERS,
            request_waiting_tokens=config.request_waiting_tokens,
        )
        self.batch = BatchStage[Payload, Row](
            prepared.inlet,
            rows.outlet,
            forward=model.forward,
            device=device,
            builder=BatchBuilder(
                max_items=config.max_batch_items,
                max_cost=config.batch_tokens(model.card.device),
                least_cost=config.least_batch_tokens(model.card.device),
                pads=model.pads("text"),
                min_share=MIN_SHARE_TOKENS,
            ),
            options=options,
            pace=pace,
            slots=model.card.forward_workers,
            waiting_tokens=config.waiting_tokens,
        )
        self.preprocess = PreprocessStage[ModelInput, Payload](
            inputs.inlet,
            prepared.outlet,
            preprocess=model.preprocess,
            offload=preprocess,
            ahead_s=self.batch.ahead_s,
            options=options,
            chunk_items=config.chunk_items,
            workers=config.preprocess_limit,
        )
        self.postprocess = PostprocessStage[Row](
            rows.inlet, offload=offload, options=options, workers=POSTPROCESS_WORKERS
        )
        self.stages = (self.parse, self.preprocess, self.batch, self.postprocess)
        for stage in self.stages:
            stage.gave_up = gave_up

    async def run(self) -> None:
        """Run until the door is closed and everything has passed.

        Raises:
            ExceptionGroup: A stage gave up; the others were cancelled.
        """
        async with anyio.create_task_group() as watchers:
            watchers.start_soon(self._watch_preprocess)
            async with anyio.create_task_group() as stages:
                for stage in self.stages:
                    stages.start_soon(stage.run)
            watchers.cancel_scope.cancel()

    async def _watch_preprocess(self) -> None:
        """Raise the alarm about calls that do not end. Nothing can end a thread; an operator can end the process."""
        known = 0
        while True:
            await anyio.sleep(self._alarm_s)
            if (overdue := self.overdue_calls()) > known:
                log.error("preprocess.overdue", calls=overdue, limit=self._preprocess_limit)
            known = overdue

    def overdue_calls(self) -> int:
        """Preprocess calls that take longer than the alarm allows."""
        return self.preprocess.overdue(self._alarm_s)

    def obstruction(self) -> str | None:
        """Why nothing gets through for now; None where something may."""
        if self.overdue_calls() < self._preprocess_limit:
            return None
        return f"every preprocess thread has been busy for more than {self._alarm_s:g} s"

    def stage_statistics(self) -> tuple[StageStatistics, ...]:
        parse, preprocess, batch, postprocess = (channel.waiting for channel in self.channels)
        return (
            self.parse.meter.snapshot(parse),
            self.preprocess.meter.snapshot(preprocess),
            self.batch.meter.snapshot(batch + self.batch.waiting),
            self.postprocess.meter.snapshot(postprocess),
        )

    def device_statistics(self) -> DeviceStatistics:
        return DeviceStatistics(
            batches=dict(self.batch.triggers),
            items=self.batch.meter.done,
            tokens=self.batch.tokens,
            padding_tokens=self.batch.padding_tokens,
            wasted_tokens=self.batch.wasted_tokens,
        )
