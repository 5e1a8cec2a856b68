"""Means over the last seconds, of levels and of events."""

from __future__ import annotations

import math

import pytest

from staged_pool.stages.scheduling.recent_mean import RECENT_S, RecentMean


def test_it_comes_to_a_level_that_lasts() -> None:
    mean = RecentMean()
    mean.set_level(2.0, 100.0)
    assert mean.value(100.0) == 0.0
    assert mean.value(100.0 + RECENT_S) == pytest.approx(2.0 * (1 - math.exp(-1)))
    assert mean.value(200.0) == pytest.approx(2.0)


def test_half_of_the_time_is_half_of_the_level() -> None:
    mean = RecentMean()
    for tenth in range(1000):
        mean.set_level(tenth % 2, tenth / 10)
    assert mean.value(100.0) == pytest.approx(0.5, abs=0.02)


def test_it_forgets() -> None:
    mean = RecentMean()
    mean.set_level(1.0, 0.0)
    mean.set_level(0.0, 100.0)
    assert mean.value(100.0 + 5 * RECENT_S) < 0.01


def test_events_are_counted_a_second_and_not_since_the_start() -> None:
    mean = RecentMean()
    for event in range(2000):
        mean.count(event / 20)
    assert mean.value(100.0) == pytest.approx(20.0, rel=0.02)
    assert mean.value(130.0) < 0.01


def test_a_time_that_is_late_changes_nothing() -> None:
    mean = RecentMean()
    mean.set_level(1.0, 10.0)
    mean.set_level(0.0, 9.0)
    assert mean.value(50.0) == 0.0
