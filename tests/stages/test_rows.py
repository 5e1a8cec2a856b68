"""Streams of rows: in the order in which they come, and with an end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio
import pytest

from staged_pool.stages.rows import RowStream, given_rows
from staged_pool.stages.work import Plan
from tests.support.tickets import a_plan

pytestmark = pytest.mark.anyio

A = TypeVar("A")
T = TypeVar("T")


def finish_some(rows: Sequence[object], fresh: Sequence[int]) -> tuple[Sequence[int], object]:
    """Complete the results of even places alone."""
    places = [place for place in fresh if place % 2 == 0]
    return places, [rows[place] for place in places]


def a_stream() -> RowStream:
    stream = RowStream()
    stream.expect(Plan(range(4), lambda rows, tokens: list(rows), finish_some))
    return stream


async def at_once(function: Callable[[A], T], argument: A) -> T:
    return function(argument)


async def test_rows_that_came_meanwhile_come_together() -> None:
    stream = a_stream()
    stream.add(2, "third")
    stream.add(0, "first")
    finish = await stream.next()
    stream.add(1, "second")  # belongs to the next call
    assert finish is not None
    assert finish() == ([2, 0], ["third", "first"])


async def test_a_waiting_caller_is_woken_by_a_row() -> None:
    stream, results = a_stream(), []

    async def take() -> None:
        finish = await stream.next()
        assert finish is not None
        results.append(finish())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        await anyio.lowlevel.checkpoint()
        stream.add(0, "first")
    assert results == [([0], ["first"])]


@pytest.mark.parametrize("keep", [True, False])
async def test_the_end_comes_behind_the_rows_that_are_kept(keep: bool) -> None:
    stream = a_stream()
    stream.add(0, "first")
    stream.close(keep=keep)
    if keep:
        assert await stream.next() is not None
    assert await stream.next() is None


async def test_a_request_with_a_whole_result_only_cannot_be_streamed() -> None:
    stream = RowStream()
    stream.expect(a_plan(1))
    stream.add(0, "row")
    with pytest.raises(RuntimeError, match="streamed"):
        await stream.next()


async def test_results_are_written_and_given_one_by_one_and_nothing_for_rows_that_complete_none() -> None:
    stream = a_stream()
    given: list[str] = []

    async def give(text: str) -> None:
        given.append(text)
        if text == "[0] ['first']":
            stream.add(1, "second")  # completes no result
            stream.add(2, "third")
            stream.close(keep=True)

    stream.add(0, "first")
    async with given_rows(stream, at_once, lambda places, result: f"{list(places)} {result}", give):
        pass
    assert given == ["[0] ['first']", "[2] ['third']"]
