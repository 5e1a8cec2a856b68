"""Items that are the same work: who leads, who follows, and what becomes of these when the leader is gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.stages.errors import (
    Abandoned,
    DeadlineExceeded,
    InvalidInput,
    ModelFailed,
    OutOfMemory,
    Overloaded,
    StagedPoolError,
    StageFailed,
    detached,
)
from staged_pool.stages.scheduling.batch_former import BatchFormer
from staged_pool.stages.scheduling.coalescing import Coalescer
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.work import Request
from tests.support.tickets import NoLoad

RequestClass: TypeAlias = tuple[str | None, Priority]


class CountingLoad(NoLoad):
    """Knows how many tokens of a request are to go through the device."""

    def __init__(self) -> None:
        self.tokens = 0

    def tokenized(self, lane: Hashable, tokens: int) -> None:
        self.tokens += tokens

    def computed(self, lane: Hashable, tokens: int) -> None:
        self.tokens -= tokens

    def adjust_tokens(self, lane: Hashable, tokens: int) -> None:
        self.tokens -= tokens

    def delivered(self, numbers: int, left: int) -> None:
        pass

    def cached(self, lane: Hashable, tokens: int) -> None:
        self.tokens -= tokens


class World:
    """A queue, a device that is asked by hand, and requests of one-letter works.

    Args:
        max_batch_tokens: Of a batch.
        coalesce: See `Coalescer`.
        pads: See `BatchFormer`.
        even: Whether works are of two tokens; else each has a number of its own, up to `MOST`.
    """

    TOKENS = 2
    MOST = 13

    def __init__(
        self, *, max_batch_tokens: int = 100, coalesce: bool = True, pads: bool = False, even: bool = True
    ) -> None:
        self.even = even
        self.builder: BatchFormer[Item[str]] = BatchFormer(max_items=100, max_batch_tokens=max_batch_tokens, pads=pads)
        self.flights = Coalescer(self.builder, coalesce=coalesce)
        self.loads: dict[Ticket, CountingLoad] = {}

    def asks(self, works: str, tenant: Hashable = None, priority: Priority = Priority.INTERACTIVE) -> Ticket:
        load = CountingLoad()
        ticket = Ticket(Request, lambda result: None, load, tenant=tenant, priority=priority)
        self.loads[ticket] = load
        for index, work in enumerate(works):
            tokens = self.TOKENS if self.even else ord(work) * 7 % self.MOST + 1
            load.tokenized(None, tokens)
            self.flights.add(Item(ticket, index, work, 0.0, tokens, None, 0, work.encode()))
        return ticket

    def next_batch(self) -> Sequence[Item[str]] | None:
        batch = self.flights.take(lambda item: not item.ticket.settled)
        return None if batch is None else batch.items

    def land(self, batch: Sequence[Item[str]]) -> list[tuple[Ticket, int, str]]:
        """The device has done a batch: whose rows there are now, and of which work."""
        rows: list[tuple[Ticket, int, str]] = []
        for item in batch:
            self.loads[item.ticket].computed(None, item.tokens)
            for one in (item, *self.flights.end_group(item)):
                assert one.payload == item.payload
                rows.append((one.ticket, one.index, one.payload))
        return rows

    def lose(self, batch: Sequence[Item[str]]) -> None:
        """The worker that had a batch has crashed, and custody has settled its requests."""
        for item in batch:
            item.ticket.fail(StageFailed("a bug", stage="batch"))
        self.flights.requeue_followers(batch)

    def leave(self, ticket: Ticket) -> None:
        ticket.fail(Abandoned("the caller left"))

    def rest(self) -> str:
        """The works that still go, in their order, with a space between two batches."""
        batches = []
        while batch := self.next_batch():
            batches.append("".join(sorted(item.payload for item in batch)))
            self.land(batch)
        return " ".join(batches)

    def is_empty(self) -> bool:
        return not (len(self.builder.queue) or self.flights._joined or self.flights._groups or self.flights.following)


def test_of_those_that_are_alike_one_goes_and_all_get_its_row() -> None:
    world = World()
    one, two = world.asks("ab"), world.asks("aa")
    assert (len(world.builder.queue), world.builder.queue.waiting.tokens, world.flights.following) == (2, 4, 2)
    assert (world.loads[one].tokens, world.loads[two].tokens) == (4, 0), "who follows has nothing to do on the device"
    batch = world.next_batch()
    assert batch is not None
    assert sorted(item.payload for item in batch) == ["a", "b"]
    late = world.asks("b")
    assert len(world.builder.queue) == 0, "what is on the device is waited for, too"
    assert sorted(world.land(batch), key=str) == sorted(
        [(one, 0, "a"), (one, 1, "b"), (two, 0, "a"), (two, 1, "a"), (late, 0, "b")], key=str
    )
    assert world.is_empty()


def test_finished_work_begins_anew_for_a_later_request() -> None:
    world = World()
    world.asks("a")
    batch = world.next_batch()
    assert batch is not None
    world.land(batch)
    later = world.asks("a")
    assert [item.ticket for item in world.next_batch() or ()] == [later]


def test_without_identities_and_without_coalescing_each_goes_by_itself() -> None:
    world = World(coalesce=False)
    world.asks("aa")
    assert len(world.builder.queue) == 2
    world = World()
    ticket = world.asks("")
    for index in range(2):
        world.flights.add(Item(ticket, index, "a", 0.0, 2))
    assert len(world.builder.queue) == 2


def test_a_small_request_does_not_wait_for_the_turn_of_a_large_one_that_asks_for_the_same() -> None:
    world = World(max_batch_tokens=4)
    large, small = world.asks("abcdefghijz"), world.asks("z")
    batch = world.next_batch()
    assert batch is not None
    assert [(item.ticket, item.payload) for item in batch] == [(large, "a"), (small, "z")]
    late = world.asks("z")
    assert world.land(batch) == [(large, 0, "a"), (small, 0, "z"), (late, 0, "z")], "others follow the quicker one"
    assert world.rest() == "bc de fg hi jz"
    assert world.is_empty()


def test_when_the_leader_leaves_the_next_one_goes_in_the_turn_that_it_would_have_had() -> None:
    world = World(max_batch_tokens=World.TOKENS)
    leader = world.asks("a")
    follower = world.asks("a")
    third = world.asks("b")
    world.leave(leader)
    assert world.loads[follower].tokens == 0
    first = world.next_batch()
    assert first is not None
    if first[0].ticket is third:  # the leader was found to have left while this batch was cut
        world.land(first)
        first = world.next_batch()
    assert first is not None
    assert [item.ticket for item in first] == [follower]
    assert world.loads[follower].tokens == World.TOKENS, "it is to go through the device after all"
    assert world.land(first) == [(follower, 0, "a")]
    assert world.loads[follower].tokens == 0


def test_a_leader_who_leaves_while_the_device_works_takes_nobody_along() -> None:
    world = World()
    leader, follower = world.asks("a"), world.asks("a")
    batch = world.next_batch()
    assert batch is not None
    world.leave(leader)
    assert world.land(batch) == [(leader, 0, "a"), (follower, 0, "a")]
    assert world.is_empty()


def test_nobody_goes_where_all_have_left() -> None:
    world = World()
    for ticket in [world.asks("aa"), world.asks("a")]:
        world.leave(ticket)
    assert world.next_batch() is None
    assert world.is_empty()


def test_a_crash_of_the_leaders_worker_has_another_one_try() -> None:
    world = World()
    leader, gone, follower = world.asks("ab"), world.asks("a"), world.asks("a")
    last = world.asks("a")
    world.leave(gone)
    batch = world.next_batch()
    assert batch is not None
    world.lose(batch)
    again = world.next_batch()
    assert again is not None
    assert [(item.ticket, item.payload) for item in again] == [(follower, "a")]
    assert world.land(again) == [(follower, 0, "a"), (last, 0, "a")]
    assert leader.settled
    assert world.is_empty()


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("one", Priority.INTERACTIVE), ("two", Priority.INTERACTIVE)),
        (("one", Priority.INTERACTIVE), ("one", Priority.BULK)),
        ((None, Priority.INTERACTIVE), ("one", Priority.INTERACTIVE)),
    ],
)
def test_tenants_and_priorities_share_nothing(one: RequestClass, two: RequestClass) -> None:
    """Waits would tell one tenant of another's work; and each pays for its own."""
    world = World()
    world.asks("z", *one)
    world.asks("z", *two)
    assert (len(world.builder.queue), world.flights.following) == (2, 0)
    assert world.rest() == "zz"
    assert world.is_empty()


