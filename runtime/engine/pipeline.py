"""The stages, wired: who hands what to whom, with how many workers, through how large a channel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import anyio
from anyio.abc import TaskStatus

from staged_pool.runtime.caching.fingerprints import Identities
from staged_pool.runtime.caching.result_cache import ResultCache, freeze
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.lanes import SUFFIX, LaneLimits, LaneParts
from staged_pool.runtime.media.image_completer import ImageCompleter
from staged_pool.runtime.model import Lane, Model, ModelInput, Payload, Row
from staged_pool.runtime.statistics import DeviceStatistics, PriorityStatistics
from staged_pool.stages.batch import BatchStage
from staged_pool.stages.channel import ENDED, Channel, Sender
from staged_pool.stages.errors import EngineStopped
from staged_pool.stages.feeding import FeedQueue
from staged_pool.stages.log import get_logger
from staged_pool.stages.meter import HistogramSnapshot, StageStatistics
from staged_pool.stages.offload import Offload
from staged_pool.stages.parse import Arrival, ParseStage
from staged_pool.stages.postprocess import PostprocessStage
from staged_pool.stages.preprocess import Preprocess, PreprocessStage
from staged_pool.stages.scheduling.batch_former import BatchFormer
from staged_pool.stages.scheduling.coalescing import Sharing
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.stage import Stage, StageOptions
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.work import Plan, Request

PARSE_WORKERS: Final = 8
"""Requests that are decoded at once. Small ones are decoded on the event loop, and what comes behind holds none."""

POSTPROCESS_WORKERS: Final = 4

LEAST_LOOK: Final = 0.01
"""Part of `preprocess_alarm_s` that passes at least between two looks for calls that take longer."""

log = get_logger("staged_pool.engine")


class Pipeline:
    """parse -> preprocess -> batch -> postprocess. Answers come out through the tickets of the requests.

    Each lane of the model has a preprocess and a batch stage of its own, which wait for nothing of the other's.

    Args:
        config: Its sizes.
        model: What preprocess and the device run.
        accept: What parse asks of a decoded request.
        lanes: What each lane of the model has for itself.
        completer: Fetches images that are given as URLs.
        offload: Runs the decoding of large requests and the making of large answers.
        shared_cores: CoreLimiter that forwards and preprocess share. None: forwards compute on a device of their own.
        options: For all stages.
        gave_up: Called at once when a stage cannot go on, where `run` first waits for the calls that still run.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        *,
        accept: Callable[[Ticket, Request], Plan[ModelInput]],
        lanes: Mapping[Lane, LaneParts],
        completer: ImageCompleter,
        offload: Offload,
        shared_cores: int | None,
        options: StageOptions,
        gave_up: Callable[[Exception], object],
    ) -> None:
        self._config = config
        self._alarm_s = config.preprocess_alarm_s
        self._shared_cores = shared_cores
        self._model = model
        self._options = options
        self.results = ResultCache(config.result_cache_mb * 10**6) if config.result_cache_mb else None
        """Rows that are kept; those of both lanes have identities of their own. None: no rows are."""
        self._sharing: Sharing[Payload, Row] | None = None
        self._prepare: Preprocess[ModelInput, Payload] = model.preprocess
        if config.coalesce or self.results is not None:
            self._sharing = Sharing(freeze=freeze, coalesce=config.coalesce, kept=self.results)
            self._prepare = Identities().given_to(model.preprocess)

        requests = self._channel("parse", config.channel_capacity * config.chunk_items)
        rows = self._channel("postprocess", config.channel_capacity)
        self._door: Sender[Arrival] = requests.outlet
        self.feeds: dict[Hashable, FeedQueue[ModelInput]] = {}
        self.preprocess: dict[Lane, PreprocessStage[ModelInput, Payload]] = {}
        self.batch: dict[Lane, BatchStage[Payload, Row]] = {}
        channels: list[tuple[Channel[Any], Channel[Any]]] = [
            self._add_lane(lane, parts, rows.outlet.clone()) for lane, parts in lanes.items()
        ]
        rows.outlet.close()  # each lane has its own, and the last one to close ends postprocess
        self.parse = ParseStage[ModelInput](
            requests.inlet,
            self.feeds,
            lane_of=_only(lanes) if len(lanes) == 1 else _lane_of,
            accept=accept,
            completer=completer,
            offload=offload,
            options=options,
            workers=PARSE_WORKERS,
        )
        self.postprocess = PostprocessStage[Row](
            rows.inlet, numbers=_numbers, offload=offload, options=options, workers=POSTPROCESS_WORKERS
        )
        self.stages: tuple[Stage, ...] = (
            self.parse,
            *self.preprocess.values(),
            *self.batch.values(),
            self.postprocess,
        )
        inputs, prepared = zip(*channels, strict=True)
        self.channels: tuple[Channel[Any], ...] = (requests, *inputs, *prepared, rows)
        """In front of each stage, in their order."""
        for stage in self.stages:
            stage.gave_up = gave_up

    def _channel(self, name: str, capacity: int, size: Callable[[Any], int] = lambda _: 1) -> Channel[Any]:
        return self._options.channel(name, capacity, size)

    def _add_lane(
        self, lane: Lane, parts: LaneParts, rows: Sender[Sequence[Item[Row]]]
    ) -> tuple[Channel[Any], Channel[Any]]:
        """Make the preprocess and batch stages of a lane; returns the channels in front of them."""
        config, card = self._config, self._model.card
        limits = LaneLimits.of(lane, config, config.batch_tokens(card.device, card.memory_tokens))
        lists = config.channel_capacity
        inputs = self._channel(f"preprocess{SUFFIX[lane]}", lists * limits.chunk_items, len)
        prepared = self._channel(f"batch{SUFFIX[lane]}", lists)
        self.feeds[lane] = FeedQueue(lane, inputs.outlet, chunk_items=limits.chunk_items, clock=self._options.clock)
        self.batch[lane] = BatchStage(
            prepared.inlet,
            rows,
            forward=self._model.forward,
            device=parts.device,
            former=BatchFormer(
                max_items=config.max_batch_items,
                max_cost=parts.service_time.budget.tokens,
                least_cost=config.least_batch_tokens(card.device, card.memory_tokens),
                pads=self._model.pads(lane),
                slots=card.forward_workers,
                lane=lane,
            ),
            options=self._options,
            service_time=parts.service_time.device,
            budget=parts.service_time.budget,
            fed_tokens=limits.fed_tokens,
            slots=card.forward_workers,
            ahead=max(1, card.forward_workers * card.launched_ahead),
            preparing=lambda: self.preprocess[lane].preparing,
            ready_s=lambda: self.preprocess[lane].call_s,
            elsewhere=partial(self._computing_for_others, lane),
            core_is_free=partial(self._core_is_free, lane),
            sharing=self._sharing,
            name=prepared.name,
        )
        self.preprocess[lane] = PreprocessStage(
            inputs.inlet,
            prepared.outlet,
            preprocess=self._prepare,
            offload=parts.preprocess,
            ahead_s=self.batch[lane].ahead_s,
            service_time=parts.service_time.preprocess,
            options=self._options,
            chunk_items=limits.chunk_items,
            workers=limits.preprocess_limit,
            lane=lane,
            name=inputs.name,
        )
        return inputs, prepared

    def _computing_for_others(self, lane: Lane) -> int:
        """Forwards of the other lane, and calls that prepare its inputs, where these share the cores. A forward that
        shares its parts with a second thread waits for it at each of them, while such a call has that thread's core."""
        if self._shared_cores is None:
            return 0
        return sum(self.batch[other].running + self.preprocess[other].calls for other in self.batch if other != lane)

    def _core_is_free(self, lane: Lane) -> bool:
        """Find a core that no call of this lane has. Text calls are short, and bypass the `CoreLimiter`."""
        if self._shared_cores is None or lane != "image":
            return True
        return self.batch[lane].running + self.preprocess[lane].calls < self._shared_cores

    def enter_nowait(self, arrival: Arrival) -> bool:
        """Hand a request to parse, if there is room and nobody waits for it. False: it is to wait in `enter`. One that
        comes after the end fails."""
        try:
            return self._door.send_nowait(arrival)
        except ENDED:
            arrival.ticket.fail(EngineStopped("The engine is stopped."))
            return True

    async def enter(self, arrival: Arrival) -> None:
        """Hand a request to parse as soon as there is room; see `enter_nowait`."""
        try:
            await self._door.send(arrival)
        except ENDED:
            arrival.ticket.fail(EngineStopped("The engine is stopped."))

    def close(self) -> None:
        """Let nothing more in, which ends the pipeline: the end of the streams runs down from stage to stage."""
        self._door.close()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run until it is closed and everything has passed.

        Args:
            task_status: Told when all stages work.

        Raises:
            ExceptionGroup: A stage gave up; the others were cancelled.
        """
        waiting = list(reversed(self.stages))
        try:
            async with anyio.create_task_group() as watchers:
                watchers.start_soon(self._watch_preprocess)
                async with anyio.create_task_group() as stages:
                    while waiting:
                        await stages.start(waiting.pop().run)
                    task_status.started()
                watchers.cancel_scope.cancel()
        finally:
            for stage in waiting:  # cancelled before their turn: nobody else closes their ends of channels
                stage.close()

    async def _watch_preprocess(self) -> None:
        """Raise the alarm about calls that do not end. Nothing can end a thread; an operator can end the process.

        The next look is when one more call would be overdue, so that none that begins between two looks is missed.
        """
        known = dict.fromkeys(self.preprocess, 0)
        while True:
            next_s = min(stage.next_overdue_s(self._alarm_s) for stage in self.preprocess.values())
            await anyio.sleep(max(next_s, self._alarm_s * LEAST_LOOK))
            for lane, stage in self.preprocess.items():
                if (overdue := stage.overdue(self._alarm_s)) > known[lane]:
                    log.error(f"{stage.meter.name}.overdue", calls=overdue, limit=stage.meter.workers)
                known[lane] = overdue

    def save_memory(self, saves: bool) -> None:
        """Keep batches small, or let them grow again."""
        for stage in self.batch.values():
            stage.save_memory(saves)

    def overdue_calls(self) -> int:
        """Preprocess calls that take longer than the alarm allows."""
        return sum(stage.overdue(self._alarm_s) for stage in self.preprocess.values())

    def obstruction(self, lanes: Iterable[Lane] | None = None) -> str | None:
        """Describe the obstruction of these lanes; None where something gets through.

        Args:
            lanes: Those that a request needs, each of which must be free. None: any will do.
        """
        blocking = []
        for lane in self.preprocess if lanes is None else lanes:
            if self.preprocess[lane].is_stuck(self._alarm_s):
                blocking.append(lane)
            elif lanes is None:
                return None
        if not blocking:
            return None
        return f"every {self.preprocess[blocking[0]].meter.name} thread has been busy for more than {self._alarm_s:g} s"

    def stage_statistics(self) -> tuple[StageStatistics, ...]:
        held = {id(batch): batch.waiting for batch in self.batch.values()}
        return tuple(
            stage.meter.snapshot(channel.waiting + held.get(id(stage), 0))
            for stage, channel in zip(self.stages, self.channels, strict=True)
        )

    def priority_statistics(self, priority: Priority, *, requests: int) -> PriorityStatistics:
        waiting = [stage.waiting_of(priority) for stage in self.batch.values()]
        waits = [stage.waits[priority].snapshot() for stage in self.batch.values()]
        return PriorityStatistics(
            requests=requests,
            waiting_requests=sum(feed.waiting_requests(priority) for feed in self.feeds.values()),
            waiting_items=sum(each.items for each in waiting),
            waiting_tokens=sum(each.cost for each in waiting),
            wait=HistogramSnapshot(
                counts=tuple(map(sum, zip(*[wait.counts for wait in waits], strict=True))),
                sum_s=sum(wait.sum_s for wait in waits),
            ),
        )

    def device_statistics(self) -> DeviceStatistics:
        batches: Counter[str] = Counter()
        holds: Counter[str] = Counter()
        for stage in self.batch.values():
            batches += stage.triggers
            holds += stage.holds
        return DeviceStatistics(
            devices=tuple(self._model.devices),
            batches=dict(batches),
            holds=dict(holds),
            budget_tokens={lane: stage.budget_tokens for lane, stage in self.batch.items()},
            items=sum(stage.meter.done - stage.coalesced - stage.recalled for stage in self.batch.values()),
            coalesced_items=sum(stage.coalesced for stage in self.batch.values()),
            tokens=sum(stage.tokens for stage in self.batch.values()),
            padding_tokens=sum(stage.padding_tokens for stage in self.batch.values()),
            wasted_tokens=sum(stage.wasted_tokens for stage in self.batch.values()),
        )


def _lane_of(given: ModelInput) -> Lane:
    return given.lane


def _only(lanes: Iterable[Lane]) -> Callable[[ModelInput], Lane]:
    (only,) = lanes
    return lambda _: only


def _numbers(row: Row) -> int:
    return sum(value.size for value in row.values.values())
