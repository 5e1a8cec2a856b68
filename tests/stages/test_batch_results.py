"""Rows of batches: given to items and followers, cached for later requests, and counted."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from staged_pool.stages.batch_results import BatchResults
from staged_pool.stages.device_slots import Execution
from staged_pool.stages.errors import ModelFailed
from staged_pool.stages.meter import StageMeter
from staged_pool.stages.scheduling.batch_former import BatchFormer
from staged_pool.stages.scheduling.coalescing import Coalescer, RowReuse
from staged_pool.stages.supervise import custody
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.work import Request
from tests.support.tickets import NoLoad, a_plan


class Cached:
    """Rows by identity."""

    def __init__(self) -> None:
        self.rows: dict[Hashable, str] = {}

    def get(self, identity: Hashable, payload: str) -> str | None:
        return self.rows.get(identity)

    def keep(self, identity: Hashable, row: str) -> None:
        self.rows.setdefault(identity, row)


class World:
    def __init__(self) -> None:
        self.cached, self.frozen = Cached(), list[str]()
        self.former = BatchFormer[Item[str]](max_items=10, max_batch_tokens=100, pads=True)
        self.coalescer = Coalescer(self.former)
        self.meter = StageMeter("batch", 1)
        reuse: RowReuse[str, str] = RowReuse(freeze=self.frozen.append, cached=self.cached)
        self.results = BatchResults[str, str](self.meter, "postprocess", None, self.coalescer, reuse)

    def item(self, text: str, *, sent_at: float = 0.0) -> Item[str]:
        ticket = Ticket(Request, lambda result: result, NoLoad())
        ticket.expect(a_plan(1))
        return Item(ticket, 0, text, sent_at, tokens=len(text), identity=text)

    def settle(self, *items: Item[str], results: list[str | ModelFailed]) -> list[Item[str]]:
        for item in items:
            self.coalescer.add(item)
        batch = self.coalescer.take(lambda item: True)
        assert batch is not None
        with custody("batch", [item.ticket for item in batch.items]) as held:
            done = self.results.settle(batch, results, Execution(0, began_at=5.0, ended_at=7.0), held)
            held.handed_on()
        return done


def test_a_row_is_cached_and_recalled_without_the_device() -> None:
    world = World()
    assert world.results.take_cached(world.item("a"), 1.0) is None
    world.settle(world.item("a"), results=["A"])
    again = world.results.take_cached(world.item("a", sent_at=8.0), 9.0)
    assert again is not None
    times = again.ticket.timeline
    assert (again.payload, again.sent_at, times.queue_s, times.device_s) == ("A", 9.0, 1.0, 0.0)
    assert (world.results.cached_items, world.results.tokens) == (1, 1)


def test_followers_get_the_row_of_their_leader_which_is_frozen() -> None:
    world = World()
    done = world.settle(world.item("a"), world.item("a"), results=["A"])
    assert [item.payload for item in done] == ["A", "A"]
    assert (world.frozen, world.results.coalesced, world.meter.done) == (["A"], 1, 2)


def test_a_row_of_one_item_stays_its_callers_own() -> None:
    world = World()
    world.settle(world.item("a"), results=["A"])
    assert world.frozen == []


def test_an_error_goes_to_the_whole_group_and_is_not_cached() -> None:
    world = World()
    items = world.item("a"), world.item("a")
    assert world.settle(*items, results=[ModelFailed("NaN")]) == []
    assert [type(item.ticket.error) for item in items] == [ModelFailed, ModelFailed]
    assert items[0].ticket.error is not items[1].ticket.error
    assert world.cached.rows == {}
    assert world.meter.dropped["failed"] == 2


def test_padding_is_counted_apart_from_the_tokens_of_items() -> None:
    world = World()
    world.settle(world.item("a"), world.item("abc"), results=["A", "ABC"])
    assert (world.results.tokens, world.results.padding_tokens) == (4, 2)


@pytest.mark.parametrize(("sent_at", "queue_s", "device_s"), [(1.0, 4.0, 2.0), (6.0, 0.0, 1.0)])
def test_the_times_of_an_item_begin_with_its_own_arrival(sent_at: float, queue_s: float, device_s: float) -> None:
    """A follower may come while its leader is on the device."""
    world = World()
    item = world.item("a", sent_at=sent_at)
    world.settle(item, results=["A"])
    assert (item.ticket.timeline.queue_s, item.ticket.timeline.device_s) == (queue_s, device_s)
