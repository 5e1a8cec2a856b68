"""Inputs that are the same, in flight at the same time: one forward for all who asked, and one outcome for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest
from numpy.testing import assert_array_equal

from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.results import EmbedResult
from staged_pool.stages.errors import (
    DeadlineExceeded,
    EngineStopped,
    InvalidInput,
    ModelFailed,
    StagedPoolError,
    StageFailed,
)
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.supervise import RestartPolicy
from tests.runtime.images import engine_on
from tests.support.cards import CARD
from tests.support.deadlines import LATER_S, let_deadlines_pass
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.stages import batch_stages
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Callers:
    """Runs requests concurrently, and keeps each outcome by the name of its request."""

    def __init__(self, engine: Engine, tasks: anyio.abc.TaskGroup) -> None:
        self.outcomes: dict[str, EmbedResult | StagedPoolError] = {}
        self.scopes: dict[str, anyio.CancelScope] = {}
        self._engine = engine
        self._tasks = tasks

    def ask(self, name: str, *texts: str, **settings: Any) -> None:
        async def asking() -> None:
            with anyio.CancelScope() as self.scopes[name]:
                try:
                    self.outcomes[name] = await self._engine.embed(texts, **settings)
                except StagedPoolError as error:
                    self.outcomes[name] = error

        self._tasks.start_soon(asking)

    async def waiting(self, items: int) -> None:
        """Wait until `items` items wait for the device, or for the row of another item."""
        await until(lambda: batch_stages(self._engine)["text"].waiting == items)

    def result(self, name: str) -> EmbedResult:
        outcome = self.outcomes[name]
        assert isinstance(outcome, EmbedResult)
        return outcome


@asynccontextmanager
async def busy_engine(model: LetterModel, gate: Gate, **settings: Any) -> AsyncIterator[tuple[Engine, Callers]]:
    """An engine whose device is held up by a text of its own."""
    async with engine_on(model, **settings) as engine, anyio.create_task_group() as tasks:
        callers = Callers(engine, tasks)
        callers.ask("first", "busy")
        await gate.arrived()
        yield engine, callers


async def test_inputs_that_are_the_same_go_through_the_device_once() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with busy_engine(model, gate) as (engine, callers):
        callers.ask("one", "same", "else")
        callers.ask("two", "same", "same", "busy")
        await callers.waiting(4 + 1)  # and one that waits for the device's answer
        admission = engine.statistics().admission
        assert (admission.items, admission.tokens) == (6, 12), (
            "those that follow have no tokens on the way to the device"
        )
        gate.open()
    assert sorted(text for texts in model.forwarded for text in texts) == ["busy", "else", "same"]
    assert_array_equal(callers.result("one").embeddings, [expected("same"), expected("else")])
    assert_array_equal(callers.result("two").embeddings, [expected("same"), expected("same"), expected("busy")])
    assert callers.result("two").usage.prompt_tokens == 12, "who asks is told what it asked for"
    device = engine.statistics().device
    assert (device.items, device.coalesced_items, device.tokens) == (3, 3, 12)


async def test_without_coalescing_each_input_goes_through_the_device() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with busy_engine(model, gate, coalesce=False) as (engine, callers):
        callers.ask("one", "same", "same")
        await callers.waiting(2)
        gate.open()
    assert model.forwarded == [["busy"], ["same", "same"]]
    assert engine.statistics().device.coalesced_items == 0


@pytest.mark.parametrize(
    ("settings", "asked", "forwards"),
    [
        ({}, [{"tenant": "a"}, {"tenant": "b"}, {"tenant": None}, {"tenant": "a"}], 3),
        ({}, [{"tenant": ("a", 1)}, {"tenant": ("a", 1)}, {"tenant": ("a", 2)}], 2),
        ({}, [{"cache_salt": "x"}, {"cache_salt": "y"}, {}, {"cache_salt": "x"}], 3),
        ({}, [{"tenant": "a", "cache_salt": "x"}, {"tenant": "b", "cache_salt": "x"}], 2),
        ({}, [{"tenant": "a", "cache_salt": "b"}, {"tenant": "b", "cache_salt": "a"}], 2),
        ({"share_between_tenants": True}, [{"tenant": "a"}, {"tenant": "b"}, {}, {"tenant": "b"}], 3),
        ({"share_between_tenants": True}, [{"tenant": "a", "cache_salt": "x"}, {"tenant": "a"}], 2),
        ({}, [{"priority": Priority.BULK}, {"priority": Priority.INTERACTIVE}, {"priority": Priority.BULK}], 2),
    ],
)
async def test_tenants_salts_and_priorities_share_no_forward(
    settings: dict[str, Any], asked: list[dict[str, Any]], forwards: int
) -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with busy_engine(model, gate, **settings) as (_, callers):
        for number, each in enumerate(asked):
            callers.ask(str(number), "same", **each)
        await callers.waiting(len(asked))
        gate.open()
    assert sorted(text for texts in model.forwarded[1:] for text in texts) == ["same"] * forwards
    for number in range(len(asked)):
        assert_array_equal(callers.result(str(number)).embeddings, [expected("same")])


@pytest.mark.parametrize("salt", ["", "x" * 1025, 5, b"x", ["x"]])
async def test_a_salt_is_a_text_that_is_not_empty(salt: Any) -> None:
    async with engine_on(LetterModel()) as engine:
        calls: list[Awaitable[object]] = [
            engine.embed("a", cache_salt=salt),
            engine.classify("a", cache_salt=salt),
            engine.classify_tokens("a", cache_salt=salt),
            engine.score("a", "b", cache_salt=salt),
            engine.rerank("a", ["b"], cache_salt=salt),
        ]
        for call in calls:
            with pytest.raises(InvalidInput, match="cache_salt must be a text of 1 to 1024 characters") as caught:
                await call
            assert caught.value.param == "cache_salt"


async def test_it_is_what_the_model_reads_that_is_the_same_or_not() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with busy_engine(model, gate) as (_, callers):
        callers.ask("plain", "same")
        callers.ask("prompted", "same", prompt="a ")
        callers.ask("written out", "a same", prompt="")
        await callers.waiting(3)
        gate.open()
    assert sorted(text for texts in model.forwarded[1:] for text in texts) == ["a same", "same"]


async def test_what_is_made_of_the_row_afterwards_does_not_matter() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with busy_engine(model, gate) as (_, callers):
        callers.ask("whole", "same")
        callers.ask("cut", "same", dimensions=2)
        await callers.waiting(2)
        gate.open()
    assert model.forwarded == [["busy"], ["same"]]
    assert_array_equal(callers.result("cut").embeddings, callers.result("whole").embeddings[:, :2])


async def test_what_a_caller_does_to_its_result_is_seen_by_nobody_else() -> None:
    gate = Gate()
    async with busy_engine(LetterModel(on_forward=gate), gate) as (_, callers):
        callers.ask("one", "same", normalize=False)
        callers.ask("two", "same", normalize=False)
        await callers.waiting(2)
        gate.open()
        await until(lambda: len(callers.outcomes) == 3)
        callers.result("one").embeddings[:] = 0.0
    assert_array_equal(callers.result("two").embeddings, [expected("same")])


@pytest.mark.parametrize("place", ["waiting", "on the device"])
async def test_a_leader_who_leaves_does_not_take_the_others_along(place: str) -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with busy_engine(model, gate) as (_, callers):
        text = "same" if place == "waiting" else "busy"
        if place == "waiting":
            callers.ask("leader", text)
            await callers.waiting(1)
        callers.ask("follower", text)
        callers.ask("another", text)
        await callers.waiting(2 + (place == "waiting"))
        callers.scopes["leader" if place == "waiting" else "first"].cancel()
        await until(lambda: callers._engine.statistics().admission.requests == 3 - (place != "waiting"))
        gate.open()
    for name in ("follower", "another"):
        assert_array_equal(callers.result(name).embeddings, [expected(text)])
    assert sum(texts.count(text) for texts in model.forwarded) == 1
    assert callers._engine.statistics().device.wasted_tokens == 0, "somebody waited for what was done"


async def test_a_deadline_of_the_leader_is_not_that_of_the_others() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with busy_engine(model, gate) as (engine, callers):
        callers.ask("leader", "same", timeout_s=LATER_S)
        await callers.waiting(1)
        callers.ask("follower", "same")
        await callers.waiting(2)
        let_deadlines_pass(engine)
        await until(lambda: "leader" in callers.outcomes)
        gate.open()
    assert isinstance(callers.outcomes["leader"], DeadlineExceeded)
    assert_array_equal(callers.result("follower").embeddings, [expected("same")])


async def test_an_input_that_the_model_fails_on_fails_for_all_who_sent_it() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with busy_engine(model, gate) as (engine, callers):
        callers.ask("one", "NaN!")
        await callers.waiting(1)  # the other one's turn would not come sooner
        callers.ask("two", "else", "NaN!")
        await callers.waiting(3)
        gate.open()
    outcomes = [callers.outcomes["one"], callers.outcomes["two"]]
    assert [(type(error), error.index) for error in outcomes if isinstance(error, ModelFailed)] == [
        (ModelFailed, 0),
        (ModelFailed, 1),
    ], "each is told which of its own inputs it was"
    assert sum(texts.count("NaN!") for texts in model.forwarded) == 1
    assert engine.statistics().device.coalesced_items == 0


async def test_a_crash_fails_the_leader_and_another_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    crashes = iter([False, True])  # the first batch is the one that keeps the device busy

    def observe(tokens: int, seconds: float) -> None:
        if next(crashes, False):
            raise ValueError("a bug of the stage")

    async with busy_engine(model, gate) as (engine, callers):
        monkeypatch.setattr(batch_stages(engine)["text"]._service_time, "observe", observe)
        callers.ask("leader", "same")
        await callers.waiting(1)
        callers.ask("follower", "same")
        callers.ask("another", "same")
        await callers.waiting(3)
        gate.open()
    assert isinstance(callers.outcomes["leader"], StageFailed)
    for name in ("follower", "another"):
        assert_array_equal(callers.result(name).embeddings, [expected("same")])
    assert model.forwarded == [["busy"], ["same"], ["same"]], "it was lost with the row in its hand"


async def test_followers_of_a_crashed_worker_go_to_another_that_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The crashed one starts again in an hour."""
    gate, options = Gate(), StageOptions(restarts=RestartPolicy(first_delay_s=3600.0, max_delay_s=3600.0))
    model = LetterModel(replace(CARD, forward_workers=2), on_forward=gate)
    crashes = iter([True])

    def observe(tokens: int, seconds: float) -> None:
        if next(crashes, False):
            raise ValueError("a bug of the stage")

    with anyio.CancelScope() as host:
        async with engine_on(model, options=options) as engine, anyio.create_task_group() as tasks:
            monkeypatch.setattr(batch_stages(engine)["text"]._service_time, "observe", observe)
            callers = Callers(engine, tasks)
            callers.ask("leader", "same")
            await gate.arrived()
            callers.ask("follower", "same")
            await callers.waiting(1)
            gate.open()
            await until(lambda: len(callers.outcomes) == 2)
            assert isinstance(callers.outcomes["leader"], StageFailed)
            assert_array_equal(callers.result("follower").embeddings, [expected("same")])
            host.cancel()


