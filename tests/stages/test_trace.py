"""Times of a traced request by stage."""

from __future__ import annotations

from staged_pool.stages.trace import Trace, TracedBatch


def _ignore(_: TracedBatch) -> None:
    """Write nothing."""


def test_a_stage_lasts_from_its_first_item_to_its_last() -> None:
    trace = Trace(1, 2, _ignore)
    trace.passed("queue", 3.0, 5.0)
    trace.passed("queue", 2.0, 4.0)
    trace.passed("queue", 4.0, 9.0)
    trace.passed("device", 5.0, 6.0)
    assert trace.times == {"queue": (2.0, 9.0), "device": (5.0, 6.0)}
