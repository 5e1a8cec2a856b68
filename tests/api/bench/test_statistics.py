"""Statistics of latencies, beside numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.api.bench.statistics import (
    LEAST_SAMPLES,
    Spread,
    bootstrap_quantile,
    latency_report,
    quantile,
    rounded,
    weighted_quantile,
)


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 5)), min_size=1).filter(lambda rows: any(n for _, n in rows)),
    st.floats(0, 1),
)
def test_a_weighted_quantile_is_numpys_of_repeated_values(rows: list[tuple[float, int]], share: float) -> None:
    ordered = np.array(sorted(value for value, _ in rows))
    weights = np.array([number for _, number in rows])
    assert weighted_quantile(ordered, weights, share) == pytest.approx(
        np.quantile(np.repeat(ordered, weights), share), rel=1e-9, abs=1e-9
    )


def test_the_bootstrap_gives_numpys_quantile_with_an_interval_around_it() -> None:
    values = rng().exponential(size=5000)
    found = bootstrap_quantile(values, np.arange(5000) / 100, 0.99, rng())
    assert found.value == np.quantile(values, 0.99)
    assert found.low < found.value < found.high
    again = bootstrap_quantile(values, np.arange(5000) / 100, 0.99, rng())
    assert again == found


def test_about_19_of_20_intervals_of_independent_values_hold_the_true_p99() -> None:
    true = float(-np.log(0.01))
    source, times = rng(7), np.arange(3000) / 50
    hits = 0
    for _ in range(100):
        found = bootstrap_quantile(source.exponential(size=3000), times, 0.99, source)
        hits += found.low <= true <= found.high
    assert 85 <= hits <= 100


def test_the_interval_is_wider_if_the_slow_answers_are_in_few_seconds() -> None:
    """As after a stall of the server: there were few of these events, however many requests each has met."""
    values = rng().uniform(0.9, 1.1, size=4000)
    times = np.arange(4000) / 100
    together, scattered = values.copy(), values.copy()
    together[1000:1060] = 50.0
    scattered[rng().permutation(4000)[:60]] = 50.0
    low = [bootstrap_quantile(each, times, 0.99, rng()).low for each in (together, scattered)]
    assert low[0] < 2
    assert low[1] > 49


def test_a_median_of_rounds_has_their_range() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([float("nan"), 4.0]) == Spread(4.0, 4.0, 4.0)
    assert Spread.of([float("nan")]) is None
    assert Spread.of([]) is None


@pytest.mark.parametrize(("samples", "given_p99"), [(LEAST_SAMPLES - 1, False), (LEAST_SAMPLES, True)])
def test_there_is_no_p99_of_few_samples(samples: int, given_p99: bool) -> None:
    seconds = rng().exponential(0.1, size=samples)
    report = latency_report(seconds, np.arange(samples) / 10, rng())
    assert (report["p99"] is not None) == given_p99
    assert report["samples"] == samples
    for name, share in (("p50", 0.5), ("p90", 0.9)):
        assert report[name] == pytest.approx(np.quantile(seconds, share) * 1e3, rel=1e-3)
    assert report["max"] == pytest.approx(seconds.max() * 1e3, rel=1e-3)


def test_no_samples_have_no_numbers() -> None:
    report = latency_report(np.array([]), np.array([]), rng())
    assert report == {"samples": 0, "mean": None, "p50": None, "p90": None, "p99": None, "max": None}
    assert np.isnan(quantile(np.array([]), 0.5))


@pytest.mark.parametrize(("value", "shown"), [(1.23456, 1.235), (98765.4, 98765.0), (0.0, 0.0), (float("nan"), None)])
def test_numbers_are_rounded_to_four_digits(value: float, shown: float | None) -> None:
    assert rounded(value) == shown
