"""Arrival times: their exact number, and their distribution."""

from __future__ import annotations

import numpy as np
import pytest

from staged_pool.api.bench.arrivals import arrival_times


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("burstiness", [0.001, 0.2, 1.0, 30.0, 1e6])
def test_times_are_in_order_and_of_the_exact_number(burstiness: float) -> None:
    times = arrival_times(70.0, 10.0, rng(), burstiness)
    assert len(times) == 700
    assert (np.diff(times) >= 0).all()
    assert 0 <= times[0] <= times[-1] <= 10.0


def test_the_same_seed_gives_the_same_times() -> None:
    assert (arrival_times(50, 2, rng(3)) == arrival_times(50, 2, rng(3))).all()
    assert (arrival_times(50, 2, rng(3)) != arrival_times(50, 2, rng(4))).any()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, 100.0])
def test_gaps_vary_as_the_burstiness_says(burstiness: float) -> None:
    gaps = np.diff(arrival_times(100, 1000, rng(), burstiness))
    assert gaps.mean() == pytest.approx(0.01, rel=1e-3)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.03)


def test_a_poisson_process_has_uniform_times() -> None:
    times = arrival_times(1000, 100, rng())
    counts, _ = np.histogram(times, bins=1000, range=(0, 100))
    assert counts.mean() == 100
    assert counts.var() == pytest.approx(100, rel=0.15)


def test_less_than_one_request_is_none() -> None:
    assert len(arrival_times(0.01, 10.0, rng())) == 0
