"""Recovery after faults: batches grow again, and an idle engine is late for nobody."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest
from numpy.testing import assert_array_equal

from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.requests import EmbedRequest, TextInput
from staged_pool.stages.errors import OutOfMemory
from staged_pool.stages.stage import StageOptions
from tests.runtime.images import engine_on
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.stages import batch_stages
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

FULL = 16
"""Texts of four letters in a batch of 64 tokens."""


def good(batches: int) -> list[str]:
    return [f"{number:04}" for number in range(FULL * batches)]


async def largest(engine: Engine, model: LetterModel) -> int:
    """Texts in the largest batch of a request that is good for several full ones."""
    model.forwarded.clear()
    await engine.embed(good(6))
    return max(map(len, model.forwarded))


async def test_an_input_that_has_no_memory_alone_makes_no_batch_smaller() -> None:
    def allocate(texts: Sequence[str]) -> None:
        if "huge" in texts:
            raise OutOfMemory("no room")

    model = LetterModel(on_forward=allocate)
    async with engine_on(model, max_batch_tokens=4 * FULL) as engine:
        assert await largest(engine, model) == FULL
        for _ in range(3):
            with pytest.raises(OutOfMemory):
                await engine.embed([*good(1)[:5], "huge", *good(1)[6:]])
            assert await largest(engine, model) == FULL
        assert engine.statistics().device.budget_tokens == {"text": 4 * FULL}


async def test_batches_are_as_large_as_before_fifty_good_ones_after_the_device_had_no_memory() -> None:
    taken_by_others = False

    def allocate(texts: Sequence[str]) -> None:
        if taken_by_others and len(texts) > 1:
            raise OutOfMemory("no room")

    model = LetterModel(on_forward=allocate)
    async with engine_on(model, max_batch_tokens=4 * FULL) as engine:
        assert await largest(engine, model) == FULL
        taken_by_others = True
        for _ in range(3):
            result = await engine.embed(good(2))
            assert_array_equal(result.embeddings, [expected(text) for text in good(2)])
        assert engine.statistics().device.budget_tokens["text"] <= FULL
        taken_by_others = False
        assert await largest(engine, model) < FULL
        batches = sum(engine.statistics().device.batches.values())
        while sum(engine.statistics().device.batches.values()) < batches + 50:
            await engine.embed(good(4))
        assert await largest(engine, model) == FULL


async def test_equal_texts_weigh_what_they_cost_and_a_burst_leaves_no_lag_behind() -> None:
    """Twenty requests of 600 equal texts each are twenty texts of work together."""
    now = 0.0
    gate: Gate | None = None

    def compute(texts: Sequence[str]) -> None:
        nonlocal now
        if gate is not None:
            gate()
        now += 0.001 * sum(map(len, texts))  # a tenth of a second for a text of a hundred letters

    async def ask(text: str) -> None:
        request = EmbedRequest(inputs=(TextInput(text),) * 600)
        await engine.submit(lambda: request, lambda result: result, body_bytes=600 * len(text))

    options = StageOptions(clock=lambda: now)
    model = LetterModel(on_forward=compute)
    async with engine_on(model, options=options, target_delay_s=5.0) as engine:
        for number in range(40):
            await ask(f"{number:0100}")  # it learns how little bodies like these cost
        gate = Gate()
        async with anyio.create_task_group() as burst:
            for number in range(20):
                burst.start_soon(ask, f"{number:b>100}")
            await gate.arrived()
            await until(lambda: engine.statistics().admission.requests == 20)
            gate.open()
        admission = engine.statistics().admission
        assert (admission.refused, admission.requests, admission.lag_s) == ({}, 0, 0)
        device = engine.statistics().device
        assert device.coalesced_items > 9 * device.items  # at the least those that were prepared together


async def test_an_idle_engine_is_late_for_nobody_whatever_was_before() -> None:
    now = 0.0
    gate = Gate()
    options = StageOptions(clock=lambda: now)
    async with engine_on(LetterModel(on_preprocess=gate), options=options, target_delay_s=5.0) as engine:
        async with anyio.create_task_group() as burst:
            for number in range(50):
                burst.start_soon(engine.embed, f"text {number}")
            await gate.arrived()
            await until(lambda: engine.statistics().admission.requests == 50)
            now += 100.0
            gate.open()
            await until(lambda: engine.statistics().admission.requests == 0)
        assert engine.statistics().admission.lag_s == 0
        async with anyio.create_task_group() as callers:
            for number in range(3):
                callers.start_soon(engine.embed, f"next {number}")
        assert engine.statistics().admission.refused == {}


async def test_items_of_callers_who_left_do_not_pile_up_behind_a_device_that_hangs() -> None:
    gate, most = Gate(), 0
    async with engine_on(LetterModel(on_forward=gate), waiting_tokens=20) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.embed, "ab")
        await gate.arrived()
        batch, to_batch = batch_stages(engine)["text"], engine._stages.channels[2]
        for number in range(60):
            async with anyio.create_task_group() as caller:
                caller.start_soon(engine.embed, f"{number:02}")
                prepared = number + 2  # with the first one
                await until(lambda: engine.statistics().stages[1].done == prepared and not to_batch.waiting)  # noqa: B023
                caller.cancel_scope.cancel()
            most = max(most, batch._queue.waiting.tokens)
        gate.open()
    assert 0 < most <= 2 * 20


async def test_lists_of_callers_who_left_do_not_pile_up_in_front_of_a_preprocess_that_hangs() -> None:
    gate = Gate()
    model = LetterModel(on_preprocess=gate)
    async with engine_on(model, preprocess_limit=1, chunk_items=1, channel_capacity=1) as engine:
        feed = engine._stages.feeds["text"]
        async with anyio.create_task_group() as tasks:
            for number in range(4):  # one in the thread, and one in the channel, at least
                tasks.start_soon(engine.embed, f"first {number}")
            await gate.arrived()
            await until(lambda: len(feed._queue) == 2)  # all of the others
            stay = len(feed._queue)
            for number in range(20):
                async with anyio.create_task_group() as caller:
                    caller.start_soon(engine.embed, f"{number:02}")
                    await until(lambda: len(feed._queue) > stay)
                    caller.cancel_scope.cancel()
                await until(lambda: len(feed._queue) == stay)
            assert len(feed._queue) == stay
            gate.open()
