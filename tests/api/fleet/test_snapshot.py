"""Sums of snapshots of processes: exemplars are the newest ones, and end with their process."""

from __future__ import annotations

from staged_pool.api.fleet.snapshot import counters, total
from staged_pool.api.limits.http_statistics import DurationExemplar, HttpMeter, RouteStatistics
from staged_pool.api.limits.server_state import ServerState


def _exemplar(bucket: int, trace_id: str, at: float) -> DurationExemplar:
    return DurationExemplar(bucket=bucket, trace_id=trace_id, seconds=0.1, at=at)


def _statistics(*exemplars: DurationExemplar) -> RouteStatistics:
    meter = HttpMeter(ServerState())
    meter.finished("/a", "m", 200, "fast", seconds=0.1, answer_bytes=7, timeline=None)
    found = meter.snapshot().routes["/a"]["m"]
    return RouteStatistics(
        durations=found.durations,
        items=found.items,
        tokens=found.tokens,
        answer_bytes=found.answer_bytes,
        exemplars=exemplars,
    )


def test_of_two_exemplars_of_a_bucket_the_newer_one_stays() -> None:
    one = _statistics(_exemplar(1, "old", 1.0), _exemplar(2, "only", 1.0))
    other = _statistics(_exemplar(1, "new", 2.0), _exemplar(3, "other", 1.0))
    for both in (total([one, other]), total([other, one])):
        assert {each.bucket: each.trace_id for each in both.exemplars} == {1: "new", 2: "only", 3: "other"}
        assert both.answer_bytes == 14


def test_exemplars_end_with_their_process() -> None:
    kept = counters(_statistics(_exemplar(1, "old", 1.0)))
    assert kept.exemplars == ()
    assert kept.answer_bytes == 7


def test_the_meter_keeps_the_newest_trace_of_each_bucket() -> None:
    meter = HttpMeter(ServerState())
    for seconds, trace_id in ((0.3, "first"), (0.4, "second"), (0.003, "quick"), (99.0, "slow"), (0.3, None)):
        meter.finished("/a", "m", 200, "fast", seconds=seconds, answer_bytes=0, timeline=None, trace_id=trace_id)
    found = meter.snapshot().routes["/a"]["m"].exemplars
    assert {(each.bucket, each.trace_id, each.seconds) for each in found} == {
        (11, "second", 0.4), (5, "quick", 0.003), (17, "slow", 99.0),
    }  # fmt: skip
