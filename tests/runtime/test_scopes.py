"""Calls of the engine inside the cancel scopes of a host: the scope cancels, and only `timeout_s` raises."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import sniffio
import trio
from numpy.testing import assert_array_equal

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.requests import EmbedRequest, TextInput
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.errors import DeadlineExceeded
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

FORWARD_S = 0.02
"""Seconds of a forward: longer than most scopes of the tests."""


@asynccontextmanager
async def engine_on(model: LetterModel, **settings: Any) -> AsyncIterator[Engine]:
    config = EngineConfig(**settings)
    async with DeviceThreads("test device", watchdog_s=config.watchdog_s).running() as device:
        async with run_engine(config, model, device=device) as engine:
            yield engine
            assert engine.statistics().admission.requests == 0


@asynccontextmanager
async def slow_engine() -> AsyncIterator[Engine]:
    """An engine that knows how slow its device is: it predicts that short deadlines cannot be met."""
    async with engine_on(LetterModel(on_forward=lambda texts: time.sleep(FORWARD_S))) as engine:
        for number in range(4):
            await engine.embed(f"{number}")
        yield engine


@asynccontextmanager
async def held_engine() -> AsyncIterator[tuple[Engine, Gate]]:
    """Open a slow engine whose device holds a batch until the gate opens.

    Requests behind that batch cannot be answered early, even if the event loop runs late.
    """
    gate = Gate()
    waits = False

    def forward(texts: object) -> None:
        time.sleep(FORWARD_S)
        if waits:
            gate()

    async with engine_on(LetterModel(on_forward=forward)) as engine:
        for number in range(4):
            await engine.embed(f"{number}")
        waits = True
        async with anyio.create_task_group() as others:
            others.start_soon(engine.embed, "beside it")
            await gate.arrived()
            try:
                yield engine, gate
            finally:
                gate.open()


async def _stream(engine: Engine, text: str) -> int:
    async def give(rows: object) -> None:
        await anyio.lowlevel.checkpoint()

    request = EmbedRequest(inputs=(TextInput(text),))
    return await engine.stream(lambda: request, lambda places, result: result, give)


CALLS: list[Callable[[Engine, str], Any]] = [
    lambda engine, text: engine.embed(text),
    lambda engine, text: engine.embed(text, timeout_s=60),
    _stream,
]


@pytest.mark.parametrize("call", CALLS, ids=["embed", "embed with a time limit", "stream"])
@pytest.mark.parametrize("allowed_s", [-1.0, 0.0, 0.001, FORWARD_S / 2])
async def test_a_scope_that_ends_too_soon_moves_on(call: Callable[[Engine, str], Any], allowed_s: float) -> None:
    async with slow_engine() as engine, anyio.create_task_group() as others:
        for number in range(3):
            others.start_soon(engine.embed, f"beside it {number}")
        for _ in range(3):
            with anyio.move_on_after(allowed_s) as scope:
                await call(engine, "moves on")
                scope.cancel()  # it was quick enough, which is no fault
            assert scope.cancel_called


@pytest.mark.parametrize("allowed_s", [0.0, 0.001, FORWARD_S / 2])
async def test_fail_after_raises_its_own_error(allowed_s: float) -> None:
    async with held_engine() as (engine, _):
        with pytest.raises(TimeoutError) as caught, anyio.fail_after(allowed_s):
            await engine.embed("late")
        assert not isinstance(caught.value, DeadlineExceeded)


async def test_the_inner_of_two_scopes_moves_on_and_the_outer_goes_on() -> None:
    async with held_engine() as (engine, gate):
        with anyio.fail_after(60):
            with anyio.move_on_after(0.002) as inner:
                await engine.embed("late")
            gate.open()
            result = await engine.embed("in time")
    assert inner.cancelled_caught
    assert_array_equal(result.embeddings, [expected("in time")])


async def test_the_outer_of_two_scopes_cancels_through_the_inner_one() -> None:
    async with held_engine() as (engine, _):
        with anyio.move_on_after(0.002) as outer:
            with anyio.move_on_after(60) as inner:
                await engine.embed("late")
        assert outer.cancelled_caught
        assert not inner.cancelled_caught


async def test_a_shielded_call_is_answered_whatever_the_scope_around_it() -> None:
    async with slow_engine() as engine:
        with anyio.move_on_after(0.001) as outer:
            with anyio.CancelScope(shield=True):
                result = await engine.embed("shielded")
            await anyio.sleep_forever()  # which the scope ends
        assert outer.cancelled_caught
    assert_array_equal(result.embeddings, [expected("shielded")])


async def test_a_time_limit_that_is_shorter_than_the_scope_raises() -> None:
    async with held_engine() as (engine, _):
        with anyio.fail_after(60), pytest.raises(DeadlineExceeded):
            await engine.embed("late", timeout_s=0.002)


async def test_a_time_limit_that_is_longer_than_the_scope_does_not_raise() -> None:
    async with held_engine() as (engine, _):
        with anyio.move_on_after(0.002) as scope:
            await engine.embed("late", timeout_s=60)
        assert scope.cancelled_caught


async def test_the_loops_own_scopes_move_on_too() -> None:
    async with held_engine() as (engine, _):
        for allowed_s in (0.0, 0.001, FORWARD_S / 2):
            if sniffio.current_async_library() == "trio":
                with trio.move_on_after(allowed_s) as scope:
                    await engine.embed("late")
                assert scope.cancelled_caught
            else:
                with pytest.raises(TimeoutError) as caught:
                    async with asyncio.timeout(allowed_s):
                        await engine.embed("late")
                assert not isinstance(caught.value, DeadlineExceeded)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(engine.embed("late"), allowed_s)


async def test_the_scopes_of_many_tasks_end_each_their_own_call() -> None:
    outcomes: dict[int, str] = {}

    async def ask(engine: Engine, number: int) -> None:
        with anyio.move_on_after(math.inf if number % 2 else 0.002):
            await engine.embed(f"{number}")
            outcomes[number] = "answered"
        outcomes.setdefault(number, "moved on")

    async with slow_engine() as engine, anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(ask, engine, number)
    assert all(outcomes[number] == "answered" for number in range(1, 20, 2))
    assert len(outcomes) == 20


async def test_work_that_the_scope_leaves_no_time_for_is_dropped_early() -> None:
    async with held_engine() as (engine, _):
        with anyio.move_on_after(FORWARD_S / 10):
            await engine.embed("late")
        assert sum(engine.statistics().expired.values()) + sum(engine.statistics().cancelled.values()) == 1
        assert sum(stage.dropped["expired"] for stage in engine.statistics().stages) <= 1


async def test_a_scope_whose_deadline_is_moved_on_gets_its_answer() -> None:
    """The work was dropped for a deadline that no longer is one: it is done after all."""
    at_work = Gate()
    model = LetterModel(on_preprocess=at_work)
    async with engine_on(model, preprocess_limit=1) as engine, anyio.create_task_group() as tasks:
        results: list[Any] = []
        scope = anyio.CancelScope(deadline=anyio.current_time() + 60)

        async def ask() -> None:
            with scope:
                results.append(await engine.embed("patient"))

        tasks.start_soon(engine.embed, "first")
        await at_work.arrived()
        tasks.start_soon(ask)
        await until(lambda: engine.statistics().stages[0].done == 2)
        (ticket,) = (ticket for ticket in engine._requests.tickets if ticket.scope_ends_at < math.inf)
        ticket.expire("preprocess")  # as a stage does that predicts it
        scope.deadline = anyio.current_time() + 600
        at_work.open()
        await until(lambda: bool(results))
    assert_array_equal(results[0].embeddings, [expected("patient")])


async def test_tokenize_heeds_scopes_and_raises_nothing_of_its_own() -> None:
    at_work = Gate()
    async with engine_on(LetterModel(on_preprocess=at_work), preprocess_limit=1) as engine:
        with anyio.move_on_after(0) as scope:
            await engine.tokenize("late")
        assert scope.cancelled_caught
        at_work.open()
