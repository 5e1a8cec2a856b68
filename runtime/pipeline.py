"""The stages, wired: who hands what to whom, with how many workers, through how large a channel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import anyio
from anyio.abc import TaskStatus

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.errands import Errands, Fetch
from staged_pool.runtime.identity import Identities
from staged_pool.runtime.lanes import SUFFIX, LaneLimits, LaneParts
from staged_pool.runtime.model import Lane, Model, ModelInput, Payload, Row
from staged_pool.runtime.result_cache import ResultCache, freeze
from staged_pool.runtime.statistics import DeviceStatistics, PriorityStatistics
from staged_pool.stages.batch import BatchStage
from staged_pool.stages.channel import ENDED, Channel, Outlet
from staged_pool.stages.errors import EngineStopped
from staged_pool.stages.forming import BatchBuilder
from staged_pool.stages.log import get_logger
from staged_pool.stages.meter import HistogramSnapshot, StageStatistics
from staged_pool.stages.offload import Offload
from staged_pool.stages.parse import Arrival, ParseStage
from staged_pool.stages.postprocess import PostprocessStage
from staged_pool.stages.preprocess import Preprocess, PreprocessStage
from staged_pool.stages.sharing import Sharing
from staged_pool.stages.stage import Stage, StageOptions
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import Item, Plan, Priority, Request

PARSE_WORKERS = 64
"""Requests that are being cut at once. One that waits for its own items to be done holds its worker, so this is also
how many large requests share the pipeline before a small one has to wait for one of them to be fed."""

POSTPROCESS_WORKERS = 4

GATHER_S: Final = 0.002
"""For how long a request waits for others while forwards keep all cores busy, in seconds: none of it could be run
before one of them ends, some tens of milliseconds, and each turn of parse, preprocess and batch takes a core from them,
however little it does. On two cores of a Xeon, in turns, 4, 16 and 64 clients of a short text had 11, 7 and 8 % more
answers, and 4 clients of 8 texts 12 % (1 ms: 2, 6, 4 and 4; 4 ms: 1, 3, -4 and 11)."""

log = get_logger("staged_pool.engine")


class Pipeline:
    """parse -> preprocess -> batch -> postprocess. Requests go in at `door`; answers come out through their tickets.

    Each lane of the model has a preprocess and a batch stage of its own, which wait for nothing of the other's. Parse
    feeds texts. Pictures are fed by the callers (see `Errands`), so that no worker of parse waits for them.

    Args:
        config: Its sizes.
        model: What preprocess and the device run.
        accept: What parse asks of a decoded request.
        lanes: What each lane of the model has for itself.
        fetch: Gets pictures that are given as URLs.
        offload: Runs the decoding of large requests and the making of large answers.
        cores: What forwards and preprocess share. None: forwards run elsewhere.
        options: For all stages.
        expects_refusals: Whether requests are refused at the door for now.
        gave_up: Called at once when a stage cannot go on, where `run` first waits for the calls that still run.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        *,
        accept: Callable[[Ticket, Request], Plan[ModelInput]],
        lanes: Mapping[Lane, LaneParts],
        fetch: Fetch,
        offload: Offload,
        cores: int | None,
        options: StageOptions,
        expects_refusals: Callable[[], bool],
        gave_up: Callable[[Exception], object],
    ) -> None:
        self._alarm_s = config.preprocess_alarm_s
        self._cores = cores
        self._model = model
        batch_tokens = config.batch_tokens(model.card.device, model.card.memory_tokens)
        limits = {lane: LaneLimits.of(lane, config, batch_tokens) for lane in lanes}
        lists = config.channel_capacity
        requests = Channel[Arrival]("parse", lists * config.chunk_items, lingers_s=self._gathers_s)
        inputs = {
            lane: Channel[Sequence[Item[ModelInput]]](
                f"preprocess{SUFFIX[lane]}", lists * limits[lane].chunk_items, size=len
            )
            for lane in lanes
        }
        prepared = {lane: Channel[Sequence[Item[Payload]]](f"batch{SUFFIX[lane]}", lists) for lane in lanes}
        rows = Channel[Sequence[Item[Row]]]("postprocess", lists)
        self._door = requests.outlet
        self.results = ResultCache(config.result_cache_mb * 10**6) if config.result_cache_mb else None
        """Rows that are kept; those of both lanes have identities of their own. None: no rows are."""
        sharing: Sharing[Payload, Row] | None = None
        preprocess: Preprocess[ModelInput, Payload] = model.preprocess
        if config.coalesce or self.results is not None:
            sharing = Sharing(freeze=freeze, coalesce=config.coalesce, kept=self.results)
            preprocess = Identities().given_to(model.preprocess)
        self.batch = {
            lane: BatchStage[Payload, Row](
                prepared[lane].inlet,
                rows.outlet.clone(),
                forward=model.forward,
                device=parts.device,
                builder=BatchBuilder(
                    max_items=config.max_batch_items,
                    max_cost=parts.pace.budget.tokens,
                    least_cost=config.least_batch_tokens(model.card.device, model.card.memory_tokens),
                    pads=model.pads(lane),
                    min_share=limits[lane].min_share_tokens,
                    slots=model.card.forward_workers,
                    lane=lane,
                ),
                options=options,
                pace=parts.pace.device,
                budget=parts.pace.budget,
                slots=model.card.forward_workers,
                ahead=max(1, model.card.forward_workers * model.card.launched_ahead),
                waiting_tokens=limits[lane].waiting_tokens,
                preparing=partial(self._preparing, lane),
                elsewhere=partial(self._computing_for_others, lane),
                gathers=lane == "text" and cores is not None,  # slots of other devices do not slow each other down
                cores=cores,
                sharing=sharing,
                name=f"batch{SUFFIX[lane]}",
            )
            for lane, parts in lanes.items()
        }
        rows.outlet.close()  # each lane has its own, and the last one to close ends postprocess
        self.preprocess = {
            lane: PreprocessStage[ModelInput, Payload](
                inputs[lane].inlet,
                prepared[lane].outlet,
                preprocess=preprocess,
                offload=parts.preprocess,
                ahead_s=self.batch[lane].ahead_s,
                pace=parts.pace.preprocess,
                options=options,
                chunk_items=limits[lane].chunk_items,
                workers=limits[lane].preprocess_limit,
                lane=lane,
                name=f"preprocess{SUFFIX[lane]}",
            )
            for lane, parts in lanes.items()
        }
        fed_by_parse: dict[Hashable, Outlet[Sequence[Item[ModelInput]]]] = {
            lane: inputs[lane].outlet for lane in lanes if lane == "text"
        }
        self.parse = ParseStage[ModelInput](
            requests.inlet,
            fed_by_parse,
            lane_of=_only(lanes) if len(lanes) == 1 else _lane_of,
            accept=accept,
            offload=offload,
            options=options,
            chunk_items=config.chunk_items,
            workers=PARSE_WORKERS,
            request_waiting_tokens=config.request_waiting_tokens,
            waiting_tokens=config.waiting_tokens,
        )
        self.errands = Errands(
            {lane: inputs[lane].outlet for lane in lanes if lane not in fed_by_parse},
            fetch=fetch,
            limit=config.media_limit,
            limit_bytes=config.max_bytes,
            room_tokens={lane: limits[lane].request_waiting_tokens for lane in lanes},
            clock=options.clock,
        )
        self.postprocess = PostprocessStage[Row](
            rows.inlet,
            numbers=_numbers,
            offload=offload,
            options=options,
            workers=POSTPROCESS_WORKERS,
            expects_refusals=expects_refusals,
        )
        self.stages: tuple[Stage, ...] = (
            self.parse,
            *self.preprocess.values(),
            *self.batch.values(),
            self.postprocess,
        )
        self.channels: tuple[Channel[Any], ...] = (requests, *inputs.values(), *prepared.values(), rows)
        """In front of each stage, in their order."""
        for stage in self.stages:
            stage.gave_up = gave_up

    def _preparing(self, lane: Lane) -> int:
        return self.preprocess[lane].calls

    def _computing_for_others(self, lane: Lane) -> int:
        """Forwards of the other lane, and calls that prepare its inputs, where these share the cores. A forward that
        shares its parts with a second thread waits for it at each of them, while such a call has that thread's core."""
        if self._cores is None:
            return 0
        return sum(self.batch[other].running + self._preparing(other) for other in self.batch if other != lane)

    def enter_nowait(self, arrival: Arrival) -> bool:
        """Hand a request to parse, if there is room and nobody waits for it. False: it is to wait in `enter`. One that
        comes after the end fails."""
        try:
            return self._door.send_nowait(arrival)
        except ENDED:
            arrival.ticket.fail(EngineStopped("The engine is stopped."))
            return True

    async def enter(self, arrival: Arrival) -> None:
        """As `enter_nowait`, waiting for room."""
        try:
            await self._door.send(arrival)
        except ENDED:
            arrival.ticket.fail(EngineStopped("The engine is stopped."))

    def close(self) -> None:
        """Let nothing more in, which ends the pipeline: the end of the streams runs down from stage to stage."""
        self._door.close()
        self.errands.close()

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
        """Raise the alarm about calls that do not end. Nothing can end a thread; an operator can end the process."""
        known = dict.fromkeys(self.preprocess, 0)
        while True:
            await anyio.sleep(self._alarm_s)
            for lane, stage in self.preprocess.items():
                if (overdue := stage.overdue(self._alarm_s)) > known[lane]:
                    log.error(f"{stage.meter.name}.overdue", calls=overdue, limit=stage.meter.workers)
                known[lane] = overdue

    def _gathers_s(self) -> float:
        """How long a request may wait for others before it is parsed, in seconds."""
        if self._cores is None or not all(stage.is_busy for stage in self.batch.values()):
            return 0.0
        return GATHER_S

    def overdue_calls(self) -> int:
        """Preprocess calls that take longer than the alarm allows."""
        return sum(stage.overdue(self._alarm_s) for stage in self.preprocess.values())

    def obstruction(self, lanes: Iterable[Lane] | None = None) -> str | None:
        """Why nothing of these lanes gets through for now; None where something may.

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

    def priority_statistics(self, priority: Priority, *, requests: int, at_gate: int) -> PriorityStatistics:
        waiting = [stage.waiting_of(priority) for stage in self.batch.values()]
        waits = [stage.waits[priority].snapshot() for stage in self.batch.values()]
        return PriorityStatistics(
            requests=requests,
            at_gate=at_gate,
            waiting_items=sum(each.items for each in waiting),
            waiting_tokens=sum(each.cost for each in waiting),
            wait=HistogramSnapshot(
                counts=tuple(map(sum, zip(*[wait.counts for wait in waits], strict=True))),
                sum_s=sum(wait.sum_s for wait in waits),
            ),
        )

    def device_statistics(self) -> DeviceStatistics:
        batches: Counter[str] = Counter()
        for stage in self.batch.values():
            batches += stage.triggers
        return DeviceStatistics(
            devices=tuple(self._model.devices),
            batches=dict(batches),
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
