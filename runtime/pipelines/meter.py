"""Counts and durations of one stage of a pipeline."""

from __future__ import annotations

from staged_pool.runtime.pipelines.statistics import PipelineStageStatistics
from staged_pool.runtime.pipelines.window import Window
from staged_pool.stages.meter import Histogram


class PipelineStageMeter:
    """Counts and durations of one stage. Only the event loop's thread writes."""

    def __init__(self) -> None:
        self.done = 0
        self.skipped = 0
        self.failed = 0
        self.wait = Histogram()
        self.service = Histogram()

    def snapshot(self, name: str, window: Window) -> PipelineStageStatistics:
        """Return the counts, with those of the window of the stage."""
        return PipelineStageStatistics(
            name=name,
            window=window.limit,
            in_flight=window.taken,
            waiting=window.waiting,
            done=self.done,
            skipped=self.skipped,
            failed=self.failed,
            wait=self.wait.snapshot(),
            service=self.service.snapshot(),
        )
