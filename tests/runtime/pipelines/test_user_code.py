"""Pipelines and code of users: whatever it lets out is an error of its item or its request, never a partial answer."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from staged_pool import (
    DeadlineExceeded,
    InvalidInput,
    Pipeline,
    PipelineStage,
    StagedPoolError,
    StageFailed,
    TooLarge,
)
from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.runtime.memory.budget import ByteAccount
from tests.runtime.pipelines.test_pipeline import Valve, engines_on, is_idle
from tests.runtime.test_zero_shot import NLI
from tests.support.model import LetterModel
from tests.support.user_code import BAD_ENDS, BadEnd, RustPanic
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

PANIC = BadEnd("RustPanic", lambda: RustPanic("a panic"))

BAD = 4
"""The item, of ten, whose code fails."""


def plain(end: BadEnd) -> Callable[[Any], Any]:
    def function(item: int) -> int:
        if item == BAD:
            end.called()
        return item

    return function


def awaited(end: BadEnd) -> Callable[[Any], Awaitable[Any]]:
    async def function(item: int) -> int:
        if item == BAD:
            await end.awaited()
        return item

    return function


def yielding(end: BadEnd) -> Callable[[Any], Any]:
    def function(item: int) -> Iterator[int]:
        yield item
        if item == BAD:
            end.called()

    return function


def yielding_for_a_coroutine(end: BadEnd) -> Callable[[Any], Awaitable[Any]]:
    async def function(item: int) -> Iterator[int]:
        return yielding(end)(item)  # type: ignore[no-any-return]

    return function


def yielding_awaited(end: BadEnd) -> Callable[[Any], AsyncIterator[int]]:
    async def function(item: int) -> AsyncGenerator[int, None]:
        yield item
        if item == BAD:
            await end.awaited()

    return function


async def read(pipeline: Pipeline, items: Any, seen: list[int]) -> None:
    """Read a stream, and note the index of each outcome."""
    async with pipeline.stream(items) as outcomes:
        while (outcome := await anext(outcomes, None)) is not None:
            seen.append(outcome.index)


PLACES = {
    "a plain function": (plain, False),
    "a coroutine": (awaited, False),
    "a generator": (yielding, True),
    "a generator of a coroutine": (yielding_for_a_coroutine, True),
    "an async generator": (yielding_awaited, True),
}


def stage_of(place: str, end: BadEnd, **how: Any) -> PipelineStage:
    make, expands = PLACES[place]
    return PipelineStage("user", function=make(end), expand=expands, **how)


@pytest.mark.parametrize("end", BAD_ENDS)
@pytest.mark.parametrize("place", PLACES)
async def test_whatever_a_stage_lets_out_fails_its_request_and_names_stage_and_kind(place: str, end: BadEnd) -> None:
    pipeline = Pipeline([stage_of(place, end)], window=3)
    message = rf"Item {BAD}, stage user: The function of the stage failed: {end.kind}"
    with pytest.raises(StageFailed, match=message) as failure:
        await pipeline.submit(list(range(10)))
    assert failure.value.stage == "user"
    seen: list[int] = []
    with pytest.raises(StageFailed, match=message):
        await read(pipeline, iter(range(10)), seen)
    assert BAD not in seen
    assert is_idle(pipeline)
    assert pipeline.statistics().outcomes["failed"] == 2


@pytest.mark.parametrize("end", BAD_ENDS)
@pytest.mark.parametrize("place", PLACES)
async def test_a_stage_that_skips_leaves_out_that_item_alone(place: str, end: BadEnd) -> None:
    pipeline = Pipeline([stage_of(place, end, on_error="skip")], window=3)
    result = await pipeline.submit(list(range(10)))
    assert [item.index for item in result.items] == [n for n in range(10) if n != BAD]
    assert [(error.index, error.stage, type(error.error)) for error in result.errors] == [(BAD, "user", StageFailed)]
    async with pipeline.stream(iter(range(10))) as outcomes:
        assert sorted([outcome.index async for outcome in outcomes]) == list(range(10))
    assert is_idle(pipeline)


class Hostile:
    """A value whose fields, length and iteration raise."""

    def __init__(self, end: BadEnd | None) -> None:
        self._end = end

    @property
    def field(self) -> int:
        if self._end is not None:
            self._end.called()
        raise LookupError("secret")


@pytest.mark.parametrize("end", [*BAD_ENDS, None])
async def test_a_field_that_raises_fails_the_item_that_has_it(end: BadEnd | None) -> None:
    kind = "LookupError" if end is None else end.kind
    items = [{"field": 1}, Hostile(end), {"field": 3}]
    reads = PipelineStage("reads", function=lambda field: field, source="item.field", on_error="skip")
    result = await Pipeline([reads]).submit(items)
    assert result.values == [1, 3]
    assert [error.index for error in result.errors] == [1]
    for pipeline in (
        Pipeline([PipelineStage("reads", function=lambda field: field, source="item.field")]),
        Pipeline([PipelineStage("passes", function=lambda item: item)], output="passes.field"),
    ):
        with pytest.raises(StageFailed, match=f"Item 1, stage (reads|output): .* failed: {kind}") as failure:
            await pipeline.submit(items)
        assert "secret" not in str(failure.value)
        assert is_idle(pipeline)


async def test_what_a_request_needs_once_fails_it_also_where_stages_skip() -> None:
    def labels() -> Iterator[str]:
        yield "a"
        PANIC.called()

    async with engines_on(LetterModel(card=NLI)) as (engine,):
        nli: dict[str, Any] = {"engine": engine, "task": "classify", "on_error": "skip"}
        pipeline = Pipeline([PipelineStage("asked", **nli, source=["item", "request.labels"])])
        with pytest.raises(StageFailed, match="The work for all items failed: RustPanic"):
            await pipeline.submit({"data": ["a", "b", "c"], "labels": labels()})
        assert is_idle(pipeline)


def plain_source(end: BadEnd | None) -> Iterator[int]:
    yield from range(BAD)
    if end is not None:
        end.called()
    raise LookupError("the caller's own")


async def awaited_source(end: BadEnd | None) -> AsyncGenerator[int, None]:
    for number in range(BAD):
        yield number
    if end is not None:
        await end.awaited()
    raise LookupError("the caller's own")


SOURCES: list[Callable[[BadEnd | None], Any]] = [plain_source, awaited_source]


@pytest.mark.parametrize("end", BAD_ENDS)
@pytest.mark.parametrize("source", SOURCES)
async def test_whatever_a_source_lets_out_fails_its_request_behind_what_is_done(source: Any, end: BadEnd) -> None:
    pipeline = Pipeline([awaited(PANIC)], window=2)
    message = rf"The source of the items failed: {end.kind}"
    with pytest.raises(StageFailed, match=message) as failure:
        await pipeline.submit(source(end))
    assert failure.value.stage == "source"
    seen: list[int] = []
    with pytest.raises(StageFailed, match=message):
        await read(pipeline, source(end), seen)
    assert sorted(seen) == list(range(BAD)), "they were done before, or on their way"
    assert is_idle(pipeline)


@pytest.mark.parametrize("source", SOURCES)
async def test_an_error_of_a_source_is_raised_as_it_is_behind_what_is_done(source: Any) -> None:
    pipeline = Pipeline([awaited(PANIC)], window=2)
    with pytest.raises(LookupError, match="the caller's own"):
        await pipeline.submit(source(None))
    seen: list[int] = []
    with pytest.raises(LookupError, match="the caller's own"):
        await read(pipeline, source(None), seen)
    assert sorted(seen) == list(range(BAD))
    assert is_idle(pipeline)


async def test_outcomes_that_wait_for_a_reader_come_before_the_error_of_a_later_item() -> None:
    valve: Valve[int] = Valve()

    async def fails_late(item: int) -> int:
        if item == 3:
            await valve(item)
            raise LookupError
        return item

    pipeline = Pipeline([fails_late], window=10)
    async with pipeline.stream([0, 1, 2, 3]) as outcomes:
        await until(lambda: pipeline.statistics().stages[0].done == 3)
        valve.open()
        await until(lambda: pipeline.statistics().stages[0].failed == 1)
        assert sorted([(await anext(outcomes)).index for _ in range(3)]) == [0, 1, 2]
        with pytest.raises(StageFailed):
            await anext(outcomes)


@pytest.mark.parametrize("anyio_backend", ["asyncio", ("asyncio", {"use_uvloop": True})])
async def test_a_caller_who_is_cancelled_by_asyncio_itself_is_cancelled() -> None:
    valve: Valve[int] = Valve()

    async def source() -> AsyncGenerator[int, None]:
        yield 1
        await anyio.sleep_forever()

    for data in ([1, 2], source()):
        pipeline = Pipeline([PipelineStage("valve", function=valve)])
        task = asyncio.get_running_loop().create_task(pipeline.submit(data))
        await until(lambda: pipeline.statistics().in_flight > 0)  # noqa: B023
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pipeline.statistics().outcomes["cancelled"] == 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await pipeline.submit([1])
        assert is_idle(pipeline)


@pytest.mark.parametrize("anyio_backend", ["asyncio", ("asyncio", {"use_uvloop": True})])
async def test_a_request_whose_tasks_somebody_cancels_has_an_error_and_no_partial_answer() -> None:
    valve: Valve[int] = Valve()

    async def cancels_the_others(item: int) -> int:
        if item == 0:
            await until(lambda: len(valve.came) == 1 and pipeline.statistics().stages[1].waiting == 1)
            for task in asyncio.all_tasks():
                if "PipelineRun._run_task" in task.get_name() and task is not asyncio.current_task():
                    task.cancel()
            valve.open()
        return item

    narrow = PipelineStage("narrow", function=valve, window=1, on_error="skip")
    pipeline = Pipeline([cancels_the_others, narrow])
    with pytest.raises(StageFailed, match="A task of the request was cancelled, and nobody had asked for it"):
        await pipeline.submit([0, 1, 2])
    assert is_idle(pipeline)


async def test_an_endless_generator_costs_one_value_more_than_may_go_on() -> None:
    taken = itertools.count()

    def endless(_: int) -> Iterator[int]:
        while True:
            yield next(taken)

    async def of_a_coroutine(item: int) -> Iterator[int]:
        return endless(item)

    async def awaited_endless(item: int) -> AsyncGenerator[int, None]:
        for number in endless(item):
            yield number

    def in_a_field(item: int) -> dict[str, Iterator[int]]:
        return {"parts": endless(item)}

    for function, expand in (
        (endless, True), (of_a_coroutine, True), (awaited_endless, True), (in_a_field, "parts"),
        (itertools.count, True),
    ):  # fmt: skip
        taken = itertools.count()
        how: dict[str, Any] = {"function": function, "expand": expand, "max_items": 3}
        with pytest.raises(
            TooLarge, match=r"Item 0, stage split: The stage made more than 3 items of one \(`max_items`"
        ):
            await Pipeline([PipelineStage("split", **how)]).submit([7])
        assert next(taken) == (0 if function is itertools.count else 4)
        result = await Pipeline([PipelineStage("split", **how, on_error="skip")]).submit([7, 8])
        assert [type(error.error) for error in result.errors] == [TooLarge, TooLarge]


async def test_generators_run_off_the_event_loop_and_are_closed_where_they_ran() -> None:
    loop_thread = threading.get_ident()
    ran: list[tuple[str, int]] = []

    def split(text: str) -> Iterator[str]:
        try:
            for letter in text:
                ran.append(("takes", threading.get_ident()))
                yield letter
        finally:
            ran.append(("closed", threading.get_ident()))

    async def of_a_coroutine(text: str) -> Iterator[str]:
        return split(text)

    for function in (split, of_a_coroutine):
        result = await Pipeline([PipelineStage("split", function=function, expand=True)]).submit(["ab", "c"])
        assert result.values == ["a", "b", "c"]
        with pytest.raises(TooLarge):
            await Pipeline([PipelineStage("split", function=function, expand=True, max_items=1)]).submit(["ab"])
    assert loop_thread not in {thread for _, thread in ran}
    assert sum(what == "closed" for what, _ in ran) == 6


async def test_an_async_generator_makes_items_and_is_closed() -> None:
    closed: list[str] = []

    async def split(text: str) -> AsyncGenerator[str, None]:
        try:
            for letter in text:
                await anyio.lowlevel.checkpoint()
                yield letter
        finally:
            closed.append(text)

    stage = PipelineStage("split", function=split, expand=True, max_items=2, on_error="skip")
    result = await Pipeline([stage]).submit(["ab", "abc"])
    assert (result.values, [error.index for error in result.errors]) == (["a", "b"], [1])
    assert sorted(closed) == ["ab", "abc"]


async def test_errors_of_our_own_pass_as_they_are() -> None:
    async def rejects(_: object) -> None:
        raise InvalidInput("It is wrong.")

    with pytest.raises(InvalidInput, match=r"Item 0, stage rejects: It is wrong\."):
        await Pipeline([rejects]).submit([1])


class Walked(dict[str, int]):
    """A value that calls a function when it is walked through."""

    def __init__(self, called: Callable[[], object]) -> None:
        super().__init__(a=1)
        self._called = called

    def keys(self) -> Any:
        self._called()
        return super().keys()

    def items(self) -> Any:
        self._called()
        return super().items()


async def counted(pipeline: Pipeline, items: Any, account: ByteAccount, *, streams: bool) -> None:
    """Take items through a pipeline whose outcomes count."""
    with AnswerMemory(account, is_written=True) as answer:
        if not streams:
            await pipeline.submit(items, answer=answer)
            return
        async with pipeline.stream(iter(items), answer=answer) as outcomes:
            async for _ in outcomes:
                pass


@pytest.mark.parametrize("end", BAD_ENDS)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_value_that_cannot_be_counted_fails_its_request_and_names_item_and_kind(
    end: BadEnd, streams: bool
) -> None:
    async def make(item: int) -> object:
        return Walked(end.called) if item == BAD else item

    pipeline, account = Pipeline([make]), ByteAccount(10**6)
    with pytest.raises(StageFailed, match=rf"Item {BAD}, stage output: The output failed: {end.kind}") as failure:
        await counted(pipeline, list(range(10)), account, streams=streams)
    assert failure.value.stage == "output"
    assert is_idle(pipeline)
    assert account.held_bytes == account.waiting == 0


async def test_a_value_whose_count_hangs_holds_up_nobody_and_its_request_ends_in_time() -> None:
    may_end, counts = threading.Event(), threading.Event()

    def hang() -> None:
        counts.set()
        may_end.wait(30)

    async def make(item: str) -> object:
        return Walked(hang) if item == "hangs" else item

    pipeline, account = Pipeline([make]), ByteAccount(10**6)
    try:
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with AnswerMemory(account, is_written=True) as answer, pytest.raises(DeadlineExceeded):
                    await pipeline.submit(["hangs"], answer=answer, timeout_s=0.2)

            tasks.start_soon(ask)
            await until(counts.is_set)
            with AnswerMemory(account, is_written=True) as answer:
                assert (await pipeline.submit(["a"], answer=answer)).values == ["a"]
        assert account.held_bytes == 0
        assert pipeline.statistics().left == 1
    finally:
        may_end.set()
    await until(lambda: pipeline.statistics().left == 0)


async def test_a_value_that_contains_itself_is_counted_and_a_large_one_is_rejected() -> None:
    async def make(item: int) -> object:
        tree: dict[str, Any] = {"number": item, "children": []}
        tree["children"].append({"parent": tree})
        return tree if item else [0.5] * 10**6

    pipeline, account = Pipeline([make]), ByteAccount(10**6)
    with AnswerMemory(account, is_written=True) as answer:
        (value,) = (await pipeline.submit([1], answer=answer)).values
        assert value["children"][0]["parent"] is value
        assert 0 < account.held_bytes < 1000
    for streams in (True, False):
        with pytest.raises(TooLarge, match="send fewer inputs"):
            await counted(pipeline, [0], account, streams=streams)
    assert account.held_bytes == account.waiting == 0
    assert is_idle(pipeline)


class Wordless(StagedPoolError):
    """An error of a user that has no text."""

    def __str__(self) -> str:
        raise SystemExit(3)


@pytest.mark.parametrize("on_error", ["fail", "skip"])
async def test_an_error_whose_own_methods_fail_is_named_by_its_class(on_error: str) -> None:
    async def make(item: int) -> object:
        if item == BAD:
            raise Wordless
        return item

    pipeline = Pipeline([PipelineStage("user", function=make, on_error=on_error)])  # type: ignore[arg-type]
    message = f"Item {BAD}, stage user: Wordless."
    if on_error == "fail":
        with pytest.raises(StageFailed, match=message):
            await pipeline.submit(list(range(10)))
    else:
        (error,) = (await pipeline.submit(list(range(10)))).errors
        assert str(error.error) == message
    assert is_idle(pipeline)
