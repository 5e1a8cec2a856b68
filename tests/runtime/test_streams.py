"""Results that are handed over as they are done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest

from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.requests import EmbedRequest, ScoreRequest, TextInput
from staged_pool.stages.errors import DeadlineExceeded, EngineStopped, ModelFailed, StageFailed
from tests.servers.engines import engine_on
from tests.support.cards import CROSS_ENCODER, EMBEDDER
from tests.support.deadlines import LATER_S, let_deadlines_pass
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.user_code import BAD_ENDS, BadEnd
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

ONE_A_BATCH = EngineConfig(max_batch_items=1, chunk_items=1)


def asking(*texts: str) -> EmbedRequest:
    return EmbedRequest(inputs=tuple(map(TextInput, texts)))


@asynccontextmanager
async def running(model: LetterModel, config: EngineConfig = ONE_A_BATCH) -> AsyncIterator[Engine]:
    async with engine_on(model, config) as engine:
        yield engine


class Taken:
    """Results that a caller was given, in order."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.results: list[Any] = []

    @staticmethod
    def write(places: Sequence[int], result: Any) -> tuple[Sequence[int], Any]:
        return places, result

    async def give(self, given: tuple[Sequence[int], Any]) -> None:
        self.places += given[0]
        self.results.append(given[1])


async def test_a_result_is_handed_over_while_another_one_is_far_from_done() -> None:
    gate, taken = Gate(), Taken()
    model = LetterModel(on_preprocess=lambda texts: gate() if "b" in texts else None)
    async with running(model) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: engine.stream(lambda: asking("a", "b"), taken.write, taken.give))
        await until(lambda: taken.places == [0])
        gate.open()
    assert taken.places == [0, 1]
    assert [result.embeddings[0].tolist() for result in taken.results] == [expected(x).tolist() for x in "ab"]


async def test_every_result_comes_once_and_the_tokens_at_the_end() -> None:
    taken, texts = Taken(), ["x" * length for length in range(1, 40)]
    async with running(LetterModel(), EngineConfig()) as engine:
        tokens = await engine.stream(lambda: asking(*texts), taken.write, taken.give)
    assert sorted(taken.places) == list(range(39))
    assert tokens == sum(map(len, texts))
    rows = [row.tolist() for result in taken.results for row in result.embeddings]
    assert dict(zip(taken.places, rows, strict=True)) == {
        place: expected(text).tolist() for place, text in enumerate(texts)
    }


@pytest.mark.parametrize("card", [CROSS_ENCODER, EMBEDDER, replace(EMBEDDER, scoring="late-interaction")])
@pytest.mark.parametrize("queries", [("abc",), ("abc", "b", "cd", "xy", "z")])
async def test_scores_one_by_one_are_those_of_the_whole(card: ModelCard, queries: tuple[str, ...]) -> None:
    request = ScoreRequest(queries=queries, documents=("ax", "y", "bca", "b", "zz"))
    taken = Taken()
    async with running(LetterModel(card)) as engine:
        whole = await engine.submit(lambda: request, lambda result: result)
        await engine.stream(lambda: request, taken.write, taken.give)
    found = [score for result in taken.results for score in result.scores.tolist()]
    assert sorted(taken.places) == [0, 1, 2, 3, 4]
    assert [found[taken.places.index(place)] for place in range(5)] == pytest.approx(whole.scores.tolist(), rel=1e-5)


async def test_a_caller_who_is_slow_holds_no_stage_and_no_drain() -> None:
    reading, taken = anyio.Event(), Taken()

    async def give(given: tuple[Sequence[int], Any]) -> None:
        await reading.wait()
        await taken.give(given)

    async with running(LetterModel()) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: engine.stream(lambda: asking("a", "b", "c"), taken.write, give))
        await until(lambda: engine.statistics().device.items == 3 and engine.statistics().admission.requests == 0)
        assert (await engine.embed("others")).embeddings.tolist() == [expected("others").tolist()]
        await engine.drain(30)
        assert taken.places == []
        reading.set()
    assert sorted(taken.places) == [0, 1, 2]


async def test_an_error_comes_after_the_results_before_it() -> None:
    taken = Taken()
    async with running(LetterModel()) as engine:
        with pytest.raises(ModelFailed) as caught:
            await engine.stream(lambda: asking("a", "b", "NaN"), taken.write, taken.give)
        assert set(taken.places) <= {0, 1}
        assert caught.value.index == 2
        assert engine.statistics().admission.requests == 0


