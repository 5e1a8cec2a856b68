"""A request that one engine process rejects or loses goes to another one."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, cast

import anyio
import numpy as np
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.spread_engine import TRIES, SpreadEngine
from staged_pool.runtime.requests import EmbedRequest, TextInput
from staged_pool.stages.errors import DeadlineExceeded, EngineStopped, InvalidInput, Overloaded
from tests.runtime.remote.test_fronts import at_rest, outcome
from tests.servers.fronts import Joined, fronts_on
from tests.support.deadlines import let_deadlines_pass
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def spread(
    models: Sequence[LetterModel], config: EngineConfig | None = None
) -> AsyncIterator[tuple[Sequence[Engine], Sequence[Joined]]]:
    """Run an engine process for each model, with one front each. All of them serve the same requests."""
    async with AsyncExitStack() as stack:
        parts = [
            await stack.enter_async_context(fronts_on(model, config, engine_class=SpreadEngine)) for model in models
        ]
        engines = [part[0][0] for part in parts]

        def elsewhere(tried: Sequence[Engine]) -> Engine | None:
            return next((each for each in engines if each not in tried and each.fault is None), None)

        for engine in engines:
            cast(SpreadEngine, engine).elsewhere = elsewhere
        yield engines, [part[3][0] for part in parts]
        for engine, part in zip(engines, parts, strict=True):
            await until(partial(at_rest, part[3][0], engine, part[1]))


async def test_a_rejected_request_goes_to_another_engine() -> None:
    gate = Gate()
    models = [LetterModel(on_forward=gate), LetterModel()]
    async with spread(models, EngineConfig(max_requests=1)) as (engines, _), anyio.create_task_group() as tasks:
        tasks.start_soon(engines[0].embed, "first")
        await gate.arrived()
        result = await engines[0].embed("second", normalize=False)
        assert np.array_equal(result.embeddings[0, :4], expected("second"))
        assert models[1].forwarded == [["second"]]
        gate.open()


async def test_a_request_is_rejected_when_all_engines_are_full() -> None:
    gates = [Gate(), Gate()]
    models = [LetterModel(on_forward=gate) for gate in gates]
    async with spread(models, EngineConfig(max_requests=1)) as (engines, _), anyio.create_task_group() as tasks:
        for engine, gate in zip(engines, gates, strict=True):
            tasks.start_soon(engine.embed, "first")
            await gate.arrived()
        with pytest.raises(Overloaded):
            await engines[0].embed("second")
        for gate in gates:
            gate.open()


async def test_a_request_of_an_engine_process_that_ends_is_computed_by_another_one() -> None:
    gate, outcomes = Gate(), list[Any]()
    models = [LetterModel(on_forward=gate), LetterModel()]
    async with spread(models) as (engines, fronts), anyio.create_task_group() as tasks:
        tasks.start_soon(outcome, engines[0].embed(["first", "second"], normalize=False), outcomes)
        await gate.arrived()
        fronts[0].scope.cancel()
        await until(lambda: bool(outcomes))
        assert np.array_equal(outcomes[0].embeddings[1, :4], expected("second"))
        gate.open()


async def test_a_body_that_can_be_read_once_is_enough_for_all_tries() -> None:
    gate, outcomes, body = Gate(), list[Any](), ["read me once"]
    models = [LetterModel(on_forward=gate), LetterModel()]

    def decode() -> EmbedRequest:
        return EmbedRequest(inputs=(TextInput(body.pop()),), normalize=False)

    async with spread(models) as (engines, fronts), anyio.create_task_group() as tasks:
        tasks.start_soon(outcome, engines[0].submit(decode, lambda made: made), outcomes)
        await gate.arrived()
        fronts[0].scope.cancel()
        await until(lambda: bool(outcomes))
        assert np.array_equal(outcomes[0].embeddings[0, :4], expected("read me once"))
        gate.open()


async def test_a_request_ends_no_more_engines_than_its_tries() -> None:
    gates = [Gate() for _ in range(TRIES + 1)]
    models, outcomes = [LetterModel(on_forward=gate) for gate in gates], list[Any]()
    async with spread(models) as (engines, fronts), anyio.create_task_group() as tasks:
        tasks.start_soon(outcome, engines[0].embed("poison"), outcomes)
        for gate, front in zip(gates[:TRIES], fronts, strict=False):
            await gate.arrived()
            front.scope.cancel()
        await until(lambda: bool(outcomes))
        assert isinstance(outcomes[0], EngineStopped)
        assert engines[TRIES].fault is None
        assert not models[TRIES].forwarded
        for gate in gates:
            gate.open()


async def test_an_error_of_the_request_itself_stays() -> None:
    models = [LetterModel(), LetterModel()]
    async with spread(models) as (engines, _):
        with pytest.raises(InvalidInput):
            await engines[0].embed([""])
        with pytest.raises(InvalidInput):
            await engines[0].embed("a", timeout_s=-math.inf)


async def test_the_deadline_holds_over_all_tries() -> None:
    gate, outcomes = Gate(), list[Any]()
    models = [LetterModel(on_forward=Gate()), LetterModel(on_forward=gate)]
    first = cast(Gate, models[0].on_forward)
    async with spread(models) as (engines, fronts), anyio.create_task_group() as tasks:
        tasks.start_soon(outcome, engines[0].embed("late", timeout_s=60.0), outcomes)
        await first.arrived()
        (ticket,) = engines[0]._requests.tickets
        await anyio.sleep(0.2)  # time that passes is the subject of the test
        fronts[0].scope.cancel()
        await gate.arrived()
        (again,) = engines[1]._requests.tickets
        assert again.deadline < ticket.deadline + 0.1, "the second engine gave the request all of its time again"
        let_deadlines_pass(engines[1])
        await until(lambda: bool(outcomes))
        assert isinstance(outcomes[0], DeadlineExceeded)
        first.open()
        gate.open()


async def test_a_stream_that_is_lost_is_not_repeated() -> None:
    gate, outcomes = Gate(), list[Any]()
    models = [LetterModel(on_forward=gate), LetterModel()]
    request = EmbedRequest(inputs=(TextInput("first"),))

    async def give(_: Any) -> None: ...

    async with spread(models) as (engines, fronts), anyio.create_task_group() as tasks:
        lost = engines[0].stream(lambda: request, lambda places, made: (places, made.dense), give)
        tasks.start_soon(outcome, lost, outcomes)
        await gate.arrived()
        fronts[0].scope.cancel()
        await until(lambda: bool(outcomes))
        assert isinstance(outcomes[0], EngineStopped)
        assert not models[1].forwarded
        gate.open()
