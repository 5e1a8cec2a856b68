"""A group of stages that run together, and the statistics of its devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import TaskStatus

from staged_pool.runtime.card import Lane
from staged_pool.runtime.engine.lanes import BatchLane
from staged_pool.runtime.statistics import (
    BatchSizes,
    DeviceStatistics,
    PriorityStatistics,
    RecentBatch,
    ReplicaStatistics,
)
from staged_pool.stages.channel import Channel
from staged_pool.stages.feeding import FeedQueue
from staged_pool.stages.meter import HistogramSnapshot, StageStatistics
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.stage import Stage
from staged_pool.stages.user_code import run_guarded


class StageGroup(ABC):
    """Stages in the order of the work, each with the channel in front of it.

    Args:
        stages: The stages.
        channels: The channel in front of each stage, in the same order.
        batch: The batch stage of each lane, which is one of the stages.
        feeds: The feed queue of each lane. Empty: other processes feed.
        devices: Returns the statistics of each device.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        channels: Sequence[Channel[Any]],
        batch: Mapping[Lane, BatchLane],
        feeds: Mapping[Any, FeedQueue[Any]],
        devices: Callable[[], Sequence[ReplicaStatistics]],
    ) -> None:
        self.stages = tuple(stages)
        self.channels = tuple(channels)
        self.batch = batch
        self.feeds = feeds
        self._devices = devices

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run until the stages are closed and everything has passed through them.

        Args:
            task_status: Told when all stages work.

        Raises:
            ExceptionGroup: A stage gave up; the others were cancelled.
        """
        waiting = list(reversed(self.stages))
        try:
            async with anyio.create_task_group() as watchers:
                watchers.start_soon(run_guarded, self._watch)
                async with anyio.create_task_group() as stages:
                    while waiting:
                        await stages.start(waiting.pop().run)
                    task_status.started()
                watchers.cancel_scope.cancel()
        finally:
            for stage in waiting:  # cancelled before they began: nobody else closes their channels
                stage.close()

    @abstractmethod
    def close(self) -> None:
        """Let nothing more in: the end of the stream then runs down from stage to stage."""

    def save_memory(self, saves: bool) -> None:
        """Keep batches small and empty the caches, or let batches grow again."""
        for stage in self.batch.values():
            stage.save_memory(saves)

    def overdue_calls(self) -> int:
        """Count the preprocess calls that run for longer than the alarm allows."""
        return 0

    def obstruction(self, lanes: Iterable[Lane] | None = None) -> str | None:
        """Return the reason why nothing gets through these lanes; None if something does.

        Args:
            lanes: Lanes that a request needs, all of which must be free. None: one free lane is enough.
        """
        return None

    def stall(self) -> str | None:
        """Return the reason if a forward of any lane runs far longer than predicted; else None."""
        return next(filter(None, (stage.stall() for stage in self.batch.values())), None)

    async def _watch(self) -> None:
        """Watch the stages while they run. By default there is nothing to watch."""
        await anyio.lowlevel.checkpoint()

    def on_give_up(self, call: Callable[[Exception], object]) -> None:
        """Call a function as soon as a stage cannot go on. `run` itself first waits for running calls."""
        for stage in self.stages:
            stage.gave_up = call

    def stage_statistics(self, oldest_s: Mapping[str, float] | None = None) -> tuple[StageStatistics, ...]:
        """Return the statistics of each stage, in the order of `stages`.

        Args:
            oldest_s: See `StageStatistics.oldest_s`, by stage. None: unknown here.
        """
        queued = {id(batch): batch.waiting for batch in self.batch.values()}
        oldest_s = oldest_s or {}
        return tuple(
            stage.meter.snapshot(
                waiting=channel.waiting + queued.get(id(stage), 0),
                fullness=channel.fullness,
                oldest_s=oldest_s.get(stage.meter.name, 0.0),
            )
            for stage, channel in zip(self.stages, self.channels, strict=True)
        )

    def priority_statistics(self, priority: Priority, *, requests: int) -> PriorityStatistics:
        """Return the statistics of one priority, given the number of its requests in flight."""
        waiting = [stage.waiting_of(priority) for stage in self.batch.values()]
        waits = [stage.results.waits[priority].snapshot() for stage in self.batch.values()]
        return PriorityStatistics(
            requests=requests,
            waiting_requests=sum(feed.waiting_requests(priority) for feed in self.feeds.values()),
            waiting_items=sum(each.items for each in waiting),
            waiting_tokens=sum(each.tokens for each in waiting),
            wait=HistogramSnapshot(
                counts=tuple(map(sum, zip(*[wait.counts for wait in waits], strict=True))),
                sum_s=sum(wait.sum_s for wait in waits),
            ),
        )

    def _recent_batches(self) -> Iterator[RecentBatch]:
        for lane, stage in self.batch.items():
            now = stage.meter.now()
            for batch in stage.results.recent:
                yield RecentBatch(
                    lane=lane,
                    age_s=now - batch.began_at,
                    seconds=batch.seconds,
                    items=batch.items,
                    tokens=batch.tokens,
                    fill=batch.fill,
                    trigger=batch.trigger,
                )

    def device_statistics(self) -> DeviceStatistics:
        """Return the work of all devices since the start."""
        batches: Counter[str] = Counter()
        holds: Counter[str] = Counter()
        hold_s: Counter[str] = Counter()
        for stage in self.batch.values():
            batches += stage.triggers
            holds += stage.holds
            hold_s.update(stage.hold_seconds())
        results = [stage.results for stage in self.batch.values()]
        done = sum(stage.meter.done for stage in self.batch.values())
        return DeviceStatistics(
            devices=tuple(self._devices()),
            batches=dict(batches),
            holds=dict(holds),
            hold_s=dict(hold_s),
            recent=tuple(self._recent_batches()),
            running_s=max((stage.running_s() for stage in self.batch.values()), default=0.0),
            sizes={
                lane: BatchSizes(
                    items=stage.results.batch_items.snapshot(),
                    tokens=stage.results.batch_tokens.snapshot(),
                    fill=stage.results.batch_fill.snapshot(),
                )
                for lane, stage in self.batch.items()
            },
            budget_tokens={lane: stage.budget_tokens for lane, stage in self.batch.items()},
            items=done - sum(each.coalesced + each.cached_items for each in results),
            coalesced_items=sum(each.coalesced for each in results),
            tokens=sum(each.tokens for each in results),
            padding_tokens=sum(each.padding_tokens for each in results),
            wasted_tokens=sum(each.wasted_tokens for each in results),
        )
