"""The registry of a preparer: each request gets the best of the engines of its model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import msgspec
import pytest

pytest.importorskip("ray", reason="needs the extra `ray`")

from staged_pool.ray.registry import LineRegistry
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.front_desk import FrontDesk
from staged_pool.runtime.engine.spread_engine import SpreadEngine
from staged_pool.stages.errors import EngineStopped
from tests.servers.fronts import Joined, fronts_on
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def line_to(model: LetterModel) -> AsyncIterator[tuple[Engine, Joined, FrontDesk]]:
    """Run an engine process on a model, and a front engine before it."""
    async with fronts_on(model, EngineConfig(coalesce=False), engine_class=SpreadEngine) as parts:
        (engine,), _, desk, (front,) = parts
        yield engine, front, desk


async def test_a_request_goes_to_the_line_with_the_fewest() -> None:
    gates = [Gate(), Gate()]
    registry = LineRegistry()
    async with (
        line_to(LetterModel(on_forward=gates[0])) as (first, one, _),
        line_to(LetterModel(on_forward=gates[1])) as (second, two, _),
        anyio.create_task_group() as tasks,
    ):
        registry.join([first], one.line)
        registry.join([second], two.line)
        assert registry.engines == (first,)  # each model is named once
        tasks.start_soon(first.embed, "a text")
        await gates[0].arrived()
        assert registry.enter() is second
        tasks.start_soon(second.embed, "a text")
        await gates[1].arrived()
        tasks.start_soon(second.embed, "another one")
        await until(lambda: two.line.requests == 2)
        assert registry.enter() is first
        await until(lambda: registry.statistics()[first.card.name].admission.requests == 3)
        for gate in gates:
            gate.open()


async def test_an_engine_process_that_leaves_gets_no_request() -> None:
    registry = LineRegistry()
    async with line_to(LetterModel()) as (first, one, desk), line_to(LetterModel()) as (second, two, _):
        registry.join([first], one.line)
        registry.join([second], two.line)
        await desk.drain(10.0)
        await until(lambda: one.line.is_leaving)
        assert {registry.enter() for _ in range(20)} == {second}
        assert registry.not_ready == ""
        result = await first.embed("it comes too late")  # and goes to the other one
        assert result.dense is not None


async def test_statistics_of_many_lines_can_be_written() -> None:
    registry = LineRegistry()
    async with AsyncExitStack() as stack:
        for _ in range(5):
            engine, front, _ = await stack.enter_async_context(line_to(LetterModel()))
            registry.join([engine], front.line)
        written = msgspec.json.decode(msgspec.json.encode(registry.statistics()))
        limits = engine.statistics().admission
        assert written[engine.card.name]["admission"]["max_requests"] == limits.max_requests
        assert registry.load().report()["server_load"] == 0


async def test_the_last_engine_stays_known_and_a_new_one_takes_its_place() -> None:
    registry = LineRegistry()
    assert [registry.has_line] == [False]
    with pytest.raises(EngineStopped, match="loading the model"):
        registry.enter()
    async with line_to(LetterModel()) as (first, one, _):
        registry.join([first], one.line)
        await first.embed("a text")
        one.scope.cancel()
        await until(lambda: first.fault is not None)
        registry.part([first])
        assert [registry.has_line] == [False]
        assert "ended" in registry.unready()
        with pytest.raises(EngineStopped, match="the engine process has ended") as error:
            registry.enter()
        assert error.value.retry_after_s > 0
        async with line_to(LetterModel()) as (second, two, _):
            registry.join([second], two.line)
            assert (registry.has_line, registry.enter()) == (True, second)
            assert registry.engines == (second,)
            assert registry.unready() == ""
            assert list(registry.load().models) == [second.card.name]
