"""Meters of stages: counts, sizes and durations, cheap enough for every item."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal

BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the buckets of a duration in seconds; one more holds everything above."""

SIZE_BOUNDS: Final = tuple(float(2**power) for power in range(18))
"""Upper bounds of the buckets of a size: powers of two up to 131,072."""

RATIO_BOUNDS: Final = tuple(tenth / 10 for tenth in range(1, 11))
"""Upper bounds of the buckets of a part of a whole."""

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


@dataclass(frozen=True, slots=True)
class SizesSnapshot:
    """Sizes since the start, by bucket."""

    bounds: tuple[float, ...]
    """Upper bounds of the buckets; one more holds everything above."""
    counts: tuple[int, ...]
    """Observations in each bucket, not cumulative, and in one above the last."""
    sum: float
    """Sum of all sizes."""

    @property
    def count(self) -> int:
        return sum(self.counts)


class _Buckets:
    """Counts of values by fixed buckets, and their sum. Only the event loop's thread writes."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or several equal ones."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times


class Histogram(_Buckets):
    """Durations in the buckets of `BUCKETS_S`."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(BUCKETS_S)

    def snapshot(self) -> HistogramSnapshot:
        """Return the durations so far."""
        return HistogramSnapshot(tuple(self._counts), self._sum)


class Sizes(_Buckets):
    """Sizes in fixed buckets.

    Args:
        bounds: Upper bounds of the buckets, in ascending order.
    """

    __slots__ = ()

    def __init__(self, bounds: Sequence[float] = SIZE_BOUNDS) -> None:
        super().__init__(bounds)

    def snapshot(self) -> SizesSnapshot:
        """Return the sizes so far."""
        return SizesSnapshot(tuple(self._bounds), tuple(self._counts), self._sum)


class LevelSeconds:
    """Integral of a level over time, such as of the number of busy workers. It costs an addition for each change.

    It counts whole nanoseconds: the rounding of floats would let it fall, and a counter that falls looks restarted.
    """

    __slots__ = ("_offset_ns", "level")

    def __init__(self) -> None:
        self.level = 0
        self._offset_ns = 0
        """The integral, less the present level times the present time."""

    def up(self, now: float) -> None:
        """Raise the level by one."""
        self.level += 1
        self._offset_ns -= int(now * 1e9)

    def down(self, now: float) -> None:
        """Lower the level by one."""
        self.level -= 1
        self._offset_ns += int(now * 1e9)

    def seconds(self, now: float) -> float:
        """Return the integral until now: the level times seconds, with the present level until now."""
        return max(0, self._offset_ns + self.level * int(now * 1e9)) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatistics:
    """One stage at one moment. Counts are of items since the start; for parse, of requests."""

    name: str
    waiting: int
    """Lists of items in the channel in front of it, or with senders that wait.

    For parse, requests instead of lists. For batch, the items in the fair queue are added.
    """
    busy: int
    """Workers that process items. For batch, slots that are taken."""
    blocked: int
    """Workers with results that the stage behind has no room for."""
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
    busy_s: float
    """Seconds in which workers processed items, summed over workers. For batch, slots instead of workers."""
    blocked_s: float
    """Seconds in which workers waited for the stage behind, summed over workers. They are not part of `busy_s`."""
    oldest_s: float
    """Seconds since the last progress of the request that has made none for longest. 0: no request is in the stage."""
    fullness: float
    """Used part of the channel in front of it, 0 to 1. One message may be larger than the channel."""


class Working:
    """A block in which a worker counts as busy, or as blocked."""

    __slots__ = ("_clock", "_level")

    def __init__(self, level: LevelSeconds, clock: Callable[[], float]) -> None:
        self._level = level
        self._clock = clock

    def __enter__(self) -> None:
        self._level.up(self._clock())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._level.down(self._clock())


class StageMeter:
    """Counts and durations of one stage. Only the event loop's thread writes.

    Args:
        name: Name of the stage.
        workers: Number of its workers.
        clock: Clock of the stages, in seconds.
    """

    def __init__(self, name: str, workers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.name = name
        self.workers = workers
        self.now = clock
        """Clock of the stages, in seconds."""
        self._busy = LevelSeconds()
        self._blocked = LevelSeconds()
        self.done = 0
        self.crashes = 0
        self.dropped: dict[Drop, int] = {"abandoned": 0, "expired": 0, "failed": 0}
        self.wait = Histogram()
        self.service = Histogram()

    @property
    def busy(self) -> int:
        """Workers that process items."""
        return self._busy.level

    def working(self) -> Working:
        """Count a worker as busy while the block runs."""
        return Working(self._busy, self.now)

    def blocked(self) -> Working:
        """Count a worker as blocked by the stage behind while the block runs."""
        return Working(self._blocked, self.now)

    def began(self, now: float) -> None:
        """Count a worker as busy from now on; for work that is no block."""
        self._busy.up(now)

    def ended(self, now: float) -> None:
        """Stop counting a worker that `began` has counted."""
        self._busy.down(now)

    def snapshot(self, *, waiting: int, fullness: float, oldest_s: float = 0.0) -> StageStatistics:
        """Return the statistics of the stage.

        Args:
            waiting: See `StageStatistics`.
            fullness: See `StageStatistics`.
            oldest_s: See `StageStatistics`.
        """
        now = self.now()
        return StageStatistics(
            name=self.name,
            waiting=waiting,
            busy=self._busy.level,
            blocked=self._blocked.level,
            workers=self.workers,
            done=self.done,
            dropped=dict(self.dropped),
            crashes=self.crashes,
            wait=self.wait.snapshot(),
            service=self.service.snapshot(),
            busy_s=self._busy.seconds(now),
            blocked_s=self._blocked.seconds(now),
            oldest_s=oldest_s,
            fullness=fullness,
        )
