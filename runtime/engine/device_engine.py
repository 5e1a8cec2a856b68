"""One model in the engine process: its admission, its batch stages, and the fronts that it computes for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio

from staged_pool.runtime.caching.result_cache import ResultCache, freeze
from staged_pool.runtime.card import Lane
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.entrance import Entrance
from staged_pool.runtime.engine.lanes import LaneParts, admission_of, build_batch_stage
from staged_pool.runtime.engine.lifecycle import Lifecycle
from staged_pool.runtime.engine.reports import engine_load, model_facts
from staged_pool.runtime.engine.stage_group import StageGroup
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.model import Model
from staged_pool.runtime.payloads import Row
from staged_pool.runtime.remote.return_rows import ReturnStage
from staged_pool.runtime.remote.tickets import FrontTicket
from staged_pool.runtime.statistics import EngineLoad, EngineStatistics
from staged_pool.stages.batch_parts import NearbyWork
from staged_pool.stages.channel import Channel, Sender
from staged_pool.stages.errors import EngineStopped
from staged_pool.stages.meter import Histogram
from staged_pool.stages.scheduling.coalescing import RowReuse
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.recent_mean import RecentMean
from staged_pool.stages.stage import Stage, StageOptions
from staged_pool.stages.ticket import Item, Ticket


class Preparing:
    """The last reports of all fronts about their preprocess stages, for one lane."""

    def __init__(self) -> None:
        self.reports: dict[object, tuple[int, float]] = {}
        """Items in preparation and mean seconds of a call, by front."""

    def items(self) -> int:
        """Return the number of items that the fronts prepare."""
        return sum(items for items, _ in self.reports.values())

    def ready_s(self) -> float:
        """Return the mean seconds of a preprocess call, over the fronts that prepare something."""
        busy = [seconds for items, seconds in self.reports.values() if items]
        return sum(busy) / len(busy) if busy else 0.0


class DeviceStages(StageGroup):
    """batch -> return: the stages of the engine process, between the preprocess and postprocess stages of fronts.

    Args:
        config: Sizes of stages and channels.
        model: Runs on the device.
        lanes: Threads and service time of each lane of the model.
        give: See `ReturnStage`.
        shared_cores: Number of cores that forwards share. None: forwards compute on another device.
        options: Options of all stages.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        *,
        lanes: Mapping[Lane, LaneParts],
        give: Callable[[Sequence[tuple[FrontTicket, Item[Row]]]], object],
        shared_cores: int | None,
        options: StageOptions,
    ) -> None:
        self.results = ResultCache(config.result_cache_mb * 10**6) if config.result_cache_mb else None
        """Rows of earlier requests. None: no rows are cached."""
        reuse: RowReuse[Any, Any] | None = None
        if config.coalesce or self.results is not None:
            reuse = RowReuse(freeze=freeze, coalesce=config.coalesce, cached=self.results)
        rows: Channel[Any] = options.channel("postprocess", config.channel_capacity)
        self.prepared: dict[Lane, Sender[Sequence[Item[Any]]]] = {}
        """Sending ends of the channels in front of the batch stages, by lane."""
        self.preparing = {lane: Preparing() for lane in lanes}
        channels: list[Channel[Any]] = []
        batch = {}
        for lane, parts in lanes.items():
            channel: Channel[Any] = options.channel(
                "batch" if lane == "text" else f"batch_{lane}s", config.channel_capacity
            )
            channels.append(channel)
            self.prepared[lane] = channel.sender
            batch[lane] = build_batch_stage(
                lane,
                parts,
                channel,
                rows.sender.clone(),
                config=config,
                model=model,
                reuse=reuse,
                nearby=self._nearby(lane, shared_cores),
                options=options,
            )
        rows.sender.close()
        stages: list[Stage] = [*batch.values(), ReturnStage(rows.receiver, give=give, options=options)]
        super().__init__(stages, [*channels, rows], batch, {}, lambda: model.devices)

    def _nearby(self, lane: Lane, shared_cores: int | None) -> NearbyWork:
        def running(others: bool) -> int:
            return sum(stage.running for name, stage in self.batch.items() if (name != lane) == others)

        return NearbyWork(
            preparing=self.preparing[lane].items,
            ready_s=self.preparing[lane].ready_s,
            elsewhere=lambda: 0 if shared_cores is None else running(others=True),
            core_is_free=lambda: shared_cores is None or lane != "image" or running(others=False) < shared_cores,
        )

    def close(self) -> None:
        """See `StageGroup.close`."""
        for sender in self.prepared.values():
            sender.close()

    def save_memory(self, saves: bool) -> None:
        """See `StageGroup.save_memory`."""
        super().save_memory(saves)
        if saves and self.results is not None:
            self.results.clear()


