"""Histograms of durations."""

from __future__ import annotations

import pytest

from staged_pool.stages.meter import BUCKETS_S, Histogram

pytestmark = pytest.mark.anyio


def test_durations_fall_into_their_buckets() -> None:
    histogram = Histogram()
    for seconds in (0.0, BUCKETS_S[0], BUCKETS_S[0] * 1.01, 1000.0):
        histogram.observe(seconds)
    snapshot = histogram.snapshot()
    assert (snapshot.counts[0], snapshot.counts[1], snapshot.counts[-1]) == (2, 1, 1)
    assert snapshot.count == 4
