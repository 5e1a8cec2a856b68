"""The account of requests in flight: total, by priority, by tenant and by request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.runtime.admission.accounting import InFlight, LaneUsage, RequestClass, Reservation
from staged_pool.runtime.admission.estimates import Estimates
from staged_pool.runtime.card import Lane
from staged_pool.stages.scheduling.entries import Priority

LANES: tuple[Lane, Lane] = ("text", "image")


def account(limit: int = 100) -> InFlight:
    return InFlight(dict.fromkeys(LANES, limit), Estimates(LANES))


def enter(
    in_flight: InFlight, tokens: float = 10.0, *, inputs: int = 1, lane: Lane = "text", **request_class: Any
) -> Reservation:
    return in_flight.enter(
        {lane: LaneUsage(tokens, inputs)},
        body_bytes=100,
        entered_at=0.0,
        lane=lane,
        expected_s=0.0,
        request_class=RequestClass(**request_class),
    )


def test_a_request_counts_for_all_its_priority_and_its_tenant() -> None:
    in_flight = account()
    enter(in_flight, tenant="one", priority=Priority.BULK)
    enter(in_flight, tenant="two")
    assert list(in_flight.total.limited) == [2, 2, 20.0, 200]
    assert list(in_flight.priorities[Priority.BULK].limited) == [1, 1, 10.0, 100]
    assert {tenant: usage.requests for tenant, usage in in_flight.tenants[Priority.INTERACTIVE].items()} == {"two": 1}


def test_the_first_request_of_a_tenant_came_alone() -> None:
    in_flight = account()
    assert [enter(in_flight, tenant="one").was_alone, enter(in_flight, tenant="one").was_alone] == [True, False]
    assert enter(in_flight, tenant="two").was_alone


def test_estimates_become_true_numbers_and_fall_as_items_leave_the_device() -> None:
    in_flight = account()
    request = enter(in_flight, 40.0, inputs=4)
    request.fed("text", 4)
    assert (request.tokens, in_flight.fed["text"]) == (40.0, 40.0)
    request.tokenized("text", 25)
    assert (request.tokens, in_flight.fed["text"], in_flight.unprepared["text"]) == (55.0, 55.0, 3)
    request.computed("text", 25)
    assert (request.tokens, in_flight.fed["text"]) == (30.0, 30.0)


def test_coalesced_tokens_are_subtracted_and_added_back() -> None:
    in_flight = account()
    request = enter(in_flight, 10.0)
    request.fed("text", 1)
    request.tokenized("text", 10)
    request.adjust_tokens("text", 10)
    assert in_flight.fed["text"] == 0.0
    request.adjust_tokens("text", -10)
    assert in_flight.fed["text"] == 10.0
    request.cached("text", 10)
    assert in_flight.fed["text"] == 0.0


def test_a_request_may_have_as_much_fed_as_it_leaves_free() -> None:
    in_flight = account(100)
    greedy, other = enter(in_flight, 90.0, inputs=9), enter(in_flight, 90.0, inputs=9)
    assert greedy.may_feed("text", 9)  # nothing is fed: a list of any size may go
    greedy.fed("text", 5)
    assert not greedy.may_feed("text", 1)
    assert other.may_feed("text", 5)
    assert not other.may_feed("text", 6)
    assert other.may_feed("image", 1)  # it has no account there


def test_room_that_gets_free_is_told_by_lane() -> None:
    in_flight = account()
    told: list[Lane] = []
    in_flight.fed_tokens_freed = told.append
    request = enter(in_flight, 10.0)
    request.fed("text", 1)
    assert told == []
    request.tokenized("text", 10)
    request.computed("text", 10)
    assert told == ["text"]


def test_a_request_that_has_left_counts_no_more() -> None:
    in_flight = account()
    request = enter(in_flight, 10.0)
    in_flight.leave(request)
    request.fed("text", 1)
    request.tokenized("text", 10)
    request.computed("text", 10)
    assert request.may_feed("text", 10**9)
    assert list(in_flight.total.limited) == [0, 0, 0.0, 0]
    assert (in_flight.fed, in_flight.unprepared) == ({"text": 0.0, "image": 0.0}, {"text": 0, "image": 0})


@given(st.data())
def test_nothing_is_left_of_any_requests_that_came_and_went(data: st.DataObject) -> None:
    in_flight = account()
    open_requests: list[Reservation] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if data.draw(st.booleans()) and open_requests:
            request = open_requests.pop(data.draw(st.integers(0, len(open_requests) - 1)))
            in_flight.leave(request)
            continue
        lane, inputs = data.draw(st.sampled_from(LANES)), data.draw(st.integers(1, 5))
        tokens = data.draw(st.floats(0.1, 1000.0))
        request = enter(
            in_flight,
            tokens,
            inputs=inputs,
            lane=lane,
            tenant=data.draw(st.sampled_from([None, "one", "two"])),
            priority=data.draw(st.sampled_from(Priority)),
        )
        in_flight.count_items(request, inputs)
        for _ in range(data.draw(st.integers(0, inputs))):
            request.fed(lane, 1)
            count = data.draw(st.integers(1, 500))
            request.tokenized(lane, count)
            if data.draw(st.booleans()):
                request.computed(lane, count)
        open_requests.append(request)
        assert sum(in_flight.total.tokens.values()) == pytest.approx(sum(request.tokens for request in open_requests))
    for request in open_requests:
        in_flight.leave(request)
    assert list(in_flight.total.limited) == [0, 0, 0.0, 0]
    assert (in_flight.fed, in_flight.unprepared) == ({"text": 0.0, "image": 0.0}, {"text": 0, "image": 0})
    assert in_flight.tenants == {Priority.INTERACTIVE: {}, Priority.BULK: {}}
