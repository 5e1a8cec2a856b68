"""Reports of an engine: its statistics for operators, and its load for routers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from staged_pool.runtime.admission.controller import Admission
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine_stages import EngineStages
from staged_pool.runtime.engine.followed_requests import FollowedRequests
from staged_pool.runtime.engine.lanes import BatchLane
from staged_pool.runtime.engine.lifecycle import Lifecycle
from staged_pool.runtime.model import Lane, Preparer
from staged_pool.runtime.plugins.model import PluginModel
from staged_pool.runtime.remote.model import RemoteModel
from staged_pool.runtime.statistics import EngineLoad, EngineStatistics, LaneLoad
from staged_pool.stages.scheduling.entries import Priority


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
        remote: RemoteModel | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._admission = admission
        self._stages = stages
        self._requests = requests
        self._life = life
        self._clock = clock
        self._remote = remote

    def statistics(self) -> EngineStatistics:
        """Return a snapshot of the engine."""
        model, stages = self._model, self._stages
        return EngineStatistics(
            phase=self._life.phase,
            fault=self._life.fault,
            stall=stages.stall(),
            admission=self._admission.statistics(),
            cancelled=dict(self._requests.cancelled),
            expired=dict(self._requests.expired),
            overdue_preprocess_calls=stages.overdue_calls(),
            stages=stages.stage_statistics(),
            priorities={
                priority: stages.priority_statistics(priority, requests=self._admission.requests_of(priority))
                for priority in Priority
            },
            device=stages.device_statistics(),
            image_cache=model.image_cache,
            result_cache=None if stages.results is None else stages.results.statistics,
            plugin=model.host.statistics() if isinstance(model, PluginModel) else None,
        )

    def load(self) -> EngineLoad:
        """Return the load of the last seconds. In a front it is that of the engine process."""
        if self._remote is not None and self._remote.load is not None:
            return self._remote.load
        rate = self._requests.answered.value(self._clock())
        return engine_load(self._config, self._admission, self._stages.batch, rate)


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
