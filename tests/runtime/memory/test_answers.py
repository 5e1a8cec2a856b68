"""Memory of answers: admitted before they are computed, held until they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.engine.waiting_engine import WaitingEngine
from staged_pool.runtime.memory.answers import (
    RESULT_NUMBER_BYTES,
    ROW_NUMBER_BYTES,
    WRITTEN_NUMBER_BYTES,
    AnswerMemory,
    expected_numbers,
)
from staged_pool.runtime.memory.budget import SHARES, ByteAccount
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.requests import EmbedRequest, Output, TextInput
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.errors import DeadlineExceeded, Overloaded, TooLarge
from staged_pool.stages.scheduling.entries import Priority
from tests.support.cards import CARD, EMBEDDER
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def test_an_answer_takes_its_room_before_it_is_computed() -> None:
    account = ByteAccount(100 * WRITTEN_NUMBER_BYTES)
    with AnswerMemory(account, "a", is_written=True) as first, AnswerMemory(account, "b", is_written=True) as second:
        first.expect(80, in_answer=True)
        with pytest.raises(Overloaded, match="at its limit of memory for answers"):
            second.expect(30, in_answer=True)
        assert second.held_bytes == 0
        first.encoded(50)
        assert account.held_bytes == 50
        second.expect(30, in_answer=True)
    assert account.held_bytes == 0


def test_one_that_never_fits_is_told_so() -> None:
    with pytest.raises(TooLarge, match="about 21 MB of memory; the limit is 20 MB: send fewer inputs"):
        AnswerMemory(ByteAccount(20_000_000), is_written=True).expect(1_000_000, in_answer=True)


def test_an_answer_that_a_load_leaves_no_room_for_is_rejected_for_now() -> None:
    account = ByteAccount(100 * WRITTEN_NUMBER_BYTES)
    account.resize(20 * WRITTEN_NUMBER_BYTES, 80 * WRITTEN_NUMBER_BYTES)
    for is_patient in (False, True):
        with AnswerMemory(account, is_written=True, is_patient=is_patient) as memory:
            with pytest.raises(Overloaded, match="until it has loaded a model"):
                memory.expect(50, in_answer=True)
            assert memory.lacks_room, "so a patient caller gathers it"
            assert isinstance(memory.delivered(50), Overloaded)
            with pytest.raises(TooLarge, match="send fewer inputs"):
                memory.expect(201, in_answer=True)
    account.resize(100 * WRITTEN_NUMBER_BYTES)
    with AnswerMemory(account, is_written=True) as memory:
        memory.expect(100, in_answer=True)


@pytest.mark.parametrize(
    ("is_written", "in_answer", "number_bytes"),
    [
        (True, True, WRITTEN_NUMBER_BYTES),
        (False, True, RESULT_NUMBER_BYTES),
        (True, False, ROW_NUMBER_BYTES),
        (False, False, ROW_NUMBER_BYTES),
    ],
)
def test_a_score_is_small_however_large_its_rows_are(is_written: bool, in_answer: bool, number_bytes: int) -> None:
    memory = AnswerMemory(ByteAccount(10**9), is_written=is_written)
    memory.expect(1000, in_answer=in_answer)
    assert memory.held_bytes == 1000 * number_bytes


def test_rows_that_are_more_than_was_thought_are_counted_as_they_come() -> None:
    memory = AnswerMemory(ByteAccount(120 * RESULT_NUMBER_BYTES))
    memory.expect(10, in_answer=True)
    assert memory.delivered(10) is None
    assert memory.held_bytes == 10 * RESULT_NUMBER_BYTES
    assert memory.delivered(90) is None
    assert memory.held_bytes == 100 * RESULT_NUMBER_BYTES
    with memory._account.hold("another") as other:
        assert other.take(1)
        assert isinstance(memory.delivered(10), Overloaded), "an eighth is left to others"
    assert memory.delivered(10) is None, "it is the only one, and fits"
    assert isinstance(memory.delivered(1), TooLarge)


def test_room_for_rows_to_come_leaves_some_to_others_and_is_corrected_by_each_row() -> None:
    account = ByteAccount(800)
    with AnswerMemory(account, "a") as first, AnswerMemory(account, "b") as second:
        assert first.delivered(100 // ROW_NUMBER_BYTES, 63) is None
        assert first.held_bytes == 700, "what is guessed leaves an eighth"
        assert second.delivered(40 // ROW_NUMBER_BYTES) is None
        held = [first.held_bytes]
        for left in range(62, 0, -1):
            assert first.delivered(1, left) is None
            held.append(first.held_bytes)
        assert held == sorted(held, reverse=True)
        assert first.delivered(1) is None
        assert first.held_bytes == 100 + 63 * ROW_NUMBER_BYTES
    assert account.held_bytes == 0


def test_what_is_expected_or_gathered_is_kept_until_the_last_row() -> None:
    account = ByteAccount(800)
    with AnswerMemory(account, "a") as memory:
        memory.expect(400 // ROW_NUMBER_BYTES, in_answer=False)
        assert memory.delivered(1, 1) is None
        assert memory.held_bytes == 400
        assert memory.delivered(1) is None
        assert memory.held_bytes == 2 * ROW_NUMBER_BYTES


def test_a_guess_beyond_the_room_ends_an_answer_early_and_one_near_it_does_not() -> None:
    account = ByteAccount(800)
    with account.hold("another") as other, AnswerMemory(account, "a") as memory:
        assert other.take(640)
        assert isinstance(memory.delivered(40 // ROW_NUMBER_BYTES, 9), Overloaded)
        assert memory.lacks_room
        assert memory.held_bytes == 0
        memory.begin()
        assert memory.delivered(40 // ROW_NUMBER_BYTES, 4) is None
        assert memory.held_bytes == 140


def test_the_numbers_of_an_answer_follow_from_what_is_asked() -> None:
    card = replace(CARD, width=10, token_width=7, labels=("a", "b", "c"))

    def numbers(*outputs: Sequence[Output]) -> int:
        return expected_numbers([ModelInput(TextInput("a"), frozenset(each)) for each in outputs], 60, card)

    assert numbers([Output.DENSE], [Output.DENSE]) == 20
    assert numbers([Output.MULTI_VECTOR], [Output.MULTI_VECTOR], [Output.MULTI_VECTOR]) == 60 * 7
    in_chunks = ModelInput(TextInput("a"), frozenset({Output.MULTI_VECTOR}), chunk_tokens=8)
    assert expected_numbers([in_chunks, in_chunks], 60, card) == 2 * 4 * 7  # 30 tokens each
    assert numbers([Output.LABELS]) == 3
    assert numbers([Output.TOKEN_LABELS], [Output.TOKEN_LABELS]) == 60 * 3
    assert numbers([Output.TOKEN_WEIGHTS]) == 60
    assert numbers([Output.DENSE, Output.SPARSE], [Output.DENSE]) == 20 + 30 * 2


async def test_an_engine_rejects_before_it_computes() -> None:
    governor = MemoryGovernor(10**9)
    governor.budget.resize(int(100 * CARD.width * RESULT_NUMBER_BYTES / SHARES["answers"]))
    forwards: list[int] = []
    model = LetterModel(on_forward=lambda texts: forwards.append(len(texts)))
    async with (
        DeviceThreads("test device", watchdog_s=30).running() as device,
        run_engine(EngineConfig(), model, device=device, memory=governor) as engine,
    ):
        with pytest.raises(TooLarge, match="send fewer inputs"):
            await engine.embed(["a"] * 200)
        assert forwards == []
        result = await engine.embed([f"text {number}" for number in range(50)])
        assert result.dense is not None
        assert governor.budget.answers.held_bytes == 0, "the caller has it now"


async def test_what_is_held_comes_back_however_a_request_ends() -> None:
    governor, gate = MemoryGovernor(10**9), Gate()
    async with (
        DeviceThreads("test device", watchdog_s=30).running() as device,
        run_engine(EngineConfig(), LetterModel(on_forward=gate), device=device, memory=governor) as engine,
    ):
        answers = governor.budget.answers
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.embed, "left")
            await until(lambda: answers.held_bytes > 0)
            tasks.cancel_scope.cancel()
        assert answers.held_bytes == 0
        gate.open()
        await engine.embed("answered")
        assert answers.held_bytes == 0


async def test_rows_of_a_stream_count_until_all_are_given() -> None:
    governor, may_go_on = MemoryGovernor(10**9), anyio.Event()
    answers = governor.budget.answers

    async def give(given: Any) -> None:
        await may_go_on.wait()

    async def stream() -> None:
        await engine.stream(
            lambda: EmbedRequest(inputs=(TextInput("a"), TextInput("b"))), lambda places, result: places, give
        )

    async with (
        DeviceThreads("test device", watchdog_s=30).running() as device,
        run_engine(EngineConfig(), LetterModel(), device=device, memory=governor) as engine,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(stream)
        await until(lambda: engine.statistics().admission.admitted == 1 and not engine.statistics().admission.requests)
        assert answers.held_bytes > 0, "it has left the engine, and its rows have not"
        may_go_on.set()
    assert answers.held_bytes == 0


async def test_an_answer_that_grows_beyond_its_room_fails_alone() -> None:
    """The card does not tell the width of token vectors. It is known later."""
    governor = MemoryGovernor(10**9)
    async with (
        DeviceThreads("test device", watchdog_s=30).running() as device,
        run_engine(EngineConfig(), LetterModel(EMBEDDER), device=device, memory=governor) as engine,
    ):
        governor.budget.answers.limit_bytes = 100
        with pytest.raises(TooLarge, match="send fewer inputs"):
            await engine.embed("abcdefgh" * 8, outputs=["multi_vector"])
        governor.budget.answers.limit_bytes = 3 * 64 * RESULT_NUMBER_BYTES
        with governor.budget.answers.hold("another") as held:
            held.add(2 * 64 * RESULT_NUMBER_BYTES)
            with pytest.raises(Overloaded, match="until clients have read them"):
                await engine.embed("abcdefgh" * 8, outputs=["multi_vector"])
        governor.budget.answers.limit_bytes = 2 * 64 * RESULT_NUMBER_BYTES
        result = await engine.embed("abcdefgh" * 8, outputs=["multi_vector"])
        assert result.multi_vector is not None
    assert governor.budget.answers.held_bytes == 0


async def test_a_request_that_waits_gathers_the_room_that_its_first_try_has_lacked() -> None:
    """As those of pipelines do: it is computed once more, and not again and again until others are gone."""
    governor, forwards = MemoryGovernor(10**9), list[int]()
    model = LetterModel(EMBEDDER, on_forward=lambda texts: forwards.append(len(texts)))
    async with (
        DeviceThreads("test device", watchdog_s=30).running() as device,
        run_engine(EngineConfig(), model, device=device, memory=governor) as engine,
    ):
        answers = governor.budget.answers
        answers.limit_bytes = 3 * 64 * RESULT_NUMBER_BYTES
        waiting = WaitingEngine(engine)
        held = answers.hold("another")
        held.add(2 * 64 * RESULT_NUMBER_BYTES)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(waiting.embed, "abcdefgh" * 8, outputs=["multi_vector"]))
            await until(lambda: answers.waiting == 1)
            assert len(forwards) == 1
            held.give_back()
        with held:
            held.add(2 * 64 * RESULT_NUMBER_BYTES)
            with pytest.raises(DeadlineExceeded):
                await waiting.embed("hgfedcba" * 8, outputs=["multi_vector"], timeout_s=0.05)
        assert answers.held_bytes == answers.waiting == 0


async def test_memory_of_further_answers_is_given_back_with_the_first() -> None:
    answers, outcomes = ByteAccount(1000), ByteAccount(1000)
    with AnswerMemory(answers, is_written=True) as memory:
        memory.another().encoded(10)
        memory.another(outcomes).keep(20)
        part = await memory.part(30, Priority.BULK)
        assert (answers.held_bytes, outcomes.held_bytes) == (40, 20)
        part.give_back()
        memory.encoded(5)
        assert (answers.held_bytes, outcomes.held_bytes) == (15, 20)
    assert (answers.held_bytes, outcomes.held_bytes) == (0, 0)


async def test_nothing_is_held_for_an_answer_that_is_over() -> None:
    """A task that outlives a request may still ask for memory of it."""
    answers = ByteAccount(1000)
    with AnswerMemory(answers, is_written=True) as memory:
        first = memory.another()
        first.encoded(10)
        memory.drop(first)
        assert (answers.held_bytes, memory.is_over) == (0, False)
        assert not memory._others  # an endless stream has any number of them
    assert memory.is_over
    with memory.another() as own:
        own.encoded(10)
        assert (answers.held_bytes, memory._others) == (10, set())
    assert answers.held_bytes == 0