askers = st.tuples(st.sampled_from([None, "one", "two"]), st.sampled_from(Priority))


@given(st.lists(st.tuples(st.text("abcdefgh", min_size=1, max_size=8), askers), max_size=8), st.booleans())
def test_nobody_waits_longer_than_if_each_were_worked_on_by_itself(
    requests: list[tuple[str, RequestClass]], even: bool
) -> None:
    """An item waits for at most one of each sibling request, where lengths differ. This counts the tenant's own tokens.

    Turns are not more exact than that, and the fair queue decides between tenants.
    """

    def waits(world: World) -> dict[tuple[int, int], int]:
        """Tokens that have gone, one item at a time, when each row is there; of its own tenant, if lengths differ."""
        tickets = [world.asks(works, *asker) for works, asker in requests]
        after: dict[tuple[int, int], int] = {}
        gone: Counter[RequestClass | None] = Counter()
        while batch := world.next_batch():
            for item in batch:
                gone[None if even else requests[tickets.index(item.ticket)][1]] += item.tokens
            for ticket, index, _ in world.land(batch):
                place = tickets.index(ticket)
                after[place, index] = gone[None if even else requests[place][1]]
        return after

    shared, alone = (waits(World(max_batch_tokens=1, even=even, coalesce=coalesce)) for coalesce in (True, False))
    assert shared.keys() == alone.keys()
    siblings = Counter(asker for _, asker in requests)
    late = {
        (place, index): (shared[place, index], alone[place, index])
        for place, index in alone
        if shared[place, index] > alone[place, index] + (0 if even else World.MOST * (siblings[requests[place][1]] - 1))
    }
    assert late == {}


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.tuples(st.text("abc", min_size=1, max_size=5), askers)),
        st.tuples(st.sampled_from(["leave", "land", "lose"]), st.integers(0, 20)),
        st.tuples(st.just("take"), st.just(0)),
    ),
    max_size=60,
)