async def test_a_drain_gives_the_followers_their_outcome_too() -> None:
    gate = Gate()
    async with busy_engine(LetterModel(on_forward=gate), gate) as (engine, callers):
        callers.ask("leader", "same")
        callers.ask("follower", "same", "busy")
        await callers.waiting(3)
        async with anyio.create_task_group() as draining:
            draining.start_soon(engine.drain, 30)
            await until(lambda: engine.phase == "draining")
            gate.open()
        assert_array_equal(callers.result("follower").embeddings, [expected("same"), expected("busy")])


async def test_a_drain_that_takes_too_long_leaves_nobody_without_an_outcome() -> None:
    gate = Gate()
    async with busy_engine(LetterModel(on_forward=gate), gate) as (engine, callers):
        callers.ask("leader", "same")
        callers.ask("follower", "same", "busy")
        await callers.waiting(3)
        await engine.drain(0)
        await until(lambda: len(callers.outcomes) == 3)
        gate.open()
    assert {type(outcome) for outcome in callers.outcomes.values()} == {EngineStopped}


async def test_a_single_text_does_not_wait_for_the_turn_of_the_same_text_in_a_large_request() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    texts = [f"{number:04}" for number in range(40)]
    answered_at: list[int] = []

    async with busy_engine(model, gate, max_batch_tokens=4) as (engine, callers):
        callers.ask("large", *texts)
        await until(lambda: engine.statistics().stages[1].done == 41)

        async def ask() -> None:
            await engine.embed(texts[-1])
            answered_at.append(len(model.forwarded))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            stage = batch_stages(engine)["text"]
            await until(lambda: stage.waiting + stage._slots.ahead == 41)  # a batch of one may be handed over by now
            gate.open()
    assert answered_at[0] < 20, "it overtakes the other texts of the large request, as any other text would"
    assert sorted(text for batch in model.forwarded[1:] for text in batch) == [*texts, texts[-1]]
    assert_array_equal(callers.result("large").embeddings, [expected(text) for text in texts])


async def test_the_same_texts_in_many_requests_are_never_mixed_up() -> None:
    results: dict[int, Any] = {}

    def texts(place: int) -> Sequence[str]:
        return [f"{(place * step) % 7}." * (step % 3 + 1) for step in range(place % 5 + 1)]

    async def ask(engine: Engine, place: int) -> None:
        results[place] = await engine.embed(texts(place))

    async with engine_on(LetterModel(), max_batch_tokens=16) as engine, anyio.create_task_group() as tasks:
        for place in range(100):
            tasks.start_soon(ask, engine, place)
    for place, result in results.items():
        assert_array_equal(result.embeddings, [expected(text) for text in texts(place)])
    assert engine.statistics().device.coalesced_items > 0
