"""When less than a share of a batch waits for company, and for how long."""

from __future__ import annotations

from math import inf

import pytest

from staged_pool.stages.company import COMPANY_S, Company
from staged_pool.stages.forming import BatchBuilder
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import Item, Request
from tests.doubles import NoLoad, wait_in

SHARE = 10


class Room:
    """A waiting room of so many tokens, and what is on its way to it."""

    def __init__(self, tokens: int, *, coming: int = 0, cores: int | None = 2, gathers: bool = True) -> None:
        self.now = 0.0
        builder = BatchBuilder[int](max_items=100, max_cost=100, pads=False, min_share=SHARE, slots=2)
        if tokens:
            ticket = Ticket(Request, lambda result: None, NoLoad())
            wait_in(builder, [Item(ticket, 0, 0, 0.0, tokens)])
        self.company = Company(
            builder,
            waiting_tokens=50,
            coming=lambda: coming,
            gathers=gathers,
            cores=cores,
            clock=lambda: self.now,
        )

    def waits_s(self, running: int = 0) -> float:
        return self.company.worth_waiting_s(running)


@pytest.mark.parametrize("coming", [0, 3])
def test_a_share_waits_for_nothing(coming: int) -> None:
    room = Room(SHARE, coming=coming)
    room.company.begin(SHARE - 1)
    assert room.waits_s(running=2) == 0


def test_less_than_a_small_forward_that_runs_waits_for_its_end() -> None:
    room = Room(4)
    room.company.begin(5)
    assert room.waits_s(running=1) == inf
    room.company.end(5)
    assert room.waits_s() == 0


@pytest.mark.parametrize("runs", [3, SHARE])
def test_as_much_as_the_smallest_that_runs_goes_beside_it(runs: int) -> None:
    room = Room(4)
    room.company.begin(runs)
    assert room.waits_s(running=1) == 0


def test_what_is_being_prepared_is_waited_for_while_all_cores_are_busy() -> None:
    assert Room(4, coming=1).waits_s(running=1) == inf
    assert Room(4, coming=1, cores=3).waits_s(running=1) == COMPANY_S
    assert Room(4, coming=1, cores=None).waits_s(running=1) == 0


def test_an_idle_device_waits_for_a_moment_and_each_batch_for_its_own() -> None:
    room = Room(4, coming=1)
    assert room.waits_s() == pytest.approx(COMPANY_S)
    room.now += COMPANY_S / 4
    assert room.waits_s() == pytest.approx(0.75 * COMPANY_S)
    room.now += COMPANY_S
    assert room.waits_s() == 0
    room.company.has_gone()
    assert room.waits_s() == pytest.approx(COMPANY_S)


def test_where_small_forwards_do_not_slow_each_other_down_none_is_waited_for() -> None:
    room = Room(4, coming=1, gathers=False)
    room.company.begin(5)
    assert room.waits_s() == 0
    assert room.waits_s(running=1) == inf, "preparing has the other core"


def test_nothing_waits_in_an_empty_room_for_a_moment() -> None:
    room = Room(0, coming=1)
    assert room.waits_s() == 0
    room.now += 10
    assert room.waits_s() == 0


def test_a_full_room_goes_however_large_a_share_is() -> None:
    builder = BatchBuilder[int](max_items=100, max_cost=100, pads=False, min_share=1000, slots=2)
    wait_in(builder, [Item(Ticket(Request, lambda result: None, NoLoad()), 0, 0, 0.0, 50)])
    company = Company(builder, waiting_tokens=50, coming=lambda: 1, gathers=True, cores=2, clock=lambda: 0.0)
    assert company.worth_waiting_s(1) == 0
