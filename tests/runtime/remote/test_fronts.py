"""Fronts and the engine process: requests cross the line, and nothing is lost on it."""

from __future__ import annotations

import math
import socket
from collections.abc import Awaitable
from functools import partial
from itertools import chain
from typing import Any

import anyio
import numpy as np
import pytest

from staged_pool.runtime.admission.accounting import Arriving
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.device_engine import DeviceEngine
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.front_desk import FrontDesk
from staged_pool.runtime.remote import messages
from staged_pool.runtime.remote.line import BEAT_S, SILENT_S
from staged_pool.runtime.remote.port import IN_FRAME_BYTES, RING_BYTES, Port
from staged_pool.runtime.requests import EmbedRequest, Image, TextInput
from staged_pool.stages.errors import (
    DeadlineExceeded,
    EngineStopped,
    InvalidInput,
    ModelFailed,
    Overloaded,
    StagedPoolError,
)
from staged_pool.stages.unix_stream import UnixStream
from tests.runtime.remote.test_garbage import HELLO, admit, data, say
from tests.servers.fronts import Joined, device_engine_on, fronts_on, join, terms_of
from tests.support.cards import BOTH_LANES
from tests.support.deadlines import LATER_S, let_deadlines_pass
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_requests_of_two_fronts_share_one_device_and_get_their_own_rows() -> None:
    model = LetterModel()
    async with fronts_on(model, fronts=2) as (engines, device, _, _):
        results = {}

        async def ask(front: int, text: str) -> None:
            results[front, text] = (await engines[front].embed([text, text[::-1]], normalize=False)).embeddings

        async with anyio.create_task_group() as tasks:
            for place in range(40):
                for front in range(2):
                    tasks.start_soon(ask, front, f"text {front} of {place}")
        for (_, text), vectors in results.items():
            assert np.array_equal(vectors[0], expected(text)) or np.array_equal(vectors[0, :4], expected(text))
            assert np.array_equal(vectors[1, :4], expected(text[::-1])[:4])
        assert len(results) == 80
        await until(lambda: device.statistics().admission.requests == 0)
        assert device.statistics().admission.tokens == 0
        assert not any(device.admission.in_flight.fed.values())


async def test_silence_of_the_engine_process_is_counted_in_beats_and_a_freeze_of_the_front_is_none() -> None:
    async with fronts_on(LetterModel()) as (engines, _, desk, (front,)):
        line, clock = front.line, front.line._clock
        line._clock = lambda: clock() + 1000.0  # it has stood still
        seen = list[str | None]()
        for _ in range(round(SILENT_S / BEAT_S) + 1):
            line.beat()
            seen.append(engines[0].stall)
        assert seen == [None, None, "the engine process has said nothing for 1.5 s"]
        desk.tell_states()
        await until(lambda: not engines[0].stall)


def at_rest(front: Joined, engine: Engine, device: DeviceEngine) -> bool:
    """Return True if both accounts of a front are empty."""
    admissions = engine.statistics().admission, device.statistics().admission
    stages = [stage for model in front.line.models for stage in model._lanes.values()]
    return not (
        any(each.requests or each.tokens for each in admissions)
        or any(device.admission.in_flight.fed.values())
        or any(engine._admission.in_flight.fed.values())
        or device.requests.open
        or device.entrance.waiting
        or any(stage.waiting or stage.pending_tokens or stage.credit.waiting for stage in stages)
        or any(model._numbers for model in front.line.models)
        or front.line._requests
        or front.line.is_asked
    )


async def outcome(call: Awaitable[Any], outcomes: list[Any]) -> None:
    try:
        outcomes.append(await call)
    except StagedPoolError as error:
        outcomes.append(error)


async def test_a_request_that_leaves_in_any_place_leaves_nothing() -> None:
    """On the device, in its queue, and on their way to it: there is one credit."""
    gate = Gate()
    model = LetterModel(on_forward=gate)
    config = EngineConfig(channel_capacity=1, max_batch_items=1, coalesce=False)
    async with fronts_on(model, config, fronts=2) as (engines, device, _, joined):
        async with anyio.create_task_group() as leaving:
            leaving.start_soon(engines[0].embed, "first")
            await gate.arrived()
            for place in range(40):
                leaving.start_soon(engines[0].embed, [f"text {place}"] * 3)
            stage = joined[0].line.models[0].lane("text")
            await until(lambda: stage.waiting >= 3 and device.statistics().admission.requests == 41)
            leaving.cancel_scope.cancel()
        await until(lambda: at_rest(joined[0], engines[0], device))
        gate.open()
        assert (await engines[1].embed("b")).dense is not None
        await until(lambda: at_rest(joined[1], engines[1], device))
        assert sum(map(len, model.forwarded)) <= 3, "work of requests that left was done"


