"""Service time model: the fitted time of a batch, and the predicted time to drain."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from staged_pool.stages.scheduling.service_time import (
    EARLY_STALL_S,
    LEAST_STALL_S,
    STALL_FACTOR,
    STALL_LEARNED_BATCHES,
    DeviceShare,
    ServiceTimeModel,
)


def test_it_predicts_nothing_before_it_has_seen_something() -> None:
    assert ServiceTimeModel().drain_s(100, 10) == 0.0


def test_it_finds_both_coefficients_from_batches_of_many_sizes() -> None:
    model = ServiceTimeModel()
    for tokens in [10, 500, 2000, 80, 1200] * 10:
        model.observe(tokens, 0.002 + tokens * 50e-6)
    assert model.drain_s(1000, 1000) == pytest.approx(0.052, rel=0.01)
    assert model.drain_s(4000, 2000) == pytest.approx(2 * 0.002 + 4000 * 50e-6, rel=0.01)


def test_batches_of_one_size_never_make_it_predict_too_much_for_more() -> None:
    model = ServiceTimeModel()
    for _ in range(50):
        model.observe(12, 0.003)
    assert model.drain_s(1200, 1200) == pytest.approx(0.003)


def test_what_it_has_found_outlasts_batches_of_one_size() -> None:
    model = ServiceTimeModel()
    for tokens in [100, 1000] * 150:
        model.observe(tokens, 0.01 + tokens * 1e-4)
    for _ in range(15_000):
        model.observe(500, 2 * (0.01 + 500 * 1e-4))
        assert model.drain_s(4000, 1000) == pytest.approx(2 * (4 * 0.01 + 4000 * 1e-4), rel=0.6)
    assert model.drain_s(4000, 1000) == pytest.approx(2 * (4 * 0.01 + 4000 * 1e-4), rel=0.15)


def test_no_batch_of_many_makes_its_prediction_jump() -> None:
    """A prediction that falls to half admits twice as much, which is late."""
    noise = random.Random(1)
    model = ServiceTimeModel()
    predicted = []
    for number in range(3000):
        tokens = noise.choice([256, 512, 1024]) if number < 200 or number % 300 == 0 else 512
        model.observe(tokens, (0.001 + tokens * 8e-5) * noise.uniform(0.8, 1.3))
        predicted.append(model.drain_s(5120, 1024))
    changes = [after / before for before, after in pairwise(predicted[200:])]
    assert 0.95 < min(changes) <= max(changes) < 1.05


def test_it_follows_a_change_of_pace() -> None:
    model = ServiceTimeModel()
    for factor in (1, 3):
        for tokens in [100, 1000] * 150:
            model.observe(tokens, factor * tokens * 1e-4)
    assert model.drain_s(500, 500) == pytest.approx(3 * 500e-4, rel=0.02)


def test_a_batch_that_ran_alone_had_the_device_for_as_long_as_it_took() -> None:
    overlap = DeviceShare()
    began = overlap.begin(10.0)
    assert overlap.end(10.5, began) == pytest.approx(0.5)


def test_batches_that_ran_at_once_share_the_seconds() -> None:
    overlap = DeviceShare()
    first, second = overlap.begin(10.0), overlap.begin(10.0)
    assert overlap.running == 2
    assert overlap.end(10.5, first) == pytest.approx(0.25)
    assert overlap.end(10.5, second) == pytest.approx(0.25)
    assert overlap.running == 0


def test_a_batch_that_ran_alone_for_half_its_time_shares_the_other_half() -> None:
    overlap = DeviceShare()
    first = overlap.begin(10.0)
    overlap.begin(11.0)
    assert overlap.end(12.0, first) == pytest.approx(2.0 / 1.5)


def test_a_batch_that_takes_no_time_has_none_of_the_device() -> None:
    overlap = DeviceShare()
    first, second = overlap.begin(1.0), overlap.begin(1.0)
    assert overlap.end(1.0, first) == overlap.end(1.0, second) == 0.0


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 10)), max_size=50), st.integers(0, 10_000))
@example([(2, 0.5), (9, 1.7), (8, 1.3), (5, 0.4)], 0)
def test_a_prediction_is_never_negative(batches: list[tuple[int, float]], tokens: int) -> None:
    model = ServiceTimeModel()
    for size, seconds in batches:
        model.observe(size, seconds)
    assert model.drain_s(tokens, 512) >= 0.0


def test_the_first_forward_is_never_stalled_and_the_next_ones_only_after_ten_seconds() -> None:
    model = ServiceTimeModel()
    assert model.stall_s(10) == math.inf
    for _ in range(STALL_LEARNED_BATCHES - 1):
        model.observe(10, 0.01)
        assert model.stall_s(10) == EARLY_STALL_S
        assert model.stall_s(1_000_000) > EARLY_STALL_S  # a first large batch
    model.observe(10, 0.01)
    assert model.stall_s(10) == LEAST_STALL_S


def test_a_short_forward_is_stalled_after_a_second_and_a_long_one_after_a_multiple() -> None:
    short, long = ServiceTimeModel(), ServiceTimeModel()
    for _ in range(50):
        short.observe(12, 0.003)
        long.observe(1000, 0.5)
    assert short.stall_s(12) == LEAST_STALL_S
    assert long.stall_s(1000) == pytest.approx(0.5 * STALL_FACTOR)
    assert long.stall_s(10) == pytest.approx(0.5 * STALL_FACTOR)  # the fixed part may be all of it


@given(fixed_s=st.floats(0, 1), each_s=st.floats(1e-7, 1e-3), tokens=st.integers(12, 50_000))
def test_a_first_large_batch_of_a_slow_device_is_no_stall(fixed_s: float, each_s: float, tokens: int) -> None:
    model = ServiceTimeModel()
    for _ in range(STALL_LEARNED_BATCHES):
        model.observe(12, fixed_s + 12 * each_s)
    assert model.stall_s(tokens) >= 0.99 * STALL_FACTOR * (fixed_s + tokens * each_s)
