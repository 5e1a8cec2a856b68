"""The batch delay in a running engine: partial batches that wait, and those that do not."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import anyio
import pytest
from numpy.testing import assert_array_equal

from staged_pool.api.app.engine_metrics import device_families
from staged_pool.runtime.engine.engine import Engine
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.stage import StageOptions
from tests.runtime.images import engine_on
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Slow(LetterModel):
    """A model whose calls set the clock forward.

    Args:
        forward_s: Seconds of a forward, whatever its size.
        preprocess_s: Seconds of a call of preprocess.
    """

    def __init__(self, *, forward_s: float, preprocess_s: float) -> None:
        super().__init__(on_preprocess=self._in_preprocess, on_forward=self._in_forward)
        self.forward_s = forward_s
        self.preprocess_s = preprocess_s
        self.held: dict[str, threading.Event] = {}
        """Texts whose preparing does not end before the event is set."""
        self._ahead_s = 0.0

    def clock(self) -> float:
        return perf_counter() + self._ahead_s

    def _in_preprocess(self, texts: Sequence[str]) -> None:
        for text in texts:
            if text in self.held:
                assert self.held[text].wait(30)
                return
        self._ahead_s += self.preprocess_s

    def _in_forward(self, _: Sequence[str]) -> None:
        self._ahead_s += self.forward_s


@asynccontextmanager
async def beside_preparing(model: Slow, *preparing: str, **settings: Any) -> AsyncIterator[Engine]:
    """An engine that has learned its times, while other texts are being prepared."""
    settings = {"preprocess_limit": len(preparing) + 1, "chunk_items": 1, "target_delay_s": 86_400} | settings
    async with engine_on(model, options=StageOptions(clock=model.clock), **settings) as engine:
        for length in (1, 50, 1, 50):
            await engine.embed("x" * length)
        model.forwarded.clear()
        model.held = {text: threading.Event() for text in preparing}
        async with anyio.create_task_group() as tasks:
            for text in preparing:
                tasks.start_soon(_ask, engine, text)
            await until(lambda: engine._stages.preprocess["text"].preparing == len(preparing))
            yield engine
            for held in model.held.values():
                held.set()


async def _ask(engine: Engine, text: str) -> None:
    if text:
        await engine.embed(text)
    else:
        with pytest.raises(InvalidInput):
            await engine.embed(text)


def holds(engine: Engine) -> int:
    return engine.statistics().device.holds.get("coming", 0)


async def test_a_text_waits_for_another_that_is_almost_ready_where_a_forward_costs_more() -> None:
    model = Slow(forward_s=1000.0, preprocess_s=100.0)
    async with beside_preparing(model, "late") as engine, anyio.create_task_group() as tasks:
        assert holds(engine) == 0
        tasks.start_soon(engine.embed, "early")
        await until(lambda: holds(engine) > 0)
        assert model.forwarded == []
        model.held["late"].set()
    assert [sorted(texts) for texts in model.forwarded] == [["early", "late"]]


async def test_it_does_not_wait_for_what_turns_out_to_be_bad() -> None:
    model = Slow(forward_s=1000.0, preprocess_s=100.0)
    async with beside_preparing(model, "") as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.embed, "early")
        await until(lambda: holds(engine) > 0)
        model.held[""].set()
    assert model.forwarded == [["early"]]


@pytest.mark.parametrize(
    ("forward_s", "preprocess_s"), [pytest.param(1.0, 100.0, id="it is dear"), pytest.param(0.0, 100.0, id="no gain")]
)
async def test_nothing_waits_for_what_takes_longer_than_the_forward_that_it_spares(
    forward_s: float, preprocess_s: float
) -> None:
    model = Slow(forward_s=forward_s, preprocess_s=preprocess_s)
    async with beside_preparing(model, "late") as engine:
        assert_array_equal((await engine.embed("early")).embeddings, [expected("early")])
        assert model.forwarded == [["early"]]
        assert holds(engine) == 0


async def test_a_wait_ends_when_what_was_coming_takes_longer_than_was_thought() -> None:
    model = Slow(forward_s=1000.0, preprocess_s=0.2)
    async with beside_preparing(model, "late") as engine:
        assert_array_equal((await engine.embed("early")).embeddings, [expected("early")])
        assert model.forwarded == [["early"]]
        assert holds(engine) > 0


async def test_where_another_slot_is_free_nothing_waits() -> None:
    model = Slow(forward_s=1000.0, preprocess_s=100.0)
    model.card = replace(model.card, forward_workers=2)
    async with beside_preparing(model, "late") as engine:
        await engine.embed("early")
        assert holds(engine) == 0


async def test_holds_are_counted_by_their_reason_and_shown() -> None:
    model = Slow(forward_s=1000.0, preprocess_s=100.0)
    async with beside_preparing(model, "late") as engine, anyio.create_task_group() as tasks:
        empty = engine.statistics().device.holds["empty"]
        tasks.start_soon(engine.embed, "early")
        await until(lambda: holds(engine) > 0)
        model.held["late"].set()
        await until(lambda: engine.statistics().device.holds["empty"] > empty)
        counted = {family.name: family.samples for family in device_families(engine.statistics().device)}
        assert {sample.labels["reason"]: sample.value for sample in counted["staged_pool_holds"]} == {
            "cores": 0,
            **engine.statistics().device.holds,
        }