async def test_a_request_that_waits_to_enter_may_leave() -> None:
    gate = Gate()
    async with fronts_on(LetterModel(on_forward=gate), EngineConfig(max_requests=1), fronts=2) as (
        engines,
        device,
        _,
        joined,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engines[0].embed, "first")
            await gate.arrived()
            async with anyio.create_task_group() as leaving:
                request = EmbedRequest(inputs=(TextInput("second"),))
                leaving.start_soon(partial(engines[1].submit, lambda: request, lambda made: made, waits=True))
                await until(lambda: device.entrance.waiting == 1)
                leaving.cancel_scope.cancel()
            await until(lambda: device.entrance.waiting == 0)
            gate.open()
        await until(lambda: all(at_rest(*each, device) for each in zip(joined, engines, strict=True)))


async def test_the_engine_process_counts_a_request_that_was_let_in_a_moment_ago() -> None:
    outcomes: list[Any] = []
    async with fronts_on(LetterModel(), EngineConfig(max_requests=1)) as ((engine,), device, _, (front,)):
        earlier = device.entrance.enter_nowait(Arriving(1))
        async with anyio.create_task_group() as tasks:
            request = EmbedRequest(inputs=(TextInput("second"),))
            tasks.start_soon(outcome, engine.submit(lambda: request, lambda made: made, waits=True), outcomes)
            await until(lambda: device.entrance.waiting == 1)
            device.entrance.leave(earlier)
            assert device.requests.any(), "a drain would find nothing to wait for"
        assert outcomes[0].dense is not None
        await until(lambda: at_rest(front, engine, device) and not device.requests.any())


async def test_one_account_rejects_the_requests_of_all_fronts() -> None:
    gate = Gate()
    async with fronts_on(LetterModel(on_forward=gate), EngineConfig(max_requests=1), fronts=2) as (engines, _, _, _):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engines[0].embed, "first")
            await gate.arrived()
            with pytest.raises(Overloaded, match="limit of 1 requests") as full:
                await engines[1].embed("second")
            assert full.value.retry_after_s >= 0
            gate.open()


async def test_errors_name_the_input_of_the_caller() -> None:
    async with fronts_on(LetterModel()) as (engines, device, _, joined):
        with pytest.raises(ModelFailed) as failed:
            await engines[0].embed(["a", "NaN", "b"])
        assert failed.value.index == 1
        with pytest.raises(InvalidInput) as wrong:
            await engines[0].embed(["a", "b", ""])
        assert (wrong.value.index, wrong.value.param) == (2, "input")
        await until(lambda: at_rest(joined[0], engines[0], device))


async def test_a_deadline_names_the_stage() -> None:
    gate = Gate()
    async with fronts_on(LetterModel(on_forward=gate)) as (engines, device, _, joined):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engines[0].embed, "first")
            await gate.arrived()
            outcomes: list[Any] = []
            tasks.start_soon(outcome, engines[0].embed("second", timeout_s=LATER_S), outcomes)
            await until(lambda: device.stages.batch["text"].waiting == 1)
            let_deadlines_pass(engines[0])
            await until(lambda: bool(outcomes))
            assert isinstance(outcomes[0], DeadlineExceeded)
            assert outcomes[0].stage == "batch"
            gate.open()
        await until(lambda: at_rest(joined[0], engines[0], device))


async def test_equal_inputs_of_two_fronts_are_computed_once_within_their_scope() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    config = EngineConfig(result_cache_mb=1)
    async with fronts_on(model, config, fronts=2) as (engines, device, _, _):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engines[0].embed, "first")
            await gate.arrived()
            for engine in engines:
                tasks.start_soon(engine.embed, "same")
                tasks.start_soon(partial(engine.embed, "same", cache_salt="pepper"))
                tasks.start_soon(partial(engine.embed, "same", tenant="a"))
            await until(lambda: device.stages.batch["text"].waiting == 6)
            gate.open()
        assert sorted(chain(*model.forwarded)) == ["first", "same", "same", "same"]
        await engines[0].embed("same")
        await engines[1].embed("same", cache_salt="pepper")
        assert len(list(chain(*model.forwarded))) == 4
        await engines[1].embed("same", cache_salt="salt")
        assert len(list(chain(*model.forwarded))) == 5


