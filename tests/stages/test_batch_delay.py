"""Batch delay: the rule, against the sum of waits that it is to make least."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.stages.scheduling.batch_delay import BatchDelay
from staged_pool.stages.scheduling.service_time import ServiceTimeModel


class Device:
    """A device of known service times, and a clock."""

    def __init__(self, fixed_s: float, each_s: float, ready_s: float) -> None:
        self.now = 0.0
        model = ServiceTimeModel()
        for tokens in [10, 100, 1000] * 400:
            model.observe(tokens, fixed_s + each_s * tokens)
        self.delay = BatchDelay(model, lambda: ready_s, lambda: self.now)


def waits_s(waiting: int, coming: int, fixed_s: float, each_s: float, ready_s: float, *, together: bool) -> float:
    """Sum all waits on an otherwise idle device, for items of ten tokens."""
    own_s, theirs_s = fixed_s + 10 * each_s * waiting, 10 * each_s * coming
    if together:
        return (waiting + coming) * (ready_s + own_s + theirs_s) - coming * ready_s
    return waiting * own_s + coming * (own_s + fixed_s + theirs_s - ready_s)


@given(st.integers(1, 20), st.integers(1, 20), st.floats(0.001, 0.02), st.floats(1e-6, 1e-3), st.floats(0.0001, 0.02))
def test_it_waits_where_that_makes_the_sum_of_waits_less(
    waiting: int, coming: int, fixed_s: float, each_s: float, ready_s: float
) -> None:
    now = waits_s(waiting, coming, fixed_s, each_s, ready_s, together=False)
    later = waits_s(waiting, coming, fixed_s, each_s, ready_s, together=True)
    delay_s = Device(fixed_s, each_s, ready_s).delay.delay_s(waiting, 10 * waiting, coming)
    if abs(now - later) > 0.02 * now:  # the model is a fit
        assert (delay_s > 0) == (later < now)
    assert delay_s in (0.0, ready_s)


def test_nothing_waits_for_nothing() -> None:
    delay = Device(0.01, 1e-5, 0.001).delay
    assert delay.delay_s(3, 30, 0) == 0
    assert delay.delay_s(0, 0, 3) == 0


def test_a_batch_waits_once_and_each_for_its_own() -> None:
    device = Device(0.01, 1e-5, 0.004)
    assert device.delay.delay_s(1, 10, 1) == pytest.approx(0.004)
    device.now += 0.001
    assert device.delay.delay_s(1, 10, 1) == pytest.approx(0.003)
    device.now += 0.004
    assert device.delay.delay_s(1, 10, 1) == 0
    device.delay.started()
    assert device.delay.delay_s(1, 10, 1) == pytest.approx(0.004)


def test_a_wait_that_was_waited_for_is_over_whatever_the_clock_says() -> None:
    """Else a clock that stands for a moment has the stage ask again and again."""
    delay = Device(0.01, 1e-5, 0.004).delay
    assert delay.delay_s(1, 10, 1) > 0
    delay.over()
    assert delay.delay_s(1, 10, 1) == 0
    delay.started()
    assert delay.delay_s(1, 10, 1) > 0


def test_nothing_is_known_before_the_first_batch() -> None:
    assert BatchDelay(ServiceTimeModel(), lambda: 0.001, lambda: 0.0).delay_s(1, 10, 1) == 0