class DeviceEngine:
    """A model that computes for fronts: they decode and prepare requests, and make the answers.

    Args:
        config: Settings of the engine.
        model: The loaded model.
        lanes: Threads and service time of each lane.
        give: See `ReturnStage`.
        shared_cores: See `DeviceStages`.
        options: Options of all stages.
        memory: The memory governor of this process.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        *,
        lanes: Mapping[Lane, LaneParts],
        give: Callable[[Sequence[tuple[FrontTicket, Item[Row]]]], object],
        shared_cores: int | None,
        options: StageOptions,
        memory: MemoryGovernor,
    ) -> None:
        self.config = config
        self.model = model
        self.clock = options.clock
        service_times = {lane: parts.service_time for lane, parts in lanes.items()}
        self.admission = admission_of(config, model.card, service_times, options.clock)
        self.entrance = Entrance(self.admission, options.clock)
        self.admission.in_flight.room_freed = self.entrance.grant
        self.stages = DeviceStages(config, model, lanes=lanes, give=give, shared_cores=shared_cores, options=options)
        self.requests = FrontRequests(self.entrance)
        self.answered = RecentMean()
        """Requests answered a second, of late."""
        self._life = Lifecycle(config, self.stages, self.requests, [], memory)
        self.entrance.check_open = self._life.check_open
        self.wait_broken = self._life.wait_broken
        self.drain = self._life.drain

    @property
    def fault(self) -> str | None:
        """Reason for taking no requests, for now or for ever; None if there is none."""
        return self._life.fault

    def stall(self) -> str | None:
        """Return the reason if a forward runs far longer than predicted; else None."""
        return self.stages.stall()

    def load(self) -> EngineLoad:
        """Return the load of the last seconds, of all fronts."""
        return engine_load(self.config, self.admission, self.stages.batch, self.answered.value(self.clock()))

    def fed(self) -> dict[Lane, int]:
        """Return the tokens that all fronts have fed, by lane."""
        return {lane: round(tokens) for lane, tokens in self.admission.in_flight.fed.items()}

    def clear_result_cache(self) -> None:
        """Drop the cached rows."""
        if self.stages.results is not None:
            self.stages.results.clear()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[DeviceEngine]:
        """Run the stages for a block, and drain at its end."""
        async with self._life.running():
            yield self

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of admission and the device. The fronts have those of the other stages."""
        return EngineStatistics(
            model=model_facts(self.model.card),
            phase=self._life.phase,
            fault=self.fault,
            stall=self.stall(),
            admission=self.admission.statistics(),
            cancelled={},
            expired={},
            overdue_preprocess_calls=0,
            answered=Histogram().snapshot(),  # fronts answer
            stages=self.stages.stage_statistics(),
            priorities={
                priority: self.stages.priority_statistics(priority, requests=self.admission.requests_of(priority))
                for priority in Priority
            },
            device=self.stages.device_statistics(),
            limiters={},
            fetches={},
            result_cache=None if self.stages.results is None else self.stages.results.statistics,
        )


class FrontRequests:
    """The requests of all fronts for one model.

    Args:
        entrance: Admits them.
    """

    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance
        self.open: set[FrontTicket] = set()
        self._entering = 0
        """Requests that wait for room, or were let in and do not know it yet."""
        self._empty = anyio.Event()

    @property
    def tickets(self) -> Collection[Ticket]:
        """Claims of fronts that have not left."""
        return self.open

    def any(self) -> bool:
        """See `Requests.any`."""
        return bool(self.open or self._entering)

    @contextmanager
    def entering(self) -> Iterator[None]:
        """Count a request as in flight while it enters."""
        self._entering += 1
        try:
            yield
        finally:
            self._entering -= 1
            self._note_departure()

    def settle_waiting(self) -> None:
        """See `Requests.settle_waiting`."""
        self._entrance.grant()

    def remove(self, ticket: FrontTicket) -> None:
        """Remove a request whose front has left."""
        self.open.discard(ticket)
        self._note_departure()

    def _note_departure(self) -> None:
        if not self.any():
            self._empty.set()

    async def wait_until_empty(self) -> None:
        """See `Requests.wait_until_empty`."""
        while self.any():
            if self._empty.is_set():
                self._empty = anyio.Event()
            await self._empty.wait()

    def fail_all(self, message: str) -> None:
        """See `Requests.fail_all`."""
        self._entrance.grant()
        for ticket in list(self.open):
            ticket.fail(EngineStopped(message))