async def test_the_end_of_a_front_ends_its_work_alone() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    config = EngineConfig(channel_capacity=1, max_batch_items=1, coalesce=False)
    outcomes: list[Any] = []
    async with fronts_on(model, config, fronts=2) as (engines, device, _, joined):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outcome, engines[1].embed("other"), outcomes)
            await gate.arrived()
            lost: list[Any] = []
            for place in range(20):
                tasks.start_soon(outcome, engines[0].embed([f"text {place}"] * 3), lost)
            await until(lambda: device.statistics().admission.requests == 21)
            joined[0].scope.cancel()
            await until(lambda: device.statistics().admission.requests == 1 and len(lost) == 20)
            assert all(isinstance(error, EngineStopped) and error.retry_after_s > 0 for error in lost)
            assert "ended" in str(engines[0].fault)
            with pytest.raises(EngineStopped):
                await engines[0].embed("nobody computes it")
            gate.open()
        assert np.array_equal(outcomes[0].dense[0], expected("other"))
        assert sum(map(len, model.forwarded)) <= 3
        await until(lambda: all(at_rest(*each, device) for each in zip(joined, engines, strict=True)))


async def test_a_new_engine_process_serves_the_fronts_of_the_old_one() -> None:
    hold, gate = Gate(), Gate()
    model, config, outcomes = LetterModel(on_forward=gate), EngineConfig(coalesce=False), list[Any]()
    prepares = LetterModel(on_preprocess=lambda texts: hold() if "held" in texts else None)
    async with (
        anyio.create_task_group() as tasks,
        fronts_on(model, config, front_model=prepares) as (
            (engine,),
            _,
            desk,
            (front,),
        ),
    ):
        tasks.start_soon(outcome, engine.embed("on the device"), outcomes)
        await gate.arrived()
        tasks.start_soon(outcome, engine.embed("held"), outcomes)
        await hold.arrived()
        front.scope.cancel()
        await until(lambda: len(outcomes) == 2)
        assert all(isinstance(error, EngineStopped) for error in outcomes)
        gate.open()
        second, new_desk = LetterModel(), FrontDesk()
        async with device_engine_on(second, config, new_desk) as new_device:
            new_desk.add(new_device, desk._terms[0])
            await until(lambda: len(front.ends) == 1)
            await join(tasks, new_desk, front)
            assert engine.fault is None
            hold.open()
            assert (await engine.embed("again")).dense is not None
            await until(lambda: at_rest(front, engine, new_device))
            assert second.forwarded == [["again"]]
            front.scope.cancel()
            await until(lambda: len(front.ends) == 2)


async def test_a_request_waits_for_an_engine_process_that_comes_back_in_time() -> None:
    model, config, outcomes = LetterModel(), EngineConfig(), list[Any]()
    async with (
        anyio.create_task_group() as tasks,
        fronts_on(model, config, patience_s=math.inf) as ((engine,), _, desk, (front,)),
    ):
        front.scope.cancel()
        await until(lambda: len(front.ends) == 1)
        tasks.start_soon(outcome, engine.embed("meanwhile"), outcomes)
        with pytest.raises(EngineStopped):
            await engine.embed("in a hurry", timeout_s=0.001)
        new_desk = FrontDesk()
        async with device_engine_on(LetterModel(), config, new_desk) as new_device:
            new_desk.add(new_device, desk._terms[0])
            assert not outcomes
            await join(tasks, new_desk, front)
            await until(lambda: bool(outcomes))
            assert np.array_equal(outcomes[0].dense[0], expected("meanwhile"))
            front.scope.cancel()
            await until(lambda: len(front.ends) == 2)


async def test_a_request_also_waits_past_an_engine_process_that_dies_before_it_serves() -> None:
    config, outcomes = EngineConfig(), list[Any]()
    async with (
        anyio.create_task_group() as tasks,
        fronts_on(LetterModel(), config, patience_s=math.inf) as ((engine,), _, desk, (front,)),
    ):
        front.scope.cancel()
        await until(lambda: len(front.ends) == 1)
        tasks.start_soon(outcome, engine.embed("meanwhile"), outcomes)
        await anyio.wait_all_tasks_blocked()
        ours, theirs = socket.socketpair()
        theirs.close()
        await front.line.run(UnixStream(ours), None)
        new_desk = FrontDesk()
        async with device_engine_on(LetterModel(), config, new_desk) as new_device:
            new_desk.add(new_device, desk._terms[0])
            await join(tasks, new_desk, front)
            await until(lambda: bool(outcomes))
            assert np.array_equal(outcomes[0].dense[0], expected("meanwhile"))
            front.scope.cancel()
            await until(lambda: len(front.ends) == 2)


