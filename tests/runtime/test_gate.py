"""In which order requests get into the pipeline, where more want to than it holds."""

from __future__ import annotations

from collections.abc import Hashable

import anyio
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine import run_engine
from staged_pool.runtime.gate import Gate as Entrance
from staged_pool.stages.errors import Abandoned, DeadlineExceeded, InvalidInput
from staged_pool.stages.offload import ThreadOffload
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import Priority, Request
from tests.doubles import Gate, LetterModel, NoLoad, until

pytestmark = pytest.mark.anyio


def a_ticket(tenant: Hashable = None, priority: Priority = Priority.INTERACTIVE) -> Ticket:
    return Ticket(Request, lambda result: None, NoLoad(), tenant=tenant, priority=priority)


class Crowd:
    """Requests that want in, and those that are."""

    def __init__(self, tokens: int, request_tokens: int = 100) -> None:
        self.gate = Entrance(tokens, request_tokens)
        self.inside: list[Ticket] = []

    async def enter(self, ticket: Ticket, tokens: float) -> None:
        await self.gate.enter(ticket, tokens)
        self.inside.append(ticket)


async def test_what_there_is_room_for_goes_in_at_once_and_the_rest_as_others_leave() -> None:
    crowd, tickets = Crowd(10), [a_ticket() for _ in range(5)]
    async with anyio.create_task_group() as tasks:
        for ticket in tickets:
            tasks.start_soon(crowd.enter, ticket, 5)
            await anyio.wait_all_tasks_blocked()
        assert crowd.inside == tickets[:2]
        assert crowd.gate.waiting(Priority.INTERACTIVE) == 3
        for place in range(3):
            crowd.gate.leave(tickets[place])
            await anyio.wait_all_tasks_blocked()
            assert crowd.inside == tickets[: place + 3]


async def test_what_is_larger_than_the_pipeline_goes_in_alone() -> None:
    crowd = Crowd(10, request_tokens=1000)
    first, large = a_ticket(), a_ticket()
    async with anyio.create_task_group() as tasks:
        for ticket, tokens in ((first, 1), (large, 5000)):
            tasks.start_soon(crowd.enter, ticket, tokens)
            await anyio.wait_all_tasks_blocked()
        assert crowd.inside == [first]
        crowd.gate.leave(first)


async def test_tenants_go_in_in_turns_and_bulk_work_last() -> None:
    crowd = Crowd(10)
    first, light, bulk = a_ticket("heavy"), a_ticket("light"), a_ticket("light", Priority.BULK)
    heavy = [a_ticket("heavy") for _ in range(4)]
    async with anyio.create_task_group() as tasks:
        for ticket in (first, bulk, *heavy, light):
            tasks.start_soon(crowd.enter, ticket, 10)
            await anyio.wait_all_tasks_blocked()
        while len(crowd.inside) < 7:
            crowd.gate.leave(crowd.inside[-1])
            await anyio.wait_all_tasks_blocked()
    assert crowd.inside == [first, heavy[0], light, *heavy[1:], bulk]


async def test_who_gives_up_waiting_keeps_nobody_out() -> None:
    crowd = Crowd(10)
    first, second, third = (a_ticket() for _ in range(3))
    await crowd.enter(first, 10)
    async with anyio.create_task_group() as tasks:
        with anyio.move_on_after(0) as scope:
            await crowd.enter(second, 10)
        assert scope.cancelled_caught
        second.fail(Abandoned("the caller left"))
        crowd.gate.leave(second)
        tasks.start_soon(crowd.enter, third, 10)
        await anyio.wait_all_tasks_blocked()
        crowd.gate.leave(first)
    assert crowd.inside == [first, third]
    crowd.gate.leave(third)
    crowd.gate.leave(third)  # as the engine does, for one that has no text
    await crowd.enter(a_ticket(), 10)


async def test_statistics_show_where_each_priority_waits_and_a_deadline_ends_the_wait() -> None:
    gate = Gate()
    config = EngineConfig(waiting_tokens=4, max_batch_tokens=1, max_batch_items=1)
    model = LetterModel(on_forward=gate)
    async with run_engine(config, model, device=ThreadOffload(1)) as engine, anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(lambda: engine.embed("a", tenant="x"))
        await gate.arrived()
        await until(lambda: engine.statistics().priorities["interactive"].waiting_items >= 3)
        with pytest.raises(DeadlineExceeded):
            await engine.embed("b", priority="bulk", tenant="y", timeout_s=0.05)
        statistics = engine.statistics()
        interactive, bulk = statistics.priorities["interactive"], statistics.priorities["bulk"]
        assert interactive.requests == 20
        assert interactive.at_gate >= 10
        assert bulk.requests == bulk.waiting_items == bulk.wait.count == 0
        assert statistics.admission.tenants == 1
        assert statistics.device.budget_tokens == {"text": 1}
        gate.open()
    assert ["b"] not in model.forwarded
    assert engine.statistics().priorities["interactive"].wait.count == 20


@pytest.mark.parametrize("priority", ["soon", "", "BULK", None, 1, []])
async def test_a_host_that_asks_for_another_priority_is_told_which_there_are(priority: str) -> None:
    async with run_engine(EngineConfig(), LetterModel(), device=ThreadOffload(1)) as engine:
        with pytest.raises(InvalidInput, match="priority: expected interactive or bulk"):
            await engine.embed("a", priority=priority)
