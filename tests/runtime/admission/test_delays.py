"""Predicted delays: the tokens of others that go before a request, its lane, and its class's lag."""

from __future__ import annotations

import pytest

from staged_pool.runtime.admission.accounting import DEFAULT_CLASS, InFlight, LaneUsage, RequestClass
from staged_pool.runtime.admission.delays import Delays
from staged_pool.runtime.admission.estimates import Estimate, Estimates
from staged_pool.runtime.card import Lane
from staged_pool.stages.scheduling.batch_budget import Budget
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.service_time import LaneServiceTime, ServiceTimeModel

BULK = RequestClass(Priority.BULK)
OTHER = RequestClass(tenant="another")


def measured(tokens_per_s: float) -> LaneServiceTime:
    device = ServiceTimeModel()
    for tokens in (100, 2000) * 20:
        device.observe(tokens, tokens / tokens_per_s)
    return LaneServiceTime(budget=Budget(2048), device=device)


def delays_of(**tokens_per_s: float) -> tuple[Delays, InFlight]:
    times: dict[Lane, LaneServiceTime] = {lane: measured(rate) for lane, rate in tokens_per_s.items()}  # type: ignore[misc]
    estimates = Estimates(tuple(times))
    in_flight = InFlight(dict.fromkeys(times, 10**6), estimates)
    return Delays(times, in_flight, estimates, target_s=5.0), in_flight


def enter(in_flight: InFlight, tokens: float, request_class: RequestClass) -> None:
    usage: dict[Lane, LaneUsage] = {"text": LaneUsage(tokens, 1)}
    in_flight.enter(usage, body_bytes=0, entered_at=0.0, lane="text", expected_s=0.0, request_class=request_class)


def test_a_request_waits_for_as_much_of_each_other_tenant_as_it_needs_itself() -> None:
    delays, in_flight = delays_of(text=1000)
    alone_s = delays.delay_s("text", 100, 1, DEFAULT_CLASS)
    enter(in_flight, 5000, OTHER)
    assert delays.delay_s("text", 100, 1, DEFAULT_CLASS) == pytest.approx(2 * alone_s, rel=0.05)


def test_bulk_work_waits_for_more_of_the_others_than_they_do_for_it() -> None:
    delays, in_flight = delays_of(text=1000)
    enter(in_flight, 5000, DEFAULT_CLASS)
    bulk_s = delays.delay_s("text", 100, 1, BULK)
    delays, in_flight = delays_of(text=1000)
    enter(in_flight, 5000, BULK)
    assert bulk_s > 3 * delays.delay_s("text", 100, 1, DEFAULT_CLASS)


def test_the_quickest_of_the_likely_lanes_is_expected() -> None:
    delays, _ = delays_of(text=1000, image=10)
    lane, seconds = delays.quickest(
        {"text": Estimate(50, 100, likely=True), "image": Estimate(50, 100, likely=True)}, DEFAULT_CLASS
    )
    assert (lane, seconds) == ("text", delays.delay_s("text", 100, 1, DEFAULT_CLASS))
    lane, _ = delays.quickest(
        {"text": Estimate(50, 100, likely=False), "image": Estimate(50, 100, likely=True)}, DEFAULT_CLASS
    )
    assert lane == "image"


def test_the_lag_of_a_class_is_learned_from_answers_and_forgotten_when_it_is_idle() -> None:
    delays, in_flight = delays_of(text=1000)
    usage = LaneUsage(10, 1)
    reservation = in_flight.enter(
        {"text": usage}, body_bytes=40, entered_at=0.0, lane="text", expected_s=1.0, request_class=OTHER
    )
    enter(in_flight, 10, DEFAULT_CLASS)
    usage.computed = 10
    reservation.is_predicted = True
    for _ in range(200):
        delays.learn(reservation, {"text": usage}, took_s=3.0)
    assert delays.lag_s("text", OTHER) == pytest.approx(2.0, rel=0.05)
    delays.catch_up(OTHER)
    assert delays.lag_s("text", OTHER) > 0.0, "it has a request in flight"
    in_flight.leave(reservation)
    delays.catch_up(OTHER)
    assert delays.lag_s("text", OTHER) == delays.lag_s("text", DEFAULT_CLASS)


def test_another_request_counts_whole_for_its_successor_will_take_its_turns() -> None:
    delays, in_flight = delays_of(text=1000)
    usage: dict[Lane, LaneUsage] = {"text": LaneUsage(1000, 1)}
    other = in_flight.enter(
        usage, body_bytes=0, entered_at=0.0, lane="text", expected_s=0.0, request_class=DEFAULT_CLASS
    )
    whole_s = delays.delay_s("text", 1000, 1, DEFAULT_CLASS)
    other.fed("text", 1)
    other.tokenized("text", 1000)
    other.computed("text", 600)
    assert delays.delay_s("text", 1000, 1, DEFAULT_CLASS) == pytest.approx(whole_s)
    assert delays.drain_s("text") < whole_s / 4, "what is left of it"
    in_flight.leave(other)
    assert delays.delay_s("text", 1000, 1, DEFAULT_CLASS) == pytest.approx(whole_s / 2, rel=0.05)


def test_nothing_is_learned_from_a_request_that_came_before_the_first_batch() -> None:
    delays, in_flight = delays_of(text=1000)
    usage = LaneUsage(10, 1)
    reservation = in_flight.enter(
        {"text": usage}, body_bytes=40, entered_at=0.0, lane="text", expected_s=0.0, request_class=OTHER
    )
    usage.computed = 10
    delays.learn(reservation, {"text": usage}, took_s=30.0)
    assert delays.lag_s("text", OTHER) == 0.0


def test_a_queue_of_few_requests_drains_in_small_batches() -> None:
    device = ServiceTimeModel()
    for tokens in (100, 2000) * 20:
        device.observe(tokens, 0.1 + tokens / 10_000)
    lane = LaneServiceTime(budget=Budget(8192), least_tokens=500, device=device)
    assert lane.drain_s(4000, 0, requests=1) == pytest.approx(8 * 0.1 + 0.4, rel=0.05)
    assert lane.drain_s(4000, 0, requests=100) == pytest.approx(8 * 0.1 + 0.4, rel=0.05)
    assert lane.drain_s(40_000, 0, requests=100) == pytest.approx(8 * 0.1 + 4.0, rel=0.05), (
        "an eighth of the queue each"
    )
