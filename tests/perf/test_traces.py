"""The cost of traces: every server is loaded in every round, beside a collector."""

from __future__ import annotations

from perf.cost.traces import Rates, measure


def test_every_server_answers_in_every_round() -> None:
    rates = measure("asyncio", rounds=2, seconds=0.3)
    assert list(rates) == ["off", "off, again", "0.01", "1.0"]
    assert all(len(found.each) == 2 and min(found.each) > 0 for found in rates.values())
    assert all(len(found.cpu_us) == 2 and min(found.cpu_us) > 0 for found in rates.values())


def test_a_rate_is_held_against_that_of_its_round() -> None:
    assert Rates([50.0, 100.0]).against(Rates([100.0, 50.0])) == [0.5, 2.0]
