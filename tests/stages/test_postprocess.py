"""Postprocess: other tasks that run between answers, and blocked outlets."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import anyio.lowlevel
import pytest

from staged_pool.stages.channel import Channel, Sender
from staged_pool.stages.offload import Offload, ThreadOffload
from staged_pool.stages.postprocess import PostprocessStage
from staged_pool.stages.scheduling.tuning import ANSWERING_S
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.ticket import Encode, Item, Ticket
from staged_pool.stages.work import Request
from tests.support.gates import Gate
from tests.support.tickets import NoLoad, a_plan

pytestmark = pytest.mark.anyio

A = TypeVar("A")
T = TypeVar("T")

Rows = Sequence[Item[object]]

WORKERS = 4
SMALL = 2
"""The most rows of a small answer."""


@asynccontextmanager
async def postprocess_of(
    lists: Sequence[Rows],
    *,
    clock: Callable[[], float] = time.perf_counter,
    offload: Offload | None = None,
) -> AsyncIterator[Sender[Rows]]:
    """A stage that finds these lists when it begins."""
    channel = Channel[Rows]("postprocess", len(lists))
    for rows in lists:
        assert channel.sender.send_nowait(rows)
    stage = PostprocessStage[object](
        channel.receiver,
        offload=offload or ThreadOffload(1),
        options=StageOptions(clock=clock),
        numbers=lambda row: 1,
        inline_items=SMALL,
        workers=WORKERS,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage.run)
        yield channel.sender
        channel.sender.close()


def rows_of(encode: Encode, *, rows: int = 1) -> tuple[Ticket, Rows]:
    """Return the ticket and rows of one request."""
    ticket = Ticket(Request, encode, NoLoad())
    ticket.expect(a_plan(rows))
    return ticket, [Item(ticket, index, f"row {index}", 0.0, 1) for index in range(rows)]


async def longest_run(answers: int) -> int:
    """Count the longest run of answers while each takes two sevenths of `ANSWERING_S`."""
    answered = 0

    def write(_: object) -> None:
        nonlocal answered
        answered += 1

    of_each = answers // WORKERS
    lists = [[item for _ in range(of_each) for item in rows_of(write)[1]] for _ in range(WORKERS)]
    async with postprocess_of(lists, clock=lambda: answered * ANSWERING_S / 3.5):
        most = before = 0
        while answered < WORKERS * of_each:
            await anyio.lowlevel.checkpoint()
            most, before = max(most, answered - before), answered
    return most


async def test_other_tasks_run_however_many_lists_are_answered() -> None:
    assert 4 <= await longest_run(60) <= 8  # between two looks a task runs once or, on trio, twice


async def test_a_large_answer_waits_for_no_small_ones() -> None:
    answered = 0
    answered_before = None

    def write(_: object) -> None:
        nonlocal answered
        answered += 1

    async def offload(function: Callable[[A], T], argument: A, /) -> T:
        nonlocal answered_before
        answered_before = answered
        return function(argument)

    small = [item for _ in range(60) for item in rows_of(write)[1]]
    large = rows_of(write, rows=SMALL + 1)[1]
    async with postprocess_of([small, large], clock=lambda: answered * ANSWERING_S, offload=offload):
        pass
    assert answered == 61
    assert answered_before is not None
    assert answered_before < 10


async def test_small_answers_wait_for_no_large_one() -> None:
    gate, order = Gate(), list[str]()

    def write_large(_: object) -> None:
        gate()
        order.append("large")

    large, large_rows = rows_of(write_large, rows=SMALL + 1)
    beside, beside_rows = rows_of(lambda _: order.append("beside"), rows=SMALL)
    after, after_rows = rows_of(lambda _: order.append("after"))
    async with postprocess_of([[*large_rows, *beside_rows], after_rows]):
        with anyio.fail_after(30):
            await after.wait()
            await beside.wait()
            await gate.arrived()
            gate.open()
            await large.wait()
    assert order[-1] == "large"
