"""Sweeps: which rates are measured, and where the knee is."""

from __future__ import annotations

from typing import Any

import pytest

from staged_pool.api.bench.sweep import (
    LEAST_RATE,
    MOST_LEVELS,
    FoundRates,
    GivenRates,
    Sweep,
    Tried,
    held,
    knee,
    read_rates,
)
from staged_pool.stages.errors import ConfigError


def measured(sweep: Sweep, capacity: float) -> list[Tried]:
    """Measure a server that keeps up with every rate up to its capacity."""
    tried: list[Tried] = []
    while (rate := sweep.next_rate(tried)) is not None:
        tried.append(Tried(rate, rate <= capacity))
        assert len(tried) <= MOST_LEVELS
    return tried


def test_given_rates_are_measured_in_their_order() -> None:
    rates = read_rates("50,200.5,100")
    assert rates == [50, 100, 200.5]
    assert [each.rate for each in measured(GivenRates(rates), 70)] == rates


@pytest.mark.parametrize("text", ["", "a", "10,", "0", "-5", "10,x", "inf", "nan"])
def test_a_wrong_sweep_is_told_with_a_right_one(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 50,100,200"):
        read_rates(text)


def test_auto_has_no_rates() -> None:
    assert read_rates("auto") is None


@pytest.mark.parametrize("capacity", [0.3, 3.0, 77.0, 431.0, 5000.0])
@pytest.mark.parametrize("first", [1.0, 10.0, 1000.0])
def test_the_knee_is_found_within_a_tenth_from_any_first_rate(first: float, capacity: float) -> None:
    tried = measured(FoundRates(first), capacity)
    found = knee(tried)
    assert found is not None
    assert found["held"] <= capacity < found["over"]
    assert found["over"] / found["held"] < 1.13


def test_a_server_without_a_knee_ends_the_sweep_all_the_same() -> None:
    tried = measured(FoundRates(1.0), float("inf"))
    assert len(tried) == MOST_LEVELS
    assert knee(tried) is None


def test_a_server_that_answers_nothing_ends_the_sweep_soon() -> None:
    tried = measured(FoundRates(10.0), 0.0)
    assert tried[-1].rate >= LEAST_RATE
    found = knee(tried)
    assert found is not None
    assert found["held"] is None


def level(offered: float = 100, answered: float = 100, rejected: int = 0, late: int = 0) -> dict[str, Any]:
    counts = {"due": 1000, "answered": 1000 - rejected, "rejected": rejected, "late": late}
    rate = {"value": answered, "low": answered, "high": answered}
    return {"offered_rate": offered, "requests": counts, "rates": {"answered": rate}}


@pytest.mark.parametrize(
    ("report", "slo", "is_held"),
    [
        (level(), False, True),
        (level(answered=90), False, True),
        (level(answered=89), False, False),
        (level(rejected=1), False, False),
        (level(late=100), True, True),
        (level(late=101), True, False),
        (level(late=101), False, True),
    ],
)
def test_a_level_holds_while_goodput_is_near_the_offered_load(report: dict[str, Any], slo: bool, is_held: bool) -> None:
    assert held(report, slo=slo) is is_held
