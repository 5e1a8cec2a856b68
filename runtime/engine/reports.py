"""Reports of an engine: its statistics for operators, and its load for routers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Protocol

from staged_pool.runtime.admission.controller import Admission
from staged_pool.runtime.card import Lane, ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine_stages import EngineStages
from staged_pool.runtime.engine.followed_requests import FollowedRequests
from staged_pool.runtime.engine.lanes import BatchLane
from staged_pool.runtime.engine.lifecycle import Lifecycle
from staged_pool.runtime.model import ModelInput, Preparer
from staged_pool.runtime.plugins.model import PluginModel
from staged_pool.runtime.remote.model import RemoteModel
from staged_pool.runtime.statistics import EngineLoad, EngineStatistics, LaneLoad, LimiterStatistics, ModelFacts
from staged_pool.stages.meter import HistogramSnapshot
from staged_pool.stages.offload import Offload, ThreadOffload
from staged_pool.stages.parse import Completer
from staged_pool.stages.scheduling.entries import Priority


class CountingCompleter(Completer[ModelInput], Protocol):
    """A `Completer` that reports on its limits and durations."""

    def limiters(self) -> Mapping[str, LimiterStatistics]:
        """Return the use of its limits; see `EngineStatistics.limiters`."""
        ...

    def fetches(self) -> Mapping[str, HistogramSnapshot]:
        """Return the seconds of its fetches, by outcome; see `EngineStatistics.fetches`."""
        ...


class Reports:
    """Reads the parts of an engine. Nothing waits for a stage, however busy it is.

    Args:
        config: Target delay.
        model: Its caches and devices.
        admission: Amounts in flight.
        stages: The stages of the engine.
        requests: The requests in flight.
        life: Phase and fault.
        clock: Clock of the stages, in seconds.
        completer: Reports on fetches.
        offloads: Calls outside the event loop, by name; see `EngineStatistics.limiters`.
        remote: The engine process that computes for this engine. None: this process does.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: Preparer,
        *,
        admission: Admission,
        stages: EngineStages,
        requests: FollowedRequests,
        life: Lifecycle,
        clock: Callable[[], float],
        completer: CountingCompleter,
        offloads: Mapping[str, Offload],
        remote: RemoteModel | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._admission = admission
        self._stages = stages
        self._requests = requests
        self._life = life
        self._clock = clock
        self._completer = completer
        self._offloads = offloads
        self._remote = remote

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of the engine."""
        model, stages = self._model, self._stages
        return EngineStatistics(
            model=model_facts(model.card),
            phase=self._life.phase,
            fault=self._life.fault,
            stall=stages.stall(),
            admission=self._admission.statistics(),
            cancelled=dict(self._requests.cancelled),
            expired=dict(self._requests.expired),
            overdue_preprocess_calls=stages.overdue_calls(),
            answered=self._requests.durations.snapshot(),
            stages=stages.stage_statistics(self._oldest_s()),
            priorities={
                priority: stages.priority_statistics(priority, requests=self._admission.requests_of(priority))
                for priority in Priority
            },
            device=stages.device_statistics(),
            limiters=self._limiters(),
            fetches=self._completer.fetches(),
            image_cache=model.image_cache,
            result_cache=None if stages.results is None else stages.results.statistics,
            plugin=model.host.statistics() if isinstance(model, PluginModel) else None,
        )

    def _limiters(self) -> Mapping[str, LimiterStatistics]:
        threads = {
            name: LimiterStatistics.of(offload.limiter)
            for name, offload in self._offloads.items()
            if isinstance(offload, ThreadOffload)
        }
        return {**threads, **self._completer.limiters()}

    def _oldest_s(self) -> Mapping[str, float]:
        """Return the seconds since the last progress of the requests in each stage, at most."""
        now = self._clock()
        oldest: dict[str, float] = {}
        for ticket in self._requests.tickets:
            if (since := ticket.progressed_at) != -inf:
                stage = ticket.stage
                oldest[stage] = max(oldest.get(stage, 0.0), now - since)
        return oldest

    def load(self) -> EngineLoad:
        """Return the load of the last seconds. In a front it is that of the engine process."""
        if self._remote is not None and self._remote.load is not None:
            return self._remote.load
        rate = self._requests.answered.value(self._clock())
        return engine_load(self._config, self._admission, self._stages.batch, rate)


def model_facts(card: ModelCard) -> ModelFacts:
    """Return the facts of a model for its statistics."""
    return ModelFacts(dtype=card.dtype, device=card.device, width=card.width, load_s=card.load_s)


def engine_load(
    config: EngineConfig, admission: Admission, batch: Mapping[Lane, BatchLane], requests_per_second: float
) -> EngineLoad:
    """Return the load of the last seconds.

    Args:
        config: Target delay.
        admission: Amounts in flight.
        batch: The batch stage of each lane.
        requests_per_second: Answered requests a second.
    """
    inside = admission.statistics()
    used = (
        inside.requests / inside.max_requests,
        inside.items / inside.max_items,
        inside.tokens / inside.max_tokens,
        inside.body_bytes / inside.max_bytes,
        inside.drain_s / config.target_delay_s,
    )
    return EngineLoad(
        requests=inside.requests,
        running=len({ticket for stage in batch.values() for ticket in stage.tickets() if not ticket.settled}),
        requests_per_second=requests_per_second,
        fullness=min(1.0, max(used)),
        lanes={
            lane: LaneLoad(drain_s=inside.lanes[lane].drain_s, utilization=stage.utilization)
            for lane, stage in batch.items()
        },
    )
