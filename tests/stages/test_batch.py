"""The batch stage: batches of what waits, on a device whose calls run on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio
import pytest

from staged_pool.stages.batch import BatchStage
from staged_pool.stages.batch_parts import BatchDevice, BatchScheduling, NearbyWork
from staged_pool.stages.channel import Channel
from staged_pool.stages.errors import Abandoned, DeviceLost, ModelFailed, OutOfMemory, StagedPoolError
from staged_pool.stages.exception_groups import only_error
from staged_pool.stages.scheduling.batch_budget import Budget
from staged_pool.stages.scheduling.batch_former import BatchFormer
from staged_pool.stages.scheduling.coalescing import RowReuse
from staged_pool.stages.scheduling.service_time import ServiceTimeModel
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.work import Request
from tests.support.tickets import NoLoad, a_plan
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

A = TypeVar("A")
T = TypeVar("T")
Outcome = str | StagedPoolError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def capitals(texts: Sequence[str]) -> Sequence[Outcome]:
    return [text.upper() for text in texts]


class World:
    """A batch stage between two channels. A letter is a token; its row is the capital."""

    def __init__(
        self,
        forward: Callable[[Sequence[str]], Sequence[Outcome]] = capitals,
        *,
        slots: int = 1,
        ahead: int = 0,
        max_tokens: int = 10,
        coalesce: bool = False,
        nearby: NearbyWork | None = None,
    ) -> None:
        self.items = Channel[Sequence[Item[str]]]("batch", 100)
        self.rows = Channel[Sequence[Item[str]]]("postprocess", 100)
        self.clock = Clock()
        self.batches: list[list[str]] = []
        self.has_core = True
        self.gate = anyio.Event()
        self.gate.set()
        self._run = forward
        self._device = anyio.Semaphore(slots)
        former = BatchFormer[Item[str]](max_items=100, max_batch_tokens=max_tokens, pads=False, slots=slots)
        self.budget = Budget(max_tokens)
        self.stage = BatchStage[str, str](
            self.items.receiver,
            self.rows.sender,
            device=BatchDevice(forward=self._forward, offload=self._offload, slots=slots, ahead=ahead),
            scheduling=BatchScheduling(
                former=former,
                service_time=ServiceTimeModel(),
                budget=self.budget,
                fed_tokens=1000,
                reuse=RowReuse(freeze=lambda row: None) if coalesce else None,
            ),
            nearby=nearby or NearbyWork(preparing=lambda: 0, ready_s=lambda: 0.0),
            options=StageOptions(clock=self.clock),
        )

    async def _offload(self, function: Callable[[A], T], argument: A) -> T:
        async with self._device:  # as on a device, calls that are handed over ahead keep their order
            await self.gate.wait()
            return function(argument)

    def _forward(self, payloads: Sequence[str], at_once: int) -> Sequence[Outcome]:
        self.batches.append(list(payloads))
        self.clock.now += 1.0
        return self._run(payloads)

    def send(self, *texts: str) -> Ticket:
        ticket = Ticket(Request, lambda result: result, NoLoad())
        ticket.expect(a_plan(len(texts)))
        items = [
            Item(ticket, index, text, self.clock.now, tokens=len(text), identity=text)
            for index, text in enumerate(texts)
        ]
        assert self.items.sender.send_nowait(items)
        return ticket

    async def end(self) -> list[str]:
        """End the stage, and return the rows that it sent."""
        self.items.sender.close()
        await self.stage.run()
        sent = [item.payload async for items in self.rows.receiver for item in items]
        self.rows.receiver.close()
        return sent


async def test_all_that_waits_goes_in_batches_within_the_budget() -> None:
    world = World(max_tokens=4)
    for text in ("aa", "bb", "cc"):
        world.send(text)
    assert await world.end() == ["AA", "BB", "CC"]
    assert world.batches == [["aa", "bb"], ["cc"]]
    assert world.stage.triggers == {"cost": 1, "demand": 1}


async def test_an_item_larger_than_the_budget_goes_alone() -> None:
    world = World(max_tokens=2)
    world.send("abcdef", "x")
    assert sorted(await world.end()) == ["ABCDEF", "X"]
    assert sorted(world.batches) == [["abcdef"], ["x"]]


async def test_what_comes_while_a_batch_runs_goes_in_the_next() -> None:
    world = World()
    world.gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.stage.run)
        world.send("a")
        await until(lambda: world.stage.running == 1)
        world.send("b")
        world.send("c")
        await until(lambda: world.stage.waiting == 2)
        world.gate.set()
        world.items.sender.close()
    world.rows.receiver.close()
    assert world.batches == [["a"], ["b", "c"]]


async def test_a_batch_is_handed_over_ahead_where_more_than_a_full_one_waits() -> None:
    world = World(ahead=1, max_tokens=2)
    world.gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.stage.run)
        world.send("aa")
        await until(lambda: world.stage.running == 1)
        world.send("bb")
        world.send("cc")
        await until(lambda: world.stage.waiting == 1)  # one of them is on its way to the device
        world.gate.set()
        world.items.sender.close()
    world.rows.receiver.close()
    assert sorted(world.batches) == [["aa"], ["bb"], ["cc"]]


async def test_items_of_callers_who_left_take_no_place_in_a_batch() -> None:
    world = World()
    world.send("gone").fail(Abandoned("left"))
    world.send("kept")
    assert await world.end() == ["KEPT"]
    assert world.batches == [["kept"]]
    assert world.stage.meter.dropped["abandoned"] == 1


async def test_an_input_that_fails_takes_no_other_with_it() -> None:
    world = World(lambda texts: [ModelFailed("NaN") if text == "-" else text.upper() for text in texts])
    wrong, right = world.send("-", "a"), world.send("b")
    assert await world.end() == ["B"]
    assert isinstance(wrong.error, ModelFailed)
    assert (wrong.error.index, right.settled) == (0, False)


async def test_a_batch_without_memory_is_halved_and_the_budget_falls() -> None:
    def forward(texts: Sequence[str]) -> Sequence[Outcome]:
        if len(texts) > 2:
            raise OutOfMemory("no room")
        return [text.upper() for text in texts]

    world = World(forward)
    for text in "abcd":
        world.send(text)
    assert sorted(await world.end()) == ["A", "B", "C", "D"]
    assert world.batches == [["a", "b", "c", "d"], ["a", "b"], ["c", "d"]]
    assert world.budget.tokens < 10


async def test_one_input_without_memory_lowers_no_budget() -> None:
    def forward(texts: Sequence[str]) -> Sequence[Outcome]:
        if "x" in texts:
            raise OutOfMemory("no room")
        return [text.upper() for text in texts]

    world = World(forward)
    wrong = world.send("x")
    world.send("a")
    assert await world.end() == ["A"]
    assert isinstance(wrong.error, OutOfMemory)
    assert world.budget.tokens == 10


async def test_equal_items_of_a_tenant_go_once_and_all_get_the_row() -> None:
    world = World(coalesce=True)
    for _ in range(3):
        world.send("a")
    assert await world.end() == ["A", "A", "A"]
    assert world.batches == [["a"]]
    assert world.stage.results.coalesced == 2


async def test_a_lost_device_ends_the_stage_and_fails_what_it_held() -> None:
    def forward(texts: Sequence[str]) -> Sequence[Outcome]:
        raise DeviceLost("gone")

    world = World(forward)
    ticket = world.send("a")
    with pytest.raises((DeviceLost, ExceptionGroup)) as caught:
        await world.end()
    assert isinstance(only_error(caught.value), DeviceLost)
    assert isinstance(ticket.error, DeviceLost)
    world.rows.receiver.close()


async def test_a_free_slot_that_starts_nothing_says_why() -> None:
    world = World(nearby=NearbyWork(preparing=lambda: 0, ready_s=lambda: 0.0, core_is_free=lambda: world.has_core))
    world.has_core = False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.stage.run)
        await until(lambda: world.stage.holds["empty"] == 1)
        world.send("a")
        await until(lambda: world.stage.holds["cores"] == 1)
        world.has_core = True
        world.send("b")
        world.items.sender.close()
    world.rows.receiver.close()
    assert world.batches == [["a", "b"]]
    assert world.stage.holds == {"empty": 1, "cores": 1}


async def test_tokens_of_callers_who_left_during_the_forward_are_counted_as_wasted() -> None:
    tickets: list[Ticket] = []

    def forward(texts: Sequence[str]) -> Sequence[Outcome]:
        tickets[0].fail(Abandoned("left"))
        return [text.upper() for text in texts]

    world = World(forward)
    tickets += [world.send("abc"), world.send("de")]
    assert await world.end() == ["DE"]
    assert (world.stage.results.tokens, world.stage.results.wasted_tokens) == (5, 3)
