"""Custody of items, and restarts of crashed workers."""

from __future__ import annotations

import anyio
import pytest

from staged_pool.stages.errors import DeviceLost, EngineStopped, StageFailed
from staged_pool.stages.meter import StageMeter
from staged_pool.stages.supervise import RestartPolicy, StageBroken, Supervisor, custody
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import Request
from tests.support.tickets import NoLoad

pytestmark = pytest.mark.anyio


pytestmark = pytest.mark.anyio


def a_ticket() -> Ticket:
    return Ticket(Request, lambda result: ("answer", result), NoLoad())


async def test_custody_settles_what_a_crash_leaves_behind() -> None:
    kept, handed_on = a_ticket(), a_ticket()

    def crash() -> None:
        with custody("here", [handed_on]) as held:
            held.handed_on()
            held.take([kept])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash()
    assert isinstance(kept.error, StageFailed)
    assert not handed_on.settled


async def test_what_a_crash_leaves_behind_gets_an_error_each() -> None:
    """One object for all would lead each caller to the others' frames and bodies."""
    tickets = [a_ticket() for _ in range(3)]
    with pytest.raises(DeviceLost), custody("here", tickets):
        raise DeviceLost("it is gone")
    raised = []
    for ticket in tickets:
        with pytest.raises(DeviceLost) as caught:
            await ticket.wait()
        raised.append(caught.value)
    assert len(set(map(id, raised))) == 3
    assert all(ticket.error is not None and ticket.error.__traceback__ is None for ticket in tickets)


async def test_custody_settles_what_a_worker_forgot() -> None:
    ticket = a_ticket()
    with custody("here", [ticket]):
        pass
    assert isinstance(ticket.error, StageFailed)


async def test_custody_of_a_cancelled_worker_says_that_the_engine_stopped() -> None:
    ticket = a_ticket()
    with anyio.CancelScope() as scope:
        scope.cancel()
        with custody("here", [ticket]):
            await anyio.sleep_forever()
    assert isinstance(ticket.error, EngineStopped)


async def test_a_worker_is_restarted_until_it_has_crashed_too_often() -> None:
    runs = 0

    async def worker() -> None:
        nonlocal runs
        runs += 1
        raise ZeroDivisionError

    meter = StageMeter("here", 1)
    supervisor = Supervisor(meter, RestartPolicy(max_crashes=3, first_delay_s=0.0))
    with pytest.raises(StageBroken, match="here stage crashed 4 times"):
        await supervisor.run(worker)
    assert runs == meter.crashes == 4


async def test_a_lost_device_is_not_answered_by_a_restart() -> None:
    async def worker() -> None:
        raise DeviceLost("gone")

    meter = StageMeter("here", 1)
    with pytest.raises(DeviceLost):
        await Supervisor(meter, RestartPolicy()).run(worker)
    assert meter.crashes == 0
