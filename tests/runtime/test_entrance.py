"""Requests that wait for room in front of an engine, instead of being rejected."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest

from staged_pool.runtime.admission.accounting import Arriving
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.entrance import Entrance
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.requests import EmbedRequest, TextInput
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.errors import DeadlineExceeded, EngineStopped, Overloaded, StagedPoolError
from staged_pool.stages.scheduling.entries import Priority
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def busy_engine() -> AsyncIterator[tuple[Engine, Gate]]:
    """An engine with room for one request, which holds one until the gate opens."""
    gate = Gate()
    config = EngineConfig(max_requests=1, drain_timeout_s=5)
    async with (
        DeviceThreads("test device", watchdog_s=60).running() as device,
        run_engine(config, LetterModel(on_forward=gate), device=device) as engine,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(engine.embed, "first")
        await gate.arrived()
        try:
            yield engine, gate
        finally:
            gate.open()


async def ask(
    engine: Engine,
    text: str,
    answered: list[str | StagedPoolError],
    *,
    priority: Priority = Priority.INTERACTIVE,
    tenant: str | None = None,
) -> None:
    """Embed a text as a caller who waits for room, and note the end."""
    request = EmbedRequest(inputs=(TextInput(text),))
    try:
        await engine.submit(
            lambda: request, lambda result: result, body_bytes=len(text), priority=priority, tenant=tenant, waits=True
        )
    except StagedPoolError as error:
        answered.append(error)
    else:
        answered.append(text)


async def test_who_waits_is_let_in_by_a_departure_before_newcomers_and_who_does_not_is_rejected() -> None:
    answered: list[str | StagedPoolError] = []
    async with busy_engine() as (engine, gate), anyio.create_task_group() as tasks:
        tasks.start_soon(ask, engine, "waits", answered)
        await until(lambda: engine._entrance.waiting == 1)
        with pytest.raises(Overloaded):
            await engine.embed("does not wait")
        gate.open()
        await until(lambda: answered == ["waits"])
    assert engine.statistics().admission.refused == {"requests": 1}, "nobody was rejected who waited"


async def test_those_who_wait_take_turns_by_tenant() -> None:
    answered: list[str | StagedPoolError] = []
    async with busy_engine() as (engine, gate), anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(partial(ask, engine, f"of many {number}", answered, tenant="many"))
            await until(lambda number=number: engine._entrance.waiting == number + 1)  # type: ignore[misc]
        tasks.start_soon(partial(ask, engine, "of another", answered, tenant="another"))
        await until(lambda: engine._entrance.waiting == 4)
        gate.open()
    assert answered.index("of another") < answered.index("of many 1")


async def test_interactive_requests_go_before_bulk_ones_that_came_earlier() -> None:
    answered: list[str | StagedPoolError] = []
    async with busy_engine() as (engine, gate), anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(partial(ask, engine, f"bulk {number}", answered, priority=Priority.BULK))
            await until(lambda number=number: engine._entrance.waiting == number + 1)  # type: ignore[misc]
        tasks.start_soon(ask, engine, "interactive", answered)
        await until(lambda: engine._entrance.waiting == 4)
        gate.open()
    assert answered[0] == "interactive"


async def test_who_leaves_while_it_waits_frees_its_place_in_the_queue() -> None:
    answered: list[str | StagedPoolError] = []
    async with busy_engine() as (engine, gate), anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as leaving:
                leaving.start_soon(ask, engine, "leaves", answered)
                await until(lambda: engine._entrance.waiting == 1)
                scope.cancel()
        assert engine._entrance.waiting == 0
        tasks.start_soon(ask, engine, "stays", answered)
        gate.open()
    assert answered == ["stays"]


async def test_a_deadline_passes_while_a_request_waits_for_room() -> None:
    async with busy_engine() as (engine, _):
        with pytest.raises(DeadlineExceeded, match="before there was room for it in the engine") as failure:
            await engine.submit(
                lambda: EmbedRequest(inputs=(TextInput("late"),)), lambda result: result, timeout_s=0.05, waits=True
            )
        assert failure.value.stage == "door"
        assert engine._entrance.waiting == 0


async def test_a_drain_waits_for_a_request_that_was_let_in_a_moment_ago() -> None:
    answered: list[str | StagedPoolError] = []
    async with (
        DeviceThreads("test device", watchdog_s=60).running() as device,
        run_engine(EngineConfig(max_requests=1), LetterModel(), device=device) as engine,
        anyio.create_task_group() as tasks,
    ):
        assert isinstance(engine._entrance, Entrance)
        earlier = engine._entrance.enter_nowait(Arriving(1))
        tasks.start_soon(ask, engine, "waits", answered)
        await until(lambda: engine._entrance.waiting == 1)
        engine._entrance.leave(earlier)  # it is let in, and has not run since
        await engine.drain(10)
        assert answered == ["waits"]


async def test_an_engine_that_drains_fails_those_who_wait_at_once() -> None:
    answered: list[str | StagedPoolError] = []
    async with busy_engine() as (engine, gate), anyio.create_task_group() as tasks:
        tasks.start_soon(ask, engine, "waits", answered)
        await until(lambda: engine._entrance.waiting == 1)
        tasks.start_soon(engine.drain, 10)
        await until(lambda: bool(answered))
        assert isinstance(answered[0], EngineStopped)
        assert engine.statistics().admission.requests == 1, "the request in flight goes on"
        gate.open()
