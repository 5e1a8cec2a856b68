"""The check in front of each stage: settled and late requests are dropped and counted."""

from __future__ import annotations

import math

import pytest

from staged_pool.stages.errors import Abandoned, DeadlineExceeded, ModelFailed, ScopeEnds, StagedPoolError
from staged_pool.stages.meter import StageMeter
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.ticket_check import cause, drop_settled, should_process
from staged_pool.stages.work import Request
from tests.support.tickets import NoLoad


def a_ticket(deadline: float = math.inf, scope_ends_at: float = math.inf) -> Ticket:
    return Ticket(Request, lambda result: result, NoLoad(), deadline=deadline, scope_ends_at=scope_ends_at)


def dropped(meter: StageMeter) -> dict[str, int]:
    return {cause: count for cause, count in meter.dropped.items() if count}


def an_item(ticket: Ticket, sent_at: float = 0.0) -> Item[str]:
    return Item(ticket, 0, "payload", sent_at)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Abandoned("left"), "abandoned"),
        (DeadlineExceeded("late", stage="parse"), "expired"),
        (ScopeEnds("late", stage="parse"), "expired"),
        (ModelFailed("NaN"), "failed"),
    ],
)
def test_a_settled_request_is_dropped_for_the_cause_that_settled_it(error: StagedPoolError, expected: str) -> None:
    ticket, meter = a_ticket(), StageMeter("batch", 1)
    assert should_process(ticket, meter, now=0.0)
    ticket.fail(error)
    assert not should_process(ticket, meter, now=0.0)
    assert cause(ticket) == expected
    assert dropped(meter) == {expected: 1}


@pytest.mark.parametrize(
    ("limits", "error"), [({"deadline": 5.0}, DeadlineExceeded), ({"scope_ends_at": 5.0}, ScopeEnds)]
)
def test_work_that_cannot_be_in_time_is_settled_before_it_begins(
    limits: dict[str, float], error: type[StagedPoolError]
) -> None:
    meter = StageMeter("preprocess", 1)
    assert should_process(a_ticket(**limits), meter, now=3.0, needs_s=2.0)
    ticket = a_ticket(**limits)
    assert not should_process(ticket, meter, now=3.0, needs_s=2.1)
    assert type(ticket.error) is error
    assert "preprocess" in str(ticket.error)
    assert dropped(meter) == {"expired": 1}


def test_items_to_work_on_keep_their_order_and_have_their_waits_measured() -> None:
    meter = StageMeter("batch", 1)
    first, left, last = a_ticket(), a_ticket(), a_ticket()
    left.fail(Abandoned("left"))
    items = [an_item(first, 1.0), an_item(left), an_item(first, 2.0), an_item(last, 4.0)]
    assert drop_settled(items, meter, now=5.0) == [items[0], items[2], items[3]]
    waits = meter.wait.snapshot()
    assert (waits.count, waits.sum_s) == (3, 4.0 + 3.0 + 1.0)
    assert dropped(meter) == {"abandoned": 1}


def test_the_time_of_later_work_is_asked_for_once_for_neighbours_of_a_request() -> None:
    asked: list[Ticket] = []

    def needs_s(ticket: Ticket) -> float:
        asked.append(ticket)
        return 10.0

    soon, patient, boundless = a_ticket(5.0), a_ticket(50.0), a_ticket()
    items = [an_item(soon), an_item(patient), an_item(patient), an_item(boundless)]
    assert drop_settled(items, StageMeter("batch", 1), now=0.0, needs_s=needs_s) == items[1:]
    assert asked == [soon, patient]  # without a deadline nothing is asked
