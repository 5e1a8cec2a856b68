"""In which order requests get into the pipeline, where more want to than it holds."""

from __future__ import annotations

from collections.abc import Hashable

import anyio
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine import Engine, run_engine
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

    def __init__(self, tokens: int, requests: int = 1) -> None:
        self.gate = Entrance(tokens, requests)
        self.inside: list[Ticket] = []

    async def enter(self, ticket: Ticket, tokens: float) -> None:
        await self.gate.enter(ticket, tokens)
        self.inside.append(ticket)


async def test_one_tenant_takes_half_and_waits_for_the_rest_until_some_of_it_leaves() -> None:
    crowd, tickets = Crowd(40), [a_ticket() for _ in range(7)]
    async with anyio.create_task_group() as tasks:
        for ticket in tickets:
            tasks.start_soon(crowd.enter, ticket, 5)
            await anyio.wait_all_tasks_blocked()
        assert crowd.inside == tickets[:4]
        assert crowd.gate.waiting(Priority.INTERACTIVE) == 3
        for place in range(3):
            crowd.gate.leave(tickets[place])
            await anyio.wait_all_tasks_blocked()
            assert crowd.inside == tickets[: place + 5]


async def test_however_large_a_request_is_several_are_inside_side_by_side() -> None:
    crowd = Crowd(640, requests=64)
    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(crowd.enter, a_ticket(), 5000)
        await anyio.wait_all_tasks_blocked()
        assert len(crowd.inside) == 32
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    "other", [a_ticket("light"), a_ticket("heavy", Priority.BULK)], ids=["another tenant", "another priority"]
)
async def test_whoever_has_nothing_inside_goes_in_at_once(other: Ticket) -> None:
    crowd = Crowd(10)
    async with anyio.create_task_group() as tasks:
        for ticket in (*[a_ticket("heavy") for _ in range(50)], other):
            tasks.start_soon(crowd.enter, ticket, 10)
            await anyio.wait_all_tasks_blocked()
        assert len(crowd.inside) == 2
        assert crowd.inside[-1] is other
        tasks.cancel_scope.cancel()


async def test_room_that_is_freed_goes_to_who_has_least() -> None:
    crowd = Crowd(120)
    tickets = {tenant: [a_ticket(tenant) for _ in range(20)] for tenant in "ab"}
    async with anyio.create_task_group() as tasks:
        for tenant in "ab":
            for ticket in tickets[tenant]:
                tasks.start_soon(crowd.enter, ticket, 10)
                await anyio.wait_all_tasks_blocked()
        inside = [ticket.tenant for ticket in crowd.inside]
        assert (inside.count("a"), inside.count("b")) == (6, 3)
        for ticket in tickets["a"][:6]:
            crowd.gate.leave(ticket)
            await anyio.wait_all_tasks_blocked()
        now = [ticket.tenant for ticket in crowd.inside[6:]]
        assert (now.count("a"), now.count("b")) == (4, 4)
        tasks.cancel_scope.cancel()


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


async def test_statistics_show_who_waits_at_the_gate_and_a_deadline_ends_that() -> None:
    gate = Gate()
    config = EngineConfig(coalesce=False, waiting_tokens=4, max_batch_tokens=1, max_batch_items=1)
    model = LetterModel(on_forward=gate)
    async with run_engine(config, model, device=ThreadOffload(1)) as engine, anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(lambda: engine.embed("a", tenant="x"))
        await gate.arrived()
        await until(lambda: engine.statistics().priorities["interactive"].waiting_items >= 1)
        with pytest.raises(DeadlineExceeded):
            await engine.embed("b", tenant="x", timeout_s=0.05)
        statistics = engine.statistics()
        interactive, bulk = statistics.priorities["interactive"], statistics.priorities["bulk"]
        assert interactive.requests == 20
        assert interactive.at_gate >= 10
        assert bulk.requests == bulk.at_gate == bulk.waiting_items == bulk.wait.count == 0
        assert statistics.admission.tenants == 1
        assert statistics.device.budget_tokens == {"text": 1}
        gate.open()
    assert ["b"] not in model.forwarded
    assert engine.statistics().priorities["interactive"].wait.count == 20


async def test_however_many_large_requests_are_fed_a_small_one_reaches_the_waiting_room() -> None:
    gate = Gate()
    config = EngineConfig(
        coalesce=False, waiting_tokens=100, request_waiting_tokens=50, chunk_items=1, max_batch_items=1
    )
    model = LetterModel(on_forward=gate)
    async with run_engine(config, model, device=ThreadOffload(1)) as engine, anyio.create_task_group() as tasks:
        waiting = engine._pipeline.batch["text"]._builder.turns
        for _ in range(10):
            tasks.start_soon(engine.embed, ["a"] * 100)
        await gate.arrived()
        await until(lambda: waiting.items >= 40 and _is_idle(engine), within_s=10)  # nobody is fed any further
        tasks.start_soon(lambda: engine.embed("b", tenant="b"))
        await until(lambda: waiting.tenants == 2)
        gate.open()
    assert model.forwarded.index(["b"]) <= 3


def _is_idle(engine: Engine) -> bool:
    preprocess = engine.statistics().stages[1]
    return preprocess.busy == preprocess.waiting == 0


@pytest.mark.parametrize("priority", ["soon", "", "BULK", None, 1, []])
async def test_a_host_that_asks_for_another_priority_is_told_which_there_are(priority: str) -> None:
    async with run_engine(EngineConfig(), LetterModel(), device=ThreadOffload(1)) as engine:
        with pytest.raises(InvalidInput, match="priority: expected interactive or bulk"):
            await engine.embed("a", priority=priority)
