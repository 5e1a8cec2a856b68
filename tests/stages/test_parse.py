"""The parse stage: decoding, planning, feeding, and errors that end one request alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import pytest

from staged_pool.stages.channel import Channel
from staged_pool.stages.errors import InvalidInput, OutOfMemory, StagedPoolError, StageFailed
from staged_pool.stages.feeding import FeedQueue
from staged_pool.stages.parse import Arrival, ParseStage
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.work import Plan, Request
from tests.support.tickets import NoLoad
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

A = TypeVar("A")
T = TypeVar("T")
INLINE_BYTES = 100


class Fetching:
    """Completes inputs that begin with `url `, once the test allows it."""

    limit = 1

    def __init__(self) -> None:
        self.open = anyio.Event()
        self.error: StagedPoolError | None = None

    def is_complete(self, given: str) -> bool:
        return not given.startswith("url ")

    @asynccontextmanager
    async def completing(self, item: Item[str]) -> AsyncIterator[str | None]:
        await self.open.wait()
        if self.error is not None:
            item.ticket.fail_input(item.index, self.error)
            yield None
        else:
            yield item.payload.removeprefix("url ")


class World:
    """A parse stage in front of a channel that the test reads."""

    def __init__(self, accept: Callable[[Ticket, Request], Plan[str]] | None = None) -> None:
        self.arrivals = Channel[Arrival]("parse", 10)
        self.lists = Channel[Sequence[Item[str]]]("preprocess", 100, len)
        self.offloaded = 0
        self.completer = Fetching()
        feed = FeedQueue[str](None, self.lists.sender, chunk_items=2, clock=lambda: 0.0)
        self.stage = ParseStage[str](
            self.arrivals.receiver,
            {None: feed},
            lane_of=lambda given: None,
            accept=accept or (lambda ticket, request: Plan(str(request.model).split(","), lambda rows, tokens: rows)),
            completer=self.completer,
            offload=self._offload,
            options=StageOptions(clock=lambda: 0.0),
            inline_bytes=INLINE_BYTES,
            workers=1,
        )

    async def _offload(self, function: Callable[[A], T], argument: A) -> T:
        self.offloaded += 1
        return function(argument)

    def send(self, decode: Callable[[], Request] | str, *, body_bytes: int = 1) -> Ticket:
        """Send a request, or one with these inputs, between commas."""
        ticket = Ticket(decode if callable(decode) else lambda: Request(model=decode), lambda result: result, NoLoad())
        assert self.arrivals.sender.send_nowait(Arrival(ticket, body_bytes, 0.0))
        return ticket

    async def end(self) -> list[list[str]]:
        """End the stage, and return the lists of inputs that it fed."""
        self.arrivals.sender.close()
        await self.stage.run()
        fed = [[item.payload for item in items] async for items in self.lists.receiver]
        self.lists.receiver.close()
        return fed


def decode_with(error: BaseException) -> Callable[[], Request]:
    def decode() -> Request:
        raise error

    return decode


async def test_inputs_go_on_in_lists_of_a_chunk() -> None:
    world = World()
    ticket = world.send("a,b,c")
    assert await world.end() == [["a", "b"], ["c"]]
    assert (ticket.settled, ticket.timeline.items) == (False, 3)


async def test_large_bodies_are_decoded_outside_the_event_loop() -> None:
    world = World()
    world.send("a", body_bytes=INLINE_BYTES)
    world.send("b", body_bytes=INLINE_BYTES + 1)
    assert await world.end() == [["a"], ["b"]]
    assert world.offloaded == 1


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (InvalidInput("empty", param="input"), InvalidInput),
        (ValueError("a bug"), StageFailed),
        (MemoryError(), OutOfMemory),
    ],
)
async def test_a_body_that_cannot_be_decoded_fails_its_own_request(
    raised: Exception, error: type[StagedPoolError]
) -> None:
    world = World()
    wrong, right = world.send(decode_with(raised)), world.send("a")
    assert await world.end() == [["a"]]
    assert type(wrong.error) is error
    assert (right.settled, world.stage.meter.dropped["failed"], world.stage.meter.crashes) == (False, 1, 0)


async def test_a_request_that_the_engine_rejects_is_not_fed() -> None:
    def accept(ticket: Ticket, request: Request) -> Plan[str]:
        raise InvalidInput("too long", param="input", index=1)

    world = World(accept)
    ticket = world.send("a")
    assert await world.end() == []
    assert str(ticket.error) == "too long"


async def test_a_settled_request_is_not_decoded() -> None:
    world = World()
    ticket = world.send(decode_with(AssertionError("decoded")))
    ticket.fail(InvalidInput("gone"))
    assert await world.end() == []
    assert world.stage.meter.dropped["failed"] == 1


async def test_an_input_that_is_fetched_holds_up_no_other_and_no_worker() -> None:
    world = World()
    world.send("url a,b")
    world.send("c")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.stage.run)
        await until(lambda: world.lists.waiting == 2)
        world.completer.open.set()
        await until(lambda: world.lists.waiting == 3)
        world.arrivals.sender.close()
    assert [[item.payload for item in items] async for items in world.lists.receiver] == [["b"], ["c"], ["a"]]
    world.lists.receiver.close()


async def test_a_fetch_that_fails_ends_its_request() -> None:
    world = World()
    world.completer.error = InvalidInput("no such image", param="image_url")
    world.completer.open.set()
    ticket = world.send("a,url b")
    assert await world.end() == [["a"]]
    assert isinstance(ticket.error, InvalidInput)
    assert ticket.error.index == 1
