"""Stages of an engine: parse -> preprocess -> batch -> postprocess, wired by bounded channels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

import anyio

from staged_pool.runtime.caching.fingerprints import Identities
from staged_pool.runtime.caching.result_cache import ResultCache, freeze
from staged_pool.runtime.card import Lane
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.lanes import LaneParts, LaneStages, SharedCores
from staged_pool.runtime.engine.stage_group import StageGroup
from staged_pool.runtime.model import ModelInput, Preparer
from staged_pool.runtime.payloads import ModelRow
from staged_pool.runtime.remote.model import RemoteModel
from staged_pool.stages.channel import ENDED, Channel, Sender
from staged_pool.stages.errors import EngineStopped
from staged_pool.stages.feeding import FeedQueue
from staged_pool.stages.log import get_logger
from staged_pool.stages.offload import Offload
from staged_pool.stages.parse import Arrival, Completer, ParseStage
from staged_pool.stages.postprocess import PostprocessStage
from staged_pool.stages.preprocess import Preprocess, PreprocessStage
from staged_pool.stages.scheduling.coalescing import RowReuse
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.work import Plan, Request

PARSE_WORKERS: Final = 8
"""Requests that are decoded at once. Small ones are decoded on the event loop, and no worker waits for later stages."""

POSTPROCESS_WORKERS: Final = 4

WATCH_INTERVAL: Final = 0.01
"""Shortest interval between two looks for overdue preprocess calls, as a part of `preprocess_alarm_s`."""

log = get_logger("staged_pool.engine")


class EngineStages(StageGroup):
    """parse -> preprocess -> batch -> postprocess. Answers leave through the tickets of the requests.

    Each lane of the model has its own preprocess and batch stage, and waits for nothing of another lane.

    Args:
        config: The sizes of stages and channels.
        model: Runs in preprocess and on the device.
        accept: Checks and plans a decoded request; runs in parse.
        lanes: Threads and service time of each lane of the model.
        completer: Completes inputs, such as images that are given as URLs.
        offload: Decodes large requests, and makes large answers.
        shared_cores: Number of cores that forwards and preprocess share. None: forwards compute on another device.
        options: Options of all stages.
        remote: The engine process that computes in place of `model`. None: this process does.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Preparer,
        *,
        accept: Callable[[Ticket, Request], Plan[ModelInput]],
        lanes: Mapping[Lane, LaneParts],
        completer: Completer[ModelInput],
        offload: Offload,
        shared_cores: int | None,
        options: StageOptions,
        remote: RemoteModel | None = None,
    ) -> None:
        self._alarm_s = config.preprocess_alarm_s
        self._model = model
        self._remote = remote
        self.results = ResultCache(config.result_cache_mb * 10**6) if config.result_cache_mb and not remote else None
        """Rows of earlier requests, of all lanes. None: no rows are cached here."""
        requests: Channel[Any] = options.channel("parse", config.channel_capacity * config.chunk_items)
        rows: Channel[Any] = options.channel("postprocess", config.channel_capacity)
        built = self._build_lanes(config, lanes, rows.sender, SharedCores(shared_cores), options)
        feeds: dict[Hashable, FeedQueue[ModelInput]] = {lane: stages.feed for lane, stages in built.items()}
        self.parse = ParseStage[ModelInput](
            requests.receiver,
            feeds,
            lane_of=_only(lanes) if len(lanes) == 1 else _lane_of,
            accept=accept,
            completer=completer,
            offload=offload,
            options=options,
            workers=PARSE_WORKERS,
        )
        self.preprocess: dict[Lane, PreprocessStage[ModelInput, Any]] = {
            lane: stages.preprocess for lane, stages in built.items()
        }
        batch = {lane: stages.batch for lane, stages in built.items()}
        self.postprocess = PostprocessStage[ModelRow](
            rows.receiver, numbers=_numbers, offload=offload, options=options, workers=POSTPROCESS_WORKERS
        )
        super().__init__(
            (self.parse, *self.preprocess.values(), *batch.values(), self.postprocess),
            (
                requests,
                *[stages.inputs for stages in built.values()],
                *[stages.prepared for stages in built.values()],
                rows,
            ),
            batch,
            feeds,
            lambda: model.devices,
        )
        self._arrivals: Sender[Arrival] = requests.sender

    def _build_lanes(
        self,
        config: EngineConfig,
        lanes: Mapping[Lane, LaneParts],
        rows: Sender[Sequence[Item[ModelRow]]],
        cores: SharedCores,
        options: StageOptions,
    ) -> dict[Lane, LaneStages]:
        reuse: RowReuse[Any, Any] | None = None
        preprocess: Preprocess[ModelInput, Any] = self._model.preprocess
        if config.coalesce or config.result_cache_mb:
            reuse = RowReuse(freeze=freeze, coalesce=config.coalesce, cached=self.results)
            preprocess = Identities(None if self._remote is None else self._remote.secret).given_to(
                self._model.preprocess
            )
        cores.lanes = built = {
            lane: LaneStages(
                lane,
                parts,
                rows.clone(),
                config=config,
                model=self._model,
                preprocess=preprocess,
                reuse=reuse,
                cores=cores,
                options=options,
                remote=self._remote,
            )
            for lane, parts in lanes.items()
        }
        rows.close()  # each lane has a clone; the last one to close ends postprocess
        return built

    def enter_nowait(self, arrival: Arrival) -> bool:
        """Hand a request to parse if there is room and nobody waits for it.

        A request that comes after the end fails with `EngineStopped`.

        Returns:
            False if it must wait in `enter`.
        """
        try:
            return self._arrivals.send_nowait(arrival)
        except ENDED:
            arrival.ticket.fail(EngineStopped("The engine is stopped."))
            return True

    async def enter(self, arrival: Arrival) -> None:
        """Hand a request to parse as soon as there is room; see `enter_nowait`."""
        try:
            await self._arrivals.send(arrival)
        except ENDED:
            arrival.ticket.fail(EngineStopped("The engine is stopped."))

    def close(self) -> None:
        """Let nothing more in: the end of the stream then runs down from stage to stage."""
        self._arrivals.close()

    async def _watch(self) -> None:
        """Log preprocess calls that do not end. No thread can be ended; an operator can end the process.

        The next look is when one more call would be overdue, so none that begins between two looks is missed.
        """
        known = dict.fromkeys(self.preprocess, 0)
        while True:
            next_s = min(stage.next_overdue_s(self._alarm_s) for stage in self.preprocess.values())
            await anyio.sleep(max(next_s, self._alarm_s * WATCH_INTERVAL))
            for lane, stage in self.preprocess.items():
                if (overdue := stage.overdue(self._alarm_s)) > known[lane]:
                    log.error(f"{stage.meter.name}.overdue", calls=overdue, limit=stage.meter.workers)
                known[lane] = overdue

    def save_memory(self, saves: bool) -> None:
        super().save_memory(saves)
        if saves:  # memory of this process is short: the caches of others stay
            self._model.clear_image_cache()
            if self.results is not None:
                self.results.clear()

    def clear_image_cache(self) -> None:
        """Drop the cached images, in all fronts if there are several."""
        self._model.clear_image_cache()
        if self._remote is not None:
            self._remote.clear(results=False)

    def clear_result_cache(self) -> None:
        """Drop the cached rows of earlier requests."""
        if self.results is not None:
            self.results.clear()
        if self._remote is not None:
            self._remote.clear(results=True)

    def overdue_calls(self) -> int:
        """Count the preprocess calls that run for longer than the alarm allows."""
        return sum(stage.overdue(self._alarm_s) for stage in self.preprocess.values())

    def obstruction(self, lanes: Iterable[Lane] | None = None) -> str | None:
        """Return the reason why nothing gets through these lanes; None if something does.

        Args:
            lanes: Lanes that a request needs, all of which must be free. None: one free lane is enough.
        """
        if self._remote is not None and (fault := self._remote.fault):
            return fault
        blocking = []
        for lane in self.preprocess if lanes is None else lanes:
            if self.preprocess[lane].is_stuck(self._alarm_s):
                blocking.append(lane)
            elif lanes is None:
                return None
        if not blocking:
            return None
        return f"every {self.preprocess[blocking[0]].meter.name} thread has been busy for more than {self._alarm_s:g} s"


def _lane_of(given: ModelInput) -> Lane:
    return given.lane


def _only(lanes: Iterable[Lane]) -> Callable[[ModelInput], Lane]:
    (only,) = lanes
    return lambda _: only


def _numbers(row: ModelRow) -> int:
    return row.numbers
