"""Places of pipelines: parts of items take those of their own request, and functions that hang keep their threads."""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest

from staged_pool import DeadlineExceeded, EngineStopped, Pipeline, PipelineStage
from staged_pool.runtime.pipelines.pipeline import FUNCTION_THREADS
from staged_pool.runtime.threads.function_threads import FunctionThreads
from tests.runtime.pipelines.test_pipeline import is_idle
from tests.support.user_code import BAD_ENDS, BadEnd
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Steps:
    """An async stage that holds items, and records the order in which they come."""

    def __init__(self) -> None:
        self.came: list[Any] = []
        self._may_go = anyio.Semaphore(0)

    async def __call__(self, item: Any) -> Any:
        self.came.append(item)
        await self._may_go.acquire()
        return item

    def let_go(self, count: int = 1) -> None:
        for _ in range(count):
            self._may_go.release()


def fan(parts: int) -> PipelineStage:
    """Return a stage that makes several items of an item of bulk work."""

    async def split(item: str) -> list[str]:
        return [f"{item}.{number}" for number in range(parts)] if item.startswith("bulk") else [item]

    return PipelineStage("split", function=split, expand=True)


@pytest.mark.parametrize(
    "others",
    [{"tenant": "other"}, {"tenant": "other", "priority": "bulk"}, {"priority": "interactive"}, {"priority": "bulk"}],
    ids=["of another tenant", "of another tenant, as urgent", "of the same tenant, more urgent", "another request"],
)
async def test_parts_of_an_item_go_before_nobody_of_another_request(others: dict[str, Any]) -> None:
    steps = Steps()
    pipeline = Pipeline([fan(50), PipelineStage("steps", function=steps)], window=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(pipeline.submit, [f"bulk {n}" for n in range(4)], priority="bulk", tenant="bulk"))
        await until(lambda: len(steps.came) == 2 and pipeline.statistics().waiting == 3)  # two spreads, and the feed
        tasks.start_soon(partial(pipeline.submit, ["quick"], **{"tenant": "bulk", **others}))
        await until(lambda: pipeline.statistics().waiting == 4)
        for count in range(1, 5):
            steps.let_go()
            await until(lambda: len(steps.came) == 2 + count)  # noqa: B023
        assert "quick" in steps.came[2:5], "one entry of each goes first"
        steps.let_go(1000)
    assert len(steps.came) == 4 * 50 + 1
    assert is_idle(pipeline)


async def test_parts_of_a_request_go_before_its_new_items_and_those_that_are_furthest_first() -> None:
    steps, fed = Steps(), 0

    async def split(item: str) -> list[str]:
        return [f"{item}.{number}" for number in range(3)]

    async def feed() -> AsyncIterator[str]:
        nonlocal fed
        for number in range(6):
            await anyio.lowlevel.checkpoint()
            fed += 1
            yield str(number)

    pipeline = Pipeline(
        [
            PipelineStage("first", function=split, expand=True),
            PipelineStage("second", function=split, expand=True),
            PipelineStage("steps", function=steps),
        ],
        window=1,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pipeline.submit, feed())
        for count in range(1, 6 * 9 + 1):
            await until(lambda: len(steps.came) == count)  # noqa: B023
            assert fed <= (count - 1) // 9 + 2, "no new item while parts wait, but for the one that waits behind them"
            steps.let_go()
    assert steps.came == [f"{n}.{first}.{second}" for n in range(6) for first in range(3) for second in range(3)]
    assert is_idle(pipeline)


@pytest.mark.parametrize("window", [1, 2, 5])
async def test_requests_that_all_expand_block_neither_themselves_nor_each_other(window: int) -> None:
    async def split(item: str) -> list[str]:
        await anyio.lowlevel.checkpoint()
        return [item] * 7

    async def score(query: str, item: str) -> str:
        return item

    pipeline = Pipeline(
        [
            PipelineStage("first", function=split, expand=True, window=1),
            PipelineStage("second", function=split, expand=True),
            PipelineStage("last", function=score, source=["request.query", "second"], window=1),
        ],
        window=window,
    )
    answers: list[int] = []

    async def ask(number: int) -> None:
        data = {"query": "q", "data": ["a", "b", "c"]}
        if number % 2:
            answers.append(len((await pipeline.submit(data, tenant=number)).items))
            return
        async with pipeline.stream(data, tenant=number) as outcomes:
            answers.append(len([outcome async for outcome in outcomes]))

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(ask, number)
    assert answers == [3 * 49] * 4
    assert is_idle(pipeline)


class Hanging:
    """A plain function that hangs until the test lets it end."""

    def __init__(self) -> None:
        self.began = self.ended = 0
        self._open = threading.Event()

    def __call__(self, item: Any) -> Any:
        self.began += 1
        if not self._open.wait(30):
            raise TimeoutError("the test never let it end")
        self.ended += 1
        return item

    def open(self) -> None:
        self._open.set()


