"""Requests that admission accepts, and the rates that it learns."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.runtime.admission.accounting import DEFAULT_CLASS, RequestClass, Reservation
from staged_pool.runtime.admission.controller import EXPECTED_S, Admission
from staged_pool.runtime.admission.estimates import FIRST_BYTES_PER_TOKEN
from staged_pool.runtime.card import Lane
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.errors import DeadlineExceeded, Overloaded, TooLarge
from staged_pool.stages.scheduling.batch_budget import Budget
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.service_time import LaneServiceTime, ServiceTimeModel

FOREVER = float("inf")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def admission_of(service_time: ServiceTimeModel | None = None, clock: Clock | None = None, **limits: Any) -> Admission:
    service_times: dict[Lane, LaneServiceTime] = {
        "text": LaneServiceTime(budget=Budget(2048), device=service_time or ServiceTimeModel())
    }
    return Admission(EngineConfig(**limits), service_times, dict.fromkeys(service_times, 131_072), clock or Clock())


def measured(tokens_per_s: float) -> ServiceTimeModel:
    service_time = ServiceTimeModel()
    for tokens in (100, 2000) * 20:
        service_time.observe(tokens, tokens / tokens_per_s)
    return service_time


IMAGE_BYTES = 500_000
"""A JPEG of 1920 x 1080 in base64."""


def admission_of_both(
    text: ServiceTimeModel, image: ServiceTimeModel, decode: ServiceTimeModel | None = None, **limits: Any
) -> Admission:
    service_times: dict[Lane, LaneServiceTime] = {
        "text": LaneServiceTime(budget=Budget(512), device=text),
        "image": LaneServiceTime(budget=Budget(512), device=image, preprocess=decode or ServiceTimeModel()),
    }
    return Admission(EngineConfig(**limits), service_times, dict.fromkeys(service_times, 131_072), Clock())


def answer(admission: Admission, inputs: dict[Lane, int], *, body_bytes: int) -> None:
    """Admit, compute and end a request with one input in each lane, of `inputs[lane]` tokens."""
    reservation = admission.enter(body_bytes=body_bytes, timeout_s=FOREVER)
    admission.count_items(reservation, dict.fromkeys(inputs, 1))
    for lane, tokens in inputs.items():
        reservation.tokenized(lane, tokens)
        reservation.computed(lane, tokens)
    admission.leave(reservation, answered=True)


def test_what_enters_leaves_again_whole() -> None:
    admission = admission_of()
    reservations = [admission.enter(body_bytes=n * 100, timeout_s=FOREVER) for n in range(5)]
    for reservation in reservations:
        admission.count_items(reservation, {"text": 3})
        reservation.tokenized("text", 7)
        reservation.computed("text", 7)
    for reservation in reservations:
        admission.leave(reservation, answered=True)
    s = admission.statistics()
    assert (s.requests, s.items, s.tokens, s.body_bytes, s.admitted) == (0, 0, 0, 0, 5)


def test_a_request_may_fill_the_limit_of_items_to_the_last() -> None:
    """Its arrival counts as one item, which its true number contains."""
    admission = admission_of(max_items=8, max_request_items=8)
    first = admission.enter(body_bytes=100, timeout_s=FOREVER)
    admission.count_items(first, {"text": 3})
    second, third = (admission.enter(body_bytes=100, timeout_s=FOREVER) for _ in range(2))
    admission.count_items(second, {"text": 4})
    assert admission.statistics().items == 8
    admission.leave(third)
    admission.count_items(second, {"text": 5})
    with pytest.raises(Overloaded, match="limit of 8 items"):
        admission.count_items(second, {"text": 6})


def test_the_estimate_becomes_the_true_cost_as_items_are_tokenized() -> None:
    admission = admission_of()
    reservation = admission.enter(body_bytes=400, timeout_s=FOREVER)
    assert admission.statistics().tokens == 400 / FIRST_BYTES_PER_TOKEN
    admission.count_items(reservation, {"text": 2})
    reservation.tokenized("text", 10)
    assert admission.statistics().tokens == 10 + 50
    reservation.tokenized("text", 20)
    assert admission.statistics().tokens == 30
    reservation.computed("text", 20)
    assert admission.statistics().tokens == 10


def test_bytes_per_token_are_learned() -> None:
    admission = admission_of()
    for _ in range(200):
        answer(admission, {"text": 20}, body_bytes=200)
    assert admission.statistics().bytes_per_token == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize(("limit", "reason"), [("max_requests", "requests"), ("max_bytes", "bytes")])
def test_each_limit_rejects_what_would_exceed_it(limit: str, reason: str) -> None:
    limits: dict[str, Any] = {limit: 2 if reason == "requests" else 200}
    admission = admission_of(**limits)
    for _ in range(2):
        admission.enter(body_bytes=100, timeout_s=FOREVER)
    with pytest.raises(Overloaded, match=reason):
        admission.enter(body_bytes=100, timeout_s=FOREVER)
    assert admission.statistics().refused == {reason: 1}
    assert admission.statistics().requests == 2


def test_estimated_tokens_are_limited() -> None:
    admission = admission_of(max_tokens=100)
    admission.enter(body_bytes=300, timeout_s=FOREVER)
    with pytest.raises(Overloaded, match="100 tokens"):
        admission.enter(body_bytes=300, timeout_s=FOREVER)


def test_an_empty_engine_takes_a_request_that_will_take_long() -> None:
    admission = admission_of(measured(1000), target_delay_s=0.1)
    admission.enter(body_bytes=8000, timeout_s=FOREVER)
    assert (admission.statistics().requests, admission.statistics().refused) == (1, {})


def test_a_request_beyond_the_target_delay_is_rejected_with_the_time_to_drain() -> None:
    admission = admission_of(measured(1000), target_delay_s=1.0)
    admission.enter(body_bytes=3200, timeout_s=FOREVER)  # 800 tokens: 0.8 s
    admission.enter(body_bytes=400, timeout_s=FOREVER)
    with pytest.raises(Overloaded, match=r"about 1\.2 s") as caught:
        admission.enter(body_bytes=1600, timeout_s=FOREVER)  # behind twice its own 400 tokens
    assert caught.value.retry_after_s == pytest.approx(0.9)
    assert admission.statistics().refused == {"delay": 1}
    assert admission.statistics().lanes["text"].rejected == {"work": 1}


def test_a_request_that_cannot_be_in_time_is_rejected_at_once() -> None:
    admission = admission_of(measured(1000))
    admission.enter(body_bytes=3200, timeout_s=FOREVER)
    admission.enter(body_bytes=400, timeout_s=1.0)
    with pytest.raises(DeadlineExceeded):
        admission.enter(body_bytes=400, timeout_s=0.29)  # its 100 tokens behind 100 of each of the others
    assert admission.statistics().refused == {"deadline": 1}


@pytest.mark.parametrize("limits", [{"max_requests": 1}, {}])
def test_after_a_rejection_more_are_expected_for_a_moment(limits: dict[str, Any]) -> None:
    clock = Clock()
    admission = admission_of(measured(1000), clock, **limits)
    admission.enter(body_bytes=3200, timeout_s=FOREVER)
    assert not admission.expects_rejections()
    with pytest.raises((Overloaded, DeadlineExceeded)):
        admission.enter(body_bytes=3200, timeout_s=0.01 if not limits else FOREVER)
    assert admission.expects_rejections()
    clock.now += EXPECTED_S
    assert not admission.expects_rejections()


def test_a_small_request_does_not_pay_for_a_large_one() -> None:
    admission = admission_of(measured(1000), target_delay_s=0.5)
    admission.enter(body_bytes=40_000, timeout_s=FOREVER)  # 10 s
    admission.enter(body_bytes=400, timeout_s=0.21)
    with pytest.raises(Overloaded):
        admission.enter(body_bytes=40_000, timeout_s=FOREVER)


def late(admission: Admission, clock: Clock, took_s: float, request_class: RequestClass = DEFAULT_CLASS) -> None:
    """Admit and end a request of one token that takes `took_s` seconds."""
    reservation = admission.enter(body_bytes=4, timeout_s=FOREVER, request_class=request_class)
    admission.count_items(reservation, {"text": 1})
    reservation.tokenized("text", 1)
    reservation.computed("text", 1)
    clock.now += took_s
    admission.leave(reservation, answered=True)


def test_delay_that_service_times_do_not_explain_counts_and_is_forgotten() -> None:
    clock = Clock()
    admission = admission_of(measured(1e9), clock, target_delay_s=0.7)
    stays = admission.enter(body_bytes=0, timeout_s=FOREVER)
    for _ in range(5):
        late(admission, clock, 1.0)
    assert admission.statistics().lag_s > 0.2
    for _ in range(100):
        late(admission, clock, 0.001)
    assert admission.statistics().lag_s < 0.01
    for _ in range(9):
        late(admission, clock, 1.0)
    with pytest.raises(Overloaded):
        admission.enter(body_bytes=4, timeout_s=FOREVER)
    assert admission.statistics().requests == 1
    assert admission.statistics().lanes["text"].rejected == {"lag": 1}
    admission.leave(stays)
    assert admission.statistics().lag_s == 0, "an idle engine is late for nobody"
    for _ in range(2):
        admission.enter(body_bytes=4, timeout_s=FOREVER)


def test_a_tenant_whose_requests_wait_for_each_other_makes_nobody_else_late() -> None:
    clock = Clock()
    admission = admission_of(measured(1e9), clock, target_delay_s=1.0)
    heavy, light = RequestClass(tenant="heavy"), RequestClass(tenant="light")
    admission.enter(body_bytes=0, timeout_s=FOREVER, request_class=heavy)
    with suppress(Overloaded):
        while True:
            late(admission, clock, 10.0, request_class=heavy)
    with pytest.raises(Overloaded, match="about"):
        admission.enter(body_bytes=4, timeout_s=FOREVER, request_class=heavy)
    late(admission, clock, 0.01, request_class=light)
    late(admission, clock, 0.01, request_class=RequestClass(tenant="another"))


def test_tenants_who_come_once_each_learn_of_each_other_how_late_it_is() -> None:
    clock = Clock()
    admission = admission_of(measured(1e9), clock, target_delay_s=1.0)
    admission.enter(body_bytes=0, timeout_s=FOREVER)
    for number in range(50):
        with suppress(Overloaded):
            late(admission, clock, 10.0, request_class=RequestClass(tenant=number))
    with pytest.raises(Overloaded):
        admission.enter(body_bytes=4, timeout_s=FOREVER, request_class=RequestClass(tenant="new"))


def test_rows_that_were_known_do_not_hide_how_late_the_others_are() -> None:
    clock = Clock()
    admission = admission_of(measured(100), clock, target_delay_s=1000)
    admission.enter(body_bytes=0, timeout_s=FOREVER)  # lag is forgotten when the engine is idle

    def take(seconds: float, *, known: bool) -> None:
        reservation = admission.enter(body_bytes=4000, timeout_s=FOREVER)
        admission.count_items(reservation, {"text": 1})
        reservation.tokenized("text", 1000)
        (reservation.cached if known else reservation.computed)("text", 1000)
        clock.now += seconds
        admission.leave(reservation, answered=True)

    for _ in range(100):
        take(15.0, known=False)  # about 10 are predicted
        take(5.0, known=True)  # none are, and whatever holds up the others holds up these
    assert admission.statistics().lag_s == pytest.approx(5.0, abs=0.6)
    for _ in range(100):
        take(0.0, known=True)
    assert admission.statistics().lag_s < 0.1


def test_a_request_too_large_for_any_load_is_told_so() -> None:
    admission = admission_of(max_bytes=100, max_request_items=3)
    with pytest.raises(TooLarge, match="101 bytes"):
        admission.enter(body_bytes=101, timeout_s=FOREVER)
    reservation = admission.enter(body_bytes=1, timeout_s=FOREVER)
    with pytest.raises(TooLarge, match="4 inputs"):
        admission.count_items(reservation, {"text": 4})


@pytest.mark.parametrize("seen", [0, 100])
def test_three_hundred_images_at_once_are_let_in(seen: int) -> None:
    """The result is the same if the server has seen images before."""
    admission = admission_of_both(measured(40_000), measured(40_000))
    for _ in range(seen):
        answer(admission, {"image": 50}, body_bytes=IMAGE_BYTES)
    reservations = [admission.enter(body_bytes=IMAGE_BYTES, timeout_s=FOREVER) for _ in range(300)]
    for reservation in reservations:
        admission.count_items(reservation, {"image": 1})
    assert admission.statistics().body_bytes == 300 * IMAGE_BYTES
    assert admission.statistics().tokens <= 300 * 256


def test_a_text_is_let_in_whatever_images_wait() -> None:
    admission = admission_of_both(measured(10_000), measured(100), target_delay_s=6.5)
    admission.count_items(admission.enter(body_bytes=IMAGE_BYTES, timeout_s=FOREVER), {"image": 100})
    admission.count_items(admission.enter(body_bytes=IMAGE_BYTES, timeout_s=FOREVER), {"image": 100})
    with pytest.raises(Overloaded, match="would take about") as caught:
        admission.enter(body_bytes=IMAGE_BYTES, timeout_s=FOREVER)
    assert caught.value.retry_after_s > 100
    admission.enter(body_bytes=400, timeout_s=0.1)
    lanes = admission.statistics().lanes
    assert lanes["text"].drain_s < 0.1
    assert lanes["image"].drain_s > 100


def test_a_url_of_an_image_is_judged_when_it_has_been_read() -> None:
    """Its body looks like that of a text."""
    admission = admission_of_both(measured(10_000), measured(100), target_delay_s=6.5)
    admission.count_items(admission.enter(body_bytes=200, timeout_s=FOREVER), {"image": 100})
    reservation = admission.enter(body_bytes=200, timeout_s=FOREVER)
    with pytest.raises(Overloaded, match="would take about"):
        admission.count_items(reservation, {"image": 100})
    admission.leave(reservation)
    admission.count_items(admission.enter(body_bytes=200, timeout_s=FOREVER), {"text": 1})
    assert admission.statistics().refused == {"delay": 1}


def test_texts_that_looked_like_images_count_as_what_they_are() -> None:
    admission = admission_of_both(ServiceTimeModel(), ServiceTimeModel(), max_tokens=150_000)
    admission.count_items(admission.enter(body_bytes=400_000, timeout_s=FOREVER), {"text": 500})
    reservation = admission.enter(body_bytes=400_000, timeout_s=FOREVER)
    with pytest.raises(Overloaded, match="150000 tokens"):
        admission.count_items(reservation, {"text": 500})
    admission.leave(reservation)
    assert admission.statistics().tokens == 100_000


def test_images_that_are_slow_to_decode_drain_as_slowly() -> None:
    decode = ServiceTimeModel()
    for _ in range(50):
        decode.observe(1, 0.02)
    admission = admission_of_both(measured(10_000), measured(10_000), decode)
    reservation = admission.enter(body_bytes=IMAGE_BYTES, timeout_s=FOREVER)
    admission.count_items(reservation, {"image": 100})
    assert admission.statistics().lanes["image"].drain_s == pytest.approx(2.56, rel=0.01)  # 25 600 tokens on the device
    for _ in range(100):
        reservation.tokenized("image", 10)
    assert admission.statistics().lanes["image"].drain_s == pytest.approx(0.1, rel=0.01)
    reservation = admission.enter(body_bytes=IMAGE_BYTES, timeout_s=FOREVER)
    admission.count_items(reservation, {"image": 100})
    assert admission.statistics().lanes["image"].drain_s == pytest.approx(2.0, rel=0.01)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(("enter", "count", "prepare", "compute", "leave")),
        st.integers(0, 9),
        st.integers(0, 2_000_000),
        st.dictionaries(st.sampled_from(("text", "image")), st.integers(1, 5), min_size=1),
    ),
    max_size=60,
)


@given(MOVES)
def test_whatever_happens_what_is_counted_is_what_is_in_flight(
    moves: list[tuple[str, int, int, dict[Lane, int]]],
) -> None:
    admission = admission_of_both(measured(1000), measured(100), max_tokens=100_000, target_delay_s=20, max_items=40)
    reservations: list[Reservation] = []
    for move, which, number, inputs in moves:
        reservation = reservations[which % len(reservations)] if reservations else None
        lane = next(iter(inputs))
        try:
            if move == "enter":
                reservations.append(admission.enter(body_bytes=number, timeout_s=FOREVER))
            elif reservation is None:
                continue
            elif move == "count":
                admission.count_items(reservation, inputs)
            elif move == "prepare":
                reservation.tokenized(lane, number % 1000)
            elif move == "compute":
                reservation.computed(lane, number % 10)
            else:
                reservations.remove(reservation)
                admission.leave(reservation, answered=bool(number % 2))
        except Overloaded:
            assert reservations, "an empty engine rejects nothing"
        s = admission.statistics()
        assert (s.requests, s.items) == (len(reservations), sum(reservation.items for reservation in reservations))
        assert sum(admission.in_flight.total.tokens.values()) == pytest.approx(
            sum(reservation.tokens for reservation in reservations), abs=1e-6
        )
    for reservation in reservations:
        admission.leave(reservation)
    s = admission.statistics()
    assert (s.requests, s.items, s.tokens, s.body_bytes) == (0, 0, 0, 0)
    assert all(lane.tokens == 0 for lane in s.lanes.values())


# Tenants and priorities


def a_backlog(admission: Admission, requests: int, request_class: RequestClass) -> list[Reservation]:
    return [admission.enter(body_bytes=4000, timeout_s=FOREVER, request_class=request_class) for _ in range(requests)]


BULK = Priority.BULK
HEAVY, LIGHT, NOBODY = RequestClass(tenant="heavy"), RequestClass(tenant="light"), RequestClass()


def test_a_tenant_is_not_rejected_for_the_backlog_of_another() -> None:
    admission = admission_of(measured(1000), target_delay_s=10)
    with pytest.raises(Overloaded, match="would take about"):
        a_backlog(admission, 100, HEAVY)
    (reservation,) = a_backlog(admission, 1, LIGHT)
    assert reservation.expected_s == pytest.approx(2 * 1000 / 1000, rel=0.1), "itself, and as much of the other tenant"


def test_requests_of_one_tenant_wait_for_each_other() -> None:
    admission = admission_of(measured(1000), target_delay_s=30)
    reservations = a_backlog(admission, 5, LIGHT)
    assert [round(reservation.expected_s) for reservation in reservations] == [1, 2, 3, 4, 5]
    admission.leave(reservations.pop())
    assert round(a_backlog(admission, 1, LIGHT)[0].expected_s) == 5


def test_interactive_work_waits_for_an_eighth_of_bulk_work_and_bulk_work_for_seven_of_interactive() -> None:
    admission = admission_of(measured(1000), target_delay_s=30)
    a_backlog(admission, 12, RequestClass(BULK))
    (interactive,) = a_backlog(admission, 1, NOBODY)
    assert interactive.expected_s == pytest.approx(8 / 7, rel=0.05)
    a_backlog(admission, 5, NOBODY)
    (bulk,) = a_backlog(admission, 1, RequestClass(BULK, "somebody"))
    assert bulk.expected_s == pytest.approx(2 + 6, rel=0.05), "itself, as much of other bulk work, all interactive work"


@pytest.mark.parametrize("request_class", [HEAVY, RequestClass(BULK)], ids=["a tenant", "bulk work"])
@pytest.mark.parametrize("limit", ["max_requests", "max_items", "max_tokens", "max_bytes"])
def test_nobody_takes_up_a_limit_alone(request_class: RequestClass, limit: str) -> None:
    each = {"max_requests": 1, "max_items": 1, "max_tokens": 1000, "max_bytes": 4000}
    limits: dict[str, Any] = {limit: 16 * each[limit]}
    admission = admission_of(**limits)
    with pytest.raises(Overloaded, match="has reached its share of the server's limit"):
        a_backlog(admission, 100, request_class)
    assert admission.statistics().requests == 14
    assert admission.statistics().refused == {"part": 1}
    a_backlog(admission, 1, LIGHT)


def test_requests_of_no_tenant_may_take_up_a_limit() -> None:
    admission = admission_of(max_requests=16)
    a_backlog(admission, 16, NOBODY)
    with pytest.raises(Overloaded, match="16 requests"):
        a_backlog(admission, 1, NOBODY)


def test_that_bulk_work_is_late_is_not_held_against_interactive_work() -> None:
    clock = Clock()
    admission = admission_of(measured(1e9), clock, target_delay_s=0.325)
    admission.enter(body_bytes=0, timeout_s=FOREVER)  # lag is forgotten when the engine is idle
    for _ in range(8):
        late(admission, clock, 1.0, RequestClass(BULK))
    assert admission.overload(100, RequestClass(BULK)) is not None
    assert admission.overload(100) is None


def test_a_rejection_is_judged_anew_each_time_and_counted() -> None:
    admission = admission_of(target_delay_s=1.0, max_requests=9)
    reservations = a_backlog(admission, 9, NOBODY)
    first, second = admission.overload(4000), admission.overload(4000)
    assert isinstance(first, Overloaded)
    assert isinstance(second, Overloaded)
    assert first is not second
    assert admission.statistics().refused == {"requests": 2}
    admission.leave(reservations[0])
    assert admission.overload(4000) is None


@given(st.lists(st.tuples(st.sampled_from((None, "a", "b")), st.sampled_from(Priority), st.booleans()), max_size=30))
def test_nothing_is_known_of_a_tenant_that_has_left(visits: list[tuple[str | None, Priority, bool]]) -> None:
    admission = admission_of()
    reservations = []
    for tenant, priority, answered in visits:
        reservation = admission.enter(body_bytes=400, timeout_s=FOREVER, request_class=RequestClass(priority, tenant))
        admission.count_items(reservation, {"text": 3})
        reservation.tokenized("text", 7)
        reservations.append((reservation, answered))
    assert admission.statistics().tenants == len({visit[:2] for visit in visits})
    for reservation, answered in reservations:
        admission.leave(reservation, answered=answered)
    assert admission.statistics().tenants == 0
    assert all(not any(amounts.limited) for amounts in admission.in_flight.priorities.values())


def test_a_text_counts_for_no_more_than_the_model_reads_of_it() -> None:
    """Else a long text waits for an empty engine, and all later requests behind it."""
    admission = admission_of()
    admission._input_tokens = 256
    reservation = admission.enter(body_bytes=2_000_000, timeout_s=FOREVER)
    assert reservation.tokens == pytest.approx(500_000)
    admission.count_items(reservation, {"text": 2})
    assert reservation.tokens == admission.statistics().tokens == 512
    assert reservation.tokens_of("text", 1) == 256
