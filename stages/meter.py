"""Meters of stages: counts and durations, cheap enough for every item."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the histogram's buckets in seconds; one more holds everything above."""

Drop = Literal["abandoned", "expired", "failed"]


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Durations since the start, by bucket."""

    counts: tuple[int, ...]
    """Observations in each bucket of `BUCKETS_S`, not cumulative, and in one above the last."""
    sum_s: float
    """Sum of all durations."""

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Durations in fixed buckets. Only the event loop's thread writes."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(BUCKETS_S, seconds)] += times
        self._sum_s += seconds * times

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(tuple(self._counts), self._sum_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatistics:
    """One stage at one moment. Counts are of items since the start; for parse, of requests."""

    name: str
    waiting: int
    """Lists of items in the channel in front of it, or with senders that wait.

    For parse, requests instead of lists. For batch, the items in the fair queue are added.
    """
    busy: int
    """Workers that hold items. For batch, slots that are taken."""
    workers: int
    done: int
    """Items sent to the next stage."""
    dropped: Mapping[Drop, int]
    """Items that ended in this stage, by cause."""
    crashes: int
    """Workers that crashed and were restarted."""
    wait: HistogramSnapshot
    """Durations from the send of the earlier stage until a worker takes the item."""
    service: HistogramSnapshot
    """Durations with a worker. For batch, on the device."""


class BusyWorker:
    """The block of `StageMeter.working`, in which a worker counts as busy."""

    __slots__ = ("_meter",)

    def __init__(self, meter: StageMeter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._meter.busy += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._meter.busy -= 1


class StageMeter:
    """Counts and durations of one stage. Only the event loop's thread writes."""

    def __init__(self, name: str, workers: int) -> None:
        self.name = name
        self.workers = workers
        self.busy = 0
        self.done = 0
        self.crashes = 0
        self.dropped: dict[Drop, int] = {"abandoned": 0, "expired": 0, "failed": 0}
        self.wait = Histogram()
        self.service = Histogram()

    def working(self) -> BusyWorker:
        """Count a worker as busy while the block runs."""
        return BusyWorker(self)

    def snapshot(self, waiting: int) -> StageStatistics:
        return StageStatistics(
            name=self.name,
            waiting=waiting,
            busy=self.busy,
            workers=self.workers,
            done=self.done,
            dropped=dict(self.dropped),
            crashes=self.crashes,
            wait=self.wait.snapshot(),
            service=self.service.snapshot(),
        )