@asynccontextmanager
async def hanging(**how: Any) -> AsyncIterator[tuple[Hanging, Pipeline]]:
    """A pipeline of a function that hangs. At the end of the block it goes on, and nothing is left."""
    function = Hanging()
    pipeline = Pipeline([PipelineStage("hangs", function=function, **how)])
    try:
        yield function, pipeline
        assert is_idle(pipeline)
    finally:
        function.open()
    await until(lambda: not pipeline.statistics().left)
    await until(lambda: function.ended == function.began)  # also of another pipeline
    assert (await pipeline.submit([1, 2, 3])).values == [1, 2, 3]


async def test_a_function_that_hangs_holds_nobody_past_the_time_limit(logged: list[Any]) -> None:
    async with hanging(on_error="skip") as (function, pipeline):
        while function.began < 1:  # a busy machine may not begin in time
            with pytest.raises(DeadlineExceeded, match="were in hangs") as failure:
                await pipeline.submit([1], timeout_s=0.05)
            assert failure.value.stage == "hangs"
        assert (function.ended, pipeline.statistics().left) == (0, 1)
        while function.began < 2:
            with pytest.raises(DeadlineExceeded):
                async with pipeline.stream(iter([1]), timeout_s=0.05) as outcomes:
                    await anext(outcomes)
        assert (function.ended, pipeline.statistics().left) == (0, 2)
        assert [(event["event"], event["calls"], event["limit"]) for event in logged] == [
            ("pipeline.functions_left", 1, FUNCTION_THREADS),
            ("pipeline.functions_left", 2, FUNCTION_THREADS),
        ]


async def test_a_function_that_hangs_holds_neither_a_cancellation_nor_the_error_of_another_item_nor_a_drain() -> None:
    async with hanging() as (function, pipeline):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pipeline.submit, [1])
                await until(lambda: function.began == 1)
                scope.cancel()
        assert pipeline.statistics().left == 1

        def fails(item: int) -> int:
            if item == 0:
                raise LookupError
            return function(item)  # type: ignore[no-any-return]

        other = Pipeline([fails])
        with pytest.raises(Exception, match="LookupError"):
            await other.submit([1, 0])
        assert is_idle(other)
    stopped: list[EngineStopped] = []
    async with hanging() as (function, pipeline):

        async def ask() -> None:
            try:
                await pipeline.submit([1])
            except EngineStopped as error:
                stopped.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: function.began == 1)
            await pipeline.drain(0.01)
        assert len(stopped) == 1
        pipeline._door._is_open = True  # for the end of the block, which asks once more


async def test_threads_that_hang_are_no_more_than_the_limit_and_what_has_not_begun_never_does() -> None:
    async with hanging() as (function, pipeline):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pipeline.submit, list(range(10)))
                await until(lambda: function.began == FUNCTION_THREADS)
                scope.cancel()
        assert pipeline.statistics().left == FUNCTION_THREADS
        with pytest.raises(DeadlineExceeded):
            await pipeline.submit([1], timeout_s=0.05)
        assert (function.began, pipeline.statistics().left) == (FUNCTION_THREADS, FUNCTION_THREADS)


async def test_a_generator_that_hangs_is_left_like_a_function() -> None:
    held = Hanging()

    def split(item: int) -> Iterator[int]:
        yield item
        yield held(item)

    pipeline = Pipeline([PipelineStage("split", function=split, expand=True)])
    while not held.began:
        with pytest.raises(DeadlineExceeded):
            await pipeline.submit([1], timeout_s=0.05)
    assert pipeline.statistics().left == 1
    held.open()
    await until(lambda: not pipeline.statistics().left)


async def test_a_function_reaches_the_event_loop_from_its_thread_also_when_it_was_left() -> None:
    may_ask, asked = threading.Event(), anyio.Event()

    def function(item: int) -> int:
        assert may_ask.wait(30)
        anyio.from_thread.run_sync(asked.set)
        return item

    pipeline = Pipeline([function])
    may_ask.set()
    assert (await pipeline.submit([1])).values == [1]
    assert asked.is_set()


@pytest.mark.parametrize("end", BAD_ENDS)
async def test_threads_give_back_their_places_whatever_a_call_does(end: BadEnd) -> None:
    threads = FunctionThreads(2, lambda left: pytest.fail(f"{left} calls are left"))
    for _ in range(5):
        with pytest.raises(Exception, match=r"cancellation|RustPanic|SystemExit|GeneratorExit"):
            await threads(end.called, None)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await threads(end.called, None)
        assert await threads(math.sqrt, 9) == 3
    assert threads.left == 0
    assert threads._places.borrowed_tokens == 0