async def test_a_deadline_ends_a_stream() -> None:
    gate, taken = Gate(), Taken()
    model = LetterModel(on_preprocess=lambda texts: gate() if "b" in texts else None)
    expired: list[str] = []

    async def ask(engine: Engine) -> None:
        with pytest.raises(DeadlineExceeded) as late:
            await engine.stream(lambda: asking("a", "b"), taken.write, taken.give, timeout_s=LATER_S)
        expired.append(late.value.stage)

    async with running(model) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, engine)
        await until(lambda: taken.places == [0])
        let_deadlines_pass(engine)
        await until(lambda: bool(expired))
        gate.open()
    assert taken.places == [0]


async def test_a_caller_who_leaves_abandons_the_rest() -> None:
    gate, taken = Gate(), Taken()
    model = LetterModel(on_preprocess=lambda texts: gate() if "b" in texts else None)
    async with running(model) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: engine.stream(lambda: asking("a", "b"), taken.write, taken.give))
            await until(lambda: taken.places == [0])
            tasks.cancel_scope.cancel()
        assert engine.statistics().admission.requests == 0
        assert sum(engine.statistics().cancelled.values()) == 1
        gate.open()
    assert taken.places == [0]


async def test_an_engine_that_stops_ends_a_stream() -> None:
    gate, taken = Gate(), Taken()
    model = LetterModel(on_preprocess=lambda texts: gate() if "b" in texts else None)
    failed: list[Exception] = []

    async def ask(engine: Engine) -> None:
        try:
            await engine.stream(lambda: asking("a", "b"), taken.write, taken.give)
        except EngineStopped as error:
            failed.append(error)

    async with running(model) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, engine)
        await until(lambda: taken.places == [0])
        await engine.drain(0)
        await until(lambda: len(failed) == 1)
        gate.open()
    assert (len(failed), taken.places) == (1, [0])


async def test_a_bug_in_writing_ends_the_request_and_not_the_engine() -> None:
    def write(places: Sequence[int], result: Any) -> bytes:
        raise ValueError("a bug")

    async def give(given: bytes) -> None:
        raise AssertionError("nothing is there to give")

    async with running(LetterModel()) as engine:
        with pytest.raises((ValueError, StageFailed)):
            await engine.stream(lambda: asking("a", "b"), write, give)
        assert engine.statistics().admission.requests == 0
        await engine.embed("a")


@pytest.mark.parametrize("end", BAD_ENDS)
@pytest.mark.parametrize("function", ["takes", "writes"])
async def test_whatever_the_functions_of_a_caller_let_out_fails_its_request_alone(function: str, end: BadEnd) -> None:
    taken, gate = Taken(), Gate()
    model = LetterModel(on_preprocess=lambda texts: gate() if "b" in texts else None)

    def write(places: Sequence[int], result: Any) -> tuple[Sequence[int], Any]:
        if function == "writes" and taken.places:
            end.called()
        return places, result

    async def give(given: tuple[Sequence[int], Any]) -> None:
        await taken.give(given)
        gate.open()
        if function == "takes":
            await end.awaited()

    async with running(model) as engine:
        message = rf"The caller's function that {function} results failed: {end.kind}"
        with pytest.raises(StageFailed, match=message) as failure:
            await engine.stream(lambda: asking("a", "b"), write, give)
        assert failure.value.stage == "stream"
        assert taken.places == [0]
        await until(lambda: engine.statistics().admission.requests == 0)
        assert await engine.stream(lambda: asking("a"), Taken.write, Taken().give) == 1


async def test_an_error_of_a_caller_comes_back_as_it_is() -> None:
    async def give(given: object) -> None:
        raise LookupError("the caller's own")

    async with running(LetterModel()) as engine:
        with pytest.raises(LookupError, match="the caller's own"):
            await engine.stream(lambda: asking("a", "b"), Taken.write, give)
        assert engine.statistics().admission.requests == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio", ("asyncio", {"use_uvloop": True})])
@pytest.mark.parametrize("from_within", [True, False])
async def test_results_that_nobody_gives_any_more_are_an_error(from_within: bool) -> None:
    taken, gate = Taken(), Gate()
    model = LetterModel(on_preprocess=lambda texts: gate() if "b" in texts else None)

    async def give(given: tuple[Sequence[int], Any]) -> None:
        await taken.give(given)
        if from_within:
            (task := asyncio.current_task()) and task.cancel()  # it strikes at the next await, which is not its own

    async with running(model) as engine, anyio.create_task_group() as tasks:
        failed: list[StageFailed] = []

        async def ask() -> None:
            try:
                await engine.stream(lambda: asking("a", "b"), taken.write, give)
            except StageFailed as error:
                failed.append(error)

        tasks.start_soon(ask)
        await until(lambda: taken.places == [0])
        if not from_within:
            for task in asyncio.all_tasks():
                if "rows._give" in task.get_name():
                    task.cancel()
        gate.open()
    assert [error.stage for error in failed] == ([] if from_within else ["stream"])
    assert taken.places == ([0, 1] if from_within else [0])
