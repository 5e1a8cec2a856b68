"""Meters: histograms of durations and sizes, and the seconds in which workers are busy or blocked."""

from __future__ import annotations

import random

import pytest

from staged_pool.stages.meter import BUCKETS_S, RATIO_BOUNDS, Histogram, LevelSeconds, Sizes, StageMeter

pytestmark = pytest.mark.anyio


class Clock:
    """Time that passes when the test says so."""

    now = 1e6

    def __call__(self) -> float:
        return self.now


def test_durations_fall_into_their_buckets() -> None:
    histogram = Histogram()
    for seconds in (0.0, BUCKETS_S[0], BUCKETS_S[0] * 1.01, 1000.0):
        histogram.observe(seconds)
    snapshot = histogram.snapshot()
    assert (snapshot.counts[0], snapshot.counts[1], snapshot.counts[-1]) == (2, 1, 1)
    assert snapshot.count == 4


def test_sizes_fall_into_powers_of_two() -> None:
    sizes = Sizes()
    for size in (1, 2, 3, 4, 10**9):
        sizes.observe(size)
    snapshot = sizes.snapshot()
    found = dict(zip((*snapshot.bounds, None), snapshot.counts, strict=True))
    assert {bound: count for bound, count in found.items() if count} == {1: 1, 2: 1, 4: 2, None: 1}
    assert (snapshot.count, snapshot.sum) == (5, 10 + 10**9)


def test_parts_of_a_whole_fall_into_tenths() -> None:
    sizes = Sizes(RATIO_BOUNDS)
    for part in (0.05, 0.1, 0.95, 1.0, 1.5):
        sizes.observe(part)
    assert sizes.snapshot().counts == (2, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1)


def test_the_integral_of_a_level_goes_on_while_nothing_changes() -> None:
    level = LevelSeconds()
    assert level.seconds(10.0) == 0.0
    level.up(10.0)
    level.up(12.0)
    assert level.seconds(13.0) == 4.0, "one for 3 s, another for 1 s"
    level.down(14.0)
    assert (level.level, level.seconds(20.0)) == (1, 12.0)
    level.down(20.0)
    assert level.seconds(1000.0) == 12.0


def test_an_integral_never_falls() -> None:
    """The times are such that sums of floats would fall by their last bit."""
    level, rng, now, last = LevelSeconds(), random.Random(3), 12345.678901234, 0.0
    for _ in range(5000):
        now += rng.random() * 1e-3
        (level.up if level.level < 1 or rng.random() < 0.5 else level.down)(now)
        assert level.seconds(now) >= last
        last = level.seconds(now)


def test_a_blocked_worker_is_not_busy() -> None:
    clock = Clock()
    meter = StageMeter("here", 2, clock)
    with meter.working():
        clock.now += 2.0
    with meter.blocked():
        clock.now += 3.0
        during = meter.snapshot(waiting=0, fullness=0.5)
    after = meter.snapshot(waiting=0, fullness=0.5)
    assert (during.busy, during.blocked, during.fullness) == (0, 1, 0.5)
    assert (after.busy_s, after.blocked_s, after.blocked) == (2.0, 3.0, 0)


def test_a_worker_that_is_still_at_it_counts_until_now() -> None:
    clock = Clock()
    meter = StageMeter("here", 1, clock)
    meter.began(clock.now)
    clock.now += 60.0
    assert meter.snapshot(waiting=0, fullness=0.0).busy_s == 60.0
    meter.ended(clock.now)
    assert meter.busy == 0