@given(steps, st.integers(1, 12), st.booleans())
def test_each_request_that_waits_gets_one_row_whatever_happens(
    script: list[tuple[str, int | tuple[str, RequestClass]]], max_batch_tokens: int, pads: bool
) -> None:
    world = World(max_batch_tokens=max_batch_tokens, pads=pads)
    asked: dict[tuple[Ticket, int], str] = {}
    got: dict[tuple[Ticket, int], list[str]] = {}
    on_device: list[Sequence[Item[str]]] = []
    tickets: list[Ticket] = []

    def take() -> bool:
        batch = world.next_batch()
        if batch is None:
            return False
        assert all(not item.ticket.settled for item in batch)
        on_device.append(batch)
        return True

    def land(batch: Sequence[Item[str]]) -> None:
        for ticket, index, row in world.land(batch):
            got.setdefault((ticket, index), []).append(row)

    for step, argument in script:
        if isinstance(argument, tuple):
            works, asker = argument
            ticket = world.asks(works, *asker)
            tickets.append(ticket)
            asked |= {(ticket, index): work for index, work in enumerate(works)}
        elif step == "take":
            take()
        elif step == "leave" and tickets:
            world.leave(tickets[argument % len(tickets)])
        elif step in ("land", "lose") and on_device:
            batch = on_device.pop(argument % len(on_device))
            land(batch) if step == "land" else world.lose(batch)
    while on_device or take():
        land(on_device.pop())
    for (ticket, index), work in asked.items():
        rows = got.get((ticket, index), [])
        assert rows == [work] if not ticket.settled else rows in ([], [work])
    assert world.is_empty()
    for ticket, load in world.loads.items():
        assert ticket.settled or load.tokens == 0


@pytest.mark.parametrize(
    "error",
    [
        ModelFailed("NaN", index=3),
        InvalidInput("wrong", param="input", index=1),
        OutOfMemory("no room"),
        StageFailed("a bug", stage="batch"),
        DeadlineExceeded("late", stage="batch"),
        Overloaded("full", retry_after_s=1.5),
    ],
)
def test_an_error_is_said_to_each_in_an_object_of_its_own(error: StagedPoolError) -> None:
    try:
        raise error
    except StagedPoolError:
        twin = detached(error)
    assert twin is not error
    assert (type(twin), str(twin), vars(twin)) == (type(error), str(error), vars(error))
    assert twin.__traceback__ is None
