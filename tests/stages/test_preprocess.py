"""The preprocess stage: shared calls, parts, failures, and calls that hang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio
import pytest

from staged_pool.stages.channel import Channel
from staged_pool.stages.errors import Abandoned, InvalidInput, StagedPoolError
from staged_pool.stages.preprocess import PreprocessStage
from staged_pool.stages.scheduling.service_time import ServiceTimeModel
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.work import Prepared, Request
from tests.support.tickets import NoLoad, a_plan
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

A = TypeVar("A")
T = TypeVar("T")
Result = Prepared[str] | tuple[Prepared[str], ...] | StagedPoolError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def prepared(text: str) -> Prepared[str]:
    return Prepared(text.upper(), len(text), identity=text.encode())


class World:
    """A preprocess stage between two channels, whose calls run on the event loop."""

    def __init__(
        self,
        prepare: Callable[[str], Result] = prepared,
        *,
        chunk_items: int = 100,
        workers: int = 1,
        needs_s: float = 0.0,
    ) -> None:
        self.inputs = Channel[Sequence[Item[str]]]("preprocess", 1000, len)
        self.items = Channel[Sequence[Item[str]]]("batch", 1000)
        self.clock = Clock()
        self.calls: list[list[str]] = []
        self.gate = anyio.Event()
        self.gate.set()
        self._prepare = prepare
        self.stage = PreprocessStage[str, str](
            self.inputs.receiver,
            self.items.sender,
            preprocess=self._preprocess,
            offload=self._offload,
            ahead_s=lambda ticket: needs_s,
            service_time=ServiceTimeModel(),
            options=StageOptions(clock=self.clock),
            chunk_items=chunk_items,
            workers=workers,
        )

    async def _offload(self, function: Callable[[A], T], argument: A) -> T:
        await self.gate.wait()
        return function(argument)

    def _preprocess(self, texts: Sequence[str]) -> list[Result]:
        self.calls.append(list(texts))
        return [self._prepare(text) for text in texts]

    def send(self, *texts: str, deadline: float = 1e9) -> Ticket:
        ticket = Ticket(Request, lambda result: result, NoLoad(), deadline=deadline)
        ticket.expect(a_plan(len(texts)))
        items = [Item(ticket, index, text, self.clock.now) for index, text in enumerate(texts)]
        assert self.inputs.sender.send_nowait(items)
        return ticket

    async def end(self) -> list[list[str]]:
        """End the stage, and return the lists of payloads that it sent."""
        self.inputs.sender.close()
        await self.stage.run()
        sent = [[item.payload for item in items] async for items in self.items.receiver]
        self.items.receiver.close()
        return sent


async def test_lists_that_wait_share_a_call_up_to_a_chunk() -> None:
    world = World(chunk_items=3)
    for text in "abcde":
        world.send(text, text * 2)
    assert await world.end() == [["A", "AA", "B", "BB"], ["C", "CC", "D", "DD"], ["E", "EE"]]
    assert world.calls == [["a", "aa", "b", "bb"], ["c", "cc", "d", "dd"], ["e", "ee"]]


async def test_an_input_that_is_cut_goes_on_as_its_parts() -> None:
    world = World(lambda text: tuple(prepared(letter) for letter in text))
    ticket = world.send("xy")
    world.inputs.sender.close()
    await world.stage.run()
    [items] = [items async for items in world.items.receiver]
    world.items.receiver.close()
    assert [(item.index, item.part, item.payload, item.tokens) for item in items] == [(0, 0, "X", 1), (0, 1, "Y", 1)]
    assert not ticket.deliver(items[0])
    assert ticket.deliver(items[1])


async def test_an_input_that_is_wrong_ends_its_request_and_no_other() -> None:
    world = World(lambda text: InvalidInput("no tokens", param="input") if text == "-" else prepared(text))
    wrong, right = world.send("a", "-"), world.send("b")
    assert await world.end() == [["A", "B"]]
    assert isinstance(wrong.error, InvalidInput)
    assert (wrong.error.index, right.settled) == (1, False)
    assert world.stage.meter.dropped["failed"] == 1


async def test_a_call_that_raises_is_repeated_in_halves_until_the_culprit_is_alone() -> None:
    def prepare(text: str) -> Prepared[str]:
        if text == "-":
            raise ValueError("a bug")
        return prepared(text)

    world = World(prepare)
    wrong = world.send("-")
    others = [world.send(text) for text in "abc"]
    assert await world.end() == [["A", "B", "C"]]
    assert wrong.error is not None
    assert not any(ticket.settled for ticket in others)


async def test_nothing_is_prepared_for_callers_who_have_left_or_cannot_be_in_time() -> None:
    world = World(needs_s=2.0)
    left, late = world.send("left"), world.send("late", deadline=1.0)
    world.send("kept", deadline=3.0)
    left.fail(Abandoned("left"))
    assert await world.end() == [["KEPT"]]
    assert world.calls == [["kept"]]
    assert late.settled
    assert world.stage.meter.dropped == {"abandoned": 1, "expired": 1, "failed": 0}


async def test_a_list_of_which_nothing_is_left_is_passed_on_empty() -> None:
    """The batch stage may be waiting for it."""
    world = World()
    world.send("left").fail(Abandoned("left"))
    assert await world.end() == [[]]


async def test_callers_who_left_while_the_call_waited_for_a_thread_cost_nothing() -> None:
    world = World()
    world.gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.stage.run)
        ticket = world.send("left")
        await until(lambda: world.stage.preparing == 1)
        ticket.fail(Abandoned("left"))
        world.gate.set()
        world.inputs.sender.close()
    world.items.receiver.close()
    assert world.calls == []
    assert world.stage.call_s == 0.0  # no time was learned of a call that did nothing


async def test_calls_that_run_for_too_long_are_counted_and_all_of_them_are_a_stuck_stage() -> None:
    world = World(workers=2)
    world.gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.stage.run)
        world.send("a")
        await until(lambda: world.stage.calls == 1)
        world.clock.now = 6.0
        world.send("b")
        await until(lambda: world.stage.calls == 2)
        world.clock.now = 10.0
        assert (world.stage.overdue(10.0), world.stage.next_overdue_s(10.0)) == (1, 6.0)
        assert not world.stage.is_stuck(10.0)
        world.clock.now = 16.0
        assert (world.stage.overdue(10.0), world.stage.next_overdue_s(10.0)) == (2, 10.0)
        assert world.stage.is_stuck(10.0)
        world.gate.set()
        world.inputs.sender.close()
    world.items.receiver.close()
    assert (world.stage.calls, world.stage.preparing) == (0, 0)
