"""Errors of a load of texts, images and videos."""

from __future__ import annotations

from perf.tools.openloop import ArrivalsOutcome
from perf.under_load.media import _row, errors_of


def test_all_but_answers_and_rejections_are_errors() -> None:
    outcome = ArrivalsOutcome(offered=20, accepted_ms=[1.0, 2.0], rejected_ms=[1.0])
    assert errors_of(outcome) == 0
    outcome.other_statuses, outcome.broken, outcome.timeouts, outcome.not_sent = {500: 2, 503: 1}, 4, 5, 6
    assert errors_of(outcome) == 18
    assert _row("2 x 9/s", "text", outcome)[2:7] == [
        "20", "2", "1", "5", "2 x 500, 1 x 503, 4 x broken, 6 x not sent",
    ]  # fmt: skip