async def test_a_request_let_in_as_its_front_leaves_gives_its_place_back() -> None:
    """Both messages come at once, and there is room: it is let in before it notices that it has left."""
    config, desk = EngineConfig(max_requests=1), FrontDesk()
    model = LetterModel()
    async with device_engine_on(model, config, desk) as device:
        desk.add(device, terms_of(model, config))
        leave = data(messages.Leave(1, answered=False, elsewhere_s=0.0, rejected=False))
        assert "closed it" in await say(desk, HELLO + admit(waits=True) + leave)
        assert device.statistics().admission.admitted == 1
        assert device.statistics().admission.requests == 0


@pytest.mark.parametrize("ring_bytes", [RING_BYTES, 2 * IN_FRAME_BYTES, 0], ids=["ring", "full", "none"])
async def test_large_images_keep_their_pixels(ring_bytes: int) -> None:
    """Through rings, and through the frame where a ring is full or missing."""
    read: list[str] = []
    model = LetterModel(card=BOTH_LANES, on_forward=read.extend)
    images = [chr(97 + place) * (IN_FRAME_BYTES + 1 + place) for place in range(6)]
    async with fronts_on(model, fronts=2, ring_bytes=ring_bytes) as (engines, device, desk, joined):
        async with anyio.create_task_group() as tasks:
            for engine in engines:
                tasks.start_soon(engine.embed, [Image(image.encode()) for image in images])
        assert set(read) == set(images)
        await until(lambda: all(at_rest(*each, device) for each in zip(joined, engines, strict=True)))
        lines = [front.line._port for front in joined]

        def all_given_back() -> bool:
            desk.tell_states()  # blocks are given back with messages, which the engine process sends all the time
            return all(line is not None and not _used(line) for line in lines)

        await until(all_given_back)


def _used(line: Port) -> int:
    return line._writer.used_bytes if line._writer is not None else 0


async def test_a_front_streams_and_tokenizes() -> None:
    async with fronts_on(LetterModel()) as ((engine,), device, _, (front,)):
        request = EmbedRequest(inputs=tuple(TextInput(text) for text in ("ab", "c", "def")), normalize=False)
        given: dict[int, Any] = {}

        async def give(some: Any) -> None:
            given.update(zip(*some, strict=True))

        tokens = await engine.stream(lambda: request, lambda places, made: (places, made.dense), give)
        assert tokens == 6
        assert [given[place].tolist() for place in range(3)] == [expected(text).tolist() for text in ("ab", "c", "def")]
        assert (await engine.tokenize("abc")).ids == [97, 98, 99]
        assert np.array_equal(await engine.encode(["ab"]), [expected("ab")])
        await until(lambda: at_rest(front, engine, device))


async def test_a_draining_front_rejects_those_that_wait_to_enter() -> None:
    gate, outcomes = Gate(), list[Any]()
    async with fronts_on(LetterModel(on_forward=gate), EngineConfig(max_requests=1), fronts=2) as (
        engines,
        device,
        _,
        _,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engines[0].embed, "first")
            await gate.arrived()
            request = EmbedRequest(inputs=(TextInput("second"),))
            call = engines[1].submit(lambda: request, lambda made: made, waits=True)
            tasks.start_soon(outcome, call, outcomes)
            await until(lambda: device.entrance.waiting == 1)
            await engines[1].drain(10)
            await until(lambda: len(outcomes) == 1 and device.entrance.waiting == 0)
            assert isinstance(outcomes[0], EngineStopped)
            gate.open()


async def test_a_front_empties_the_caches_of_all_processes() -> None:
    model = LetterModel()
    async with fronts_on(model, EngineConfig(result_cache_mb=1), fronts=2) as (engines, device, _, _):
        for engine in engines:
            await engine.embed("again")
        assert model.forwarded == [["again"]]
        engines[0].clear_result_cache()
        await until(lambda: device.statistics().result_cache.entries == 0)  # type: ignore[union-attr]
        await engines[1].embed("again")
        assert model.forwarded == [["again"], ["again"]]
