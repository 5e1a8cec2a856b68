"""Shares of tenants, requests and priorities, against a slow and plain reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from staged_pool.stages.scheduling.batch_former import BatchFormer
from staged_pool.stages.scheduling.entries import Batch, BatchTrigger, Priority
from staged_pool.stages.scheduling.fair_queue import FairQueue
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.work import Request
from tests.support.tickets import NoLoad, wait_in

MOST = 40
"""Tokens of an item."""

token_counts = st.lists(st.integers(1, MOST), min_size=1, max_size=12)
requests = st.lists(token_counts, min_size=1, max_size=6)


def a_ticket(tenant: Hashable) -> Ticket:
    return Ticket(Request, lambda result: None, NoLoad(), tenant=tenant)


def a_builder(*, max_batch_tokens: int = 100, max_items: int = 1000, pads: bool = False) -> BatchFormer[Item[int]]:
    return BatchFormer(max_items=max_items, max_batch_tokens=max_batch_tokens, pads=pads)


def ask(
    builder: BatchFormer[Item[int]],
    token_counts: Sequence[int],
    tenant: Hashable = None,
    priority: Priority = Priority.INTERACTIVE,
    key: Hashable = None,
) -> Ticket:
    ticket = Ticket(Request, lambda result: None, NoLoad(), tenant=tenant, priority=priority)
    wait_in(builder, [Item(ticket, place, place, 0.0, tokens, key) for place, tokens in enumerate(token_counts)])
    return ticket


def take(builder: BatchFormer[Item[int]]) -> Batch[Item[int]]:
    batch = builder.take(lambda item: True)
    assert batch is not None
    return batch


def tokens_by_tenant(batch: Batch[Item[int]]) -> Counter[Hashable]:
    tokens: Counter[Hashable] = Counter()
    for item in batch.items:
        tokens[item.ticket.tenant] += item.tokens
    return tokens


def poured(amount: float, backlogs: Sequence[float]) -> list[float]:
    """Divide an amount equally, but give no one more than it has waiting."""
    got = [0.0] * len(backlogs)
    thirsty = list(range(len(backlogs)))
    while thirsty and amount > 1e-9:
        each = min(amount / len(thirsty), *[backlogs[i] - got[i] for i in thirsty])
        for i in thirsty:
            got[i] += each
        amount -= each * len(thirsty)
        thirsty = [i for i in thirsty if backlogs[i] - got[i] > 1e-9]
    return got


@given(st.lists(requests, min_size=1, max_size=5), st.integers(1, 200))
def test_tenants_and_their_requests_get_what_a_fluid_would_give_them(
    wanted: list[list[list[int]]], max_batch_tokens: int
) -> None:
    builder = a_builder(max_batch_tokens=max_batch_tokens)
    tickets = [[ask(builder, token_counts, tenant) for token_counts in each] for tenant, each in enumerate(wanted)]
    backlogs = [[sum(token_counts) for token_counts in each] for each in wanted]
    got: Counter[Ticket] = Counter()
    while builder.queue:
        for item in take(builder).items:
            got[item.ticket] += item.tokens
        shares = poured(got.total(), [sum(each) for each in backlogs])
        for tenant, of_tenant in enumerate(tickets):
            has = sum(got[ticket] for ticket in of_tenant)
            assert abs(has - shares[tenant]) <= len(wanted) * MOST
            for ticket, share in zip(of_tenant, poured(has, backlogs[tenant]), strict=True):
                assert abs(got[ticket] - share) <= len(of_tenant) * MOST


@given(
    st.lists(st.tuples(st.sampled_from("ab"), token_counts), min_size=1, max_size=30),
    st.integers(1, 200),
    st.sampled_from((1, 2, 5)),
)
@example(arrivals=[("a", [40] * 12)] * 2 + [("b", [1])] * 5 + [("b", [40] * 9)], max_batch_tokens=133, at_once=2)
@example(
    arrivals=[
        *[("a", [1])] * 4,
        ("a", [32]),
        ("b", [1, 1, 1, 19, 40, 40, 11, 38]),
        ("a", [1]),
        ("b", [2, 40, 40, 40]),
        ("a", [1]),
        ("b", [4, 40]),
        ("a", [11, 40, 40]),
        ("a", [17, 40, 40, 1]),
        ("a", [13]),
        ("b", [1]),
    ],
    max_batch_tokens=133,
    at_once=2,
)
def test_of_two_tenants_that_wait_none_is_ever_far_ahead(
    arrivals: list[tuple[str, list[int]]], max_batch_tokens: int, at_once: int
) -> None:
    builder = a_builder(max_batch_tokens=max_batch_tokens)
    left: Counter[str] = Counter()
    lead, least, most = 0, 0, 0
    coming = list(arrivals)
    while coming or builder.queue:
        for tenant, token_counts in coming[:at_once]:
            ask(builder, token_counts, tenant)
            left[tenant] += sum(token_counts)
        coming = coming[at_once:]
        if not builder.queue:
            continue
        tokens = tokens_by_tenant(take(builder))
        left["a"] -= tokens["a"]
        left["b"] -= tokens["b"]
        if left["a"] and left["b"]:
            lead += tokens["a"] - tokens["b"]
            least, most = min(least, lead), max(most, lead)
            # One that waits is never further ahead than the item that it had last, in either direction.
            assert most - least <= 2 * MOST, "over any stretch of time in which both wait"
        else:
            lead = least = most = 0


def test_one_request_does_not_wait_for_the_thousand_of_another_tenant() -> None:
    builder = a_builder(max_batch_tokens=100)
    for _ in range(1000):
        ask(builder, [10], "heavy")
    take(builder)
    light = ask(builder, [10] * 20, "light")
    assert builder.queue.ahead(light) == pytest.approx(400, abs=20), "of its own, and as much of the other's"
    served, left = 0, 20
    while left:
        batch = take(builder)
        served += batch.tokens
        left -= sum(item.ticket is light for item in batch.items)
    assert served <= 2 * 200 + 100, "it has half of the device"


def test_a_tenant_that_pauses_after_each_item_gains_nothing() -> None:
    builder = a_builder(max_batch_tokens=500)
    got: Counter[Hashable] = Counter()
    ask(builder, [20] * 5000, "steady")
    for _ in range(150):
        ask(builder, [500], "pausing")  # while all that it had is gone, or nearly
        while not got or builder.queue.tenants > 1:
            got += tokens_by_tenant(take(builder))
    assert got["pausing"] <= got["steady"] + 1000


@pytest.mark.parametrize("same_tenant", [False, True])
def test_who_uses_the_room_that_visitors_leave_owes_it_to_nobody(same_tenant: bool) -> None:
    builder = a_builder(max_batch_tokens=100)
    visitor = "steady" if same_tenant else "visitor"
    steady = ask(builder, [20] * 5000, "steady")
    for _ in range(100):
        ask(builder, [1], visitor)
        take(builder)
    newcomer = ask(builder, [20] * 100, visitor)
    tokens: Counter[Ticket] = Counter()
    for _ in range(10):
        for item in take(builder).items:
            tokens[item.ticket] += item.tokens
    assert abs(tokens[newcomer] - tokens[steady]) <= 2 * 20


def test_a_tenant_gets_on_however_many_new_ones_come() -> None:
    builder = a_builder(max_batch_tokens=20)
    ask(builder, [10] * 30, "large")
    batches, left, number = 0, 30, 0
    while left:
        for _ in range(2):  # as much as the device can do
            ask(builder, [10], number := number + 1)
        left -= tokens_by_tenant(take(builder))["large"] // 10
        batches += 1
        assert batches < 1000


@pytest.mark.parametrize("same_tenant", [True, False])
def test_where_small_entries_go_first_one_passes_large_ones_and_none_of_these_starves(same_tenant: bool) -> None:
    queue = FairQueue[Item[int]]()

    def add(number: int, tokens: int) -> None:
        ticket = tickets.setdefault(number, a_ticket(None if same_tenant else number))
        queue.add(Item(ticket, 0, number, 0.0, tokens))

    def take() -> int:
        entry = queue.first(lambda _: True)
        assert entry is not None
        queue.take(entry)
        queue.end_round()
        return entry.payload

    tickets: dict[int, Ticket] = {}
    for number in range(50):
        add(number, 100)
    for _ in range(70):
        add(take(), 100)  # each comes again at once
    before = Counter[int]()
    for small in range(1000, 2000):
        add(small, 1)
        while (number := take()) != small:
            before[number] += 1
            add(number, 100)
    assert sum(before.values()) <= 1000, "no more than one goes before each, of the fifty that wait"
    late = Counter[int]()
    for small in range(10_000, 20_000):
        add(small, 1)
        if (number := take()) < 50:
            late[number] += 1
            add(number, 100)
    assert set(late) == set(range(50)), "small ones without end keep nobody out"


def test_tenants_of_which_nothing_waits_are_forgotten() -> None:
    builder = a_builder(max_batch_tokens=20)
    ask(builder, [10] * 3000, "large")
    remembered = []
    for number in range(1000):
        ask(builder, [10], number)
        take(builder)
        remembered.append(builder.queue.tenants)
    assert max(remembered) <= 10
    while builder.queue:
        take(builder)
    assert builder.queue.tenants == 0


def test_interactive_work_goes_before_bulk_work_that_has_waited_longer() -> None:
    builder = a_builder(max_batch_tokens=20)
    bulk = ask(builder, [10] * 8, priority=Priority.BULK)
    ask(builder, [10] * 2)
    tickets = {item.ticket for item in take(builder).items}
    assert bulk not in tickets
    assert {item.ticket for item in take(builder).items} == {bulk}


@given(st.lists(st.integers(1, MOST), min_size=60, max_size=200), st.integers(1, 400), st.booleans())
def test_bulk_work_has_an_eighth_of_the_device_while_interactive_work_waits(
    sizes: list[int], max_batch_tokens: int, pads: bool
) -> None:
    builder = a_builder(max_batch_tokens=max_batch_tokens, pads=pads)
    ask(builder, sizes, priority=Priority.BULK)
    ask(builder, sizes * 8)
    got: Counter[Priority] = Counter()
    left = sum(sizes)
    while True:
        batch = take(builder)
        for item in batch.items:
            got[item.ticket.priority] += item.tokens
        if got[Priority.BULK] == left or got[Priority.INTERACTIVE] == 8 * left:
            break
        most = max(max_batch_tokens, MOST) if pads else MOST
        lag = got[Priority.INTERACTIVE] / 7 - got[Priority.BULK]
        assert -most <= lag <= MOST + max(max_batch_tokens, MOST) / 7, "it lags by an item, and by what a batch adds"


def test_bulk_work_fills_a_batch_that_interactive_work_leaves_room_in() -> None:
    builder = a_builder(max_batch_tokens=50)
    ask(builder, [10] * 10, priority=Priority.BULK)
    ask(builder, [10] * 2)
    batch = take(builder)
    assert Counter(item.ticket.priority for item in batch.items) == {Priority.INTERACTIVE: 2, Priority.BULK: 3}
    assert batch.trigger is BatchTrigger.BUDGET


def test_a_small_entry_does_not_wait_for_the_large_ones_of_others() -> None:
    """However many these are: their requests have had as much as they could, and each is owed about a large one."""
    builder = a_builder(max_batch_tokens=40)
    for _ in range(50):
        ask(builder, [40] * 10)
    for _ in range(75):  # half of them are behind the others
        take(builder)
    late = ask(builder, [1])
    assert [item.ticket for item in take(builder).items] == [late]


def test_bulk_work_makes_no_full_batch() -> None:
    builder = a_builder(max_batch_tokens=20)
    for _ in range(50):
        ask(builder, [10], priority=Priority.BULK)
    assert not builder.has_full_batch
    for _ in range(4):
        ask(builder, [10])
    assert builder.has_full_batch


@given(
    st.lists(
        st.tuples(
            st.sampled_from((None, "a", "b", "c")),
            st.sampled_from(Priority),
            st.sampled_from("xy"),
            token_counts,
            st.booleans(),
        ),
        max_size=20,
    ),
    st.integers(1, 8),
    st.integers(1, 100),
    st.booleans(),
    st.integers(1, 5),
)
def test_whatever_is_wanted_goes_once_and_the_device_is_never_left_without_work(
    arrivals: list[tuple[str | None, Priority, str, list[int], bool]],
    max_items: int,
    max_batch_tokens: int,
    pads: bool,
    at_once: int,
) -> None:
    builder = a_builder(max_items=max_items, max_batch_tokens=max_batch_tokens, pads=pads)
    unwanted: set[Ticket] = set()
    waiting: set[tuple[Ticket, int]] = set()
    coming = list(arrivals)
    while coming or waiting:
        for tenant, priority, key, sizes, wanted in coming[:at_once]:
            ticket = ask(builder, sizes, tenant, priority, key)
            if wanted:
                waiting |= {(ticket, place) for place in range(len(sizes))}
            else:
                unwanted.add(ticket)
        coming = coming[at_once:]
        batch = builder.take(lambda item: item.ticket not in unwanted)
        if batch is None:
            assert not waiting
            continue
        taken = {(item.ticket, item.index) for item in batch.items}
        assert len(taken) == len(batch.items) <= max_items
        assert taken <= waiting
        assert len({item.batch_key for item in batch.items}) == 1
        assert len(taken) == 1 or batch.tokens <= max_batch_tokens
        waiting -= taken
    assert builder.take(lambda item: item.ticket not in unwanted) is None
    assert (
        len(builder.queue),
        builder.queue.waiting.tokens,
        builder.queue.waiting.requests,
        builder.queue.tenants,
    ) == (
        0,
        0,
        0,
        0,
    )


@given(st.integers(1, 20), st.integers(0, 20), st.integers(0, 20))
def test_what_goes_before_a_request_is_no_more_than_what_really_does(own: int, others: int, bulk: int) -> None:
    builder = a_builder(max_batch_tokens=10)
    for _ in range(others):
        ask(builder, [10] * 5, "other")
    for _ in range(bulk):
        ask(builder, [10] * 5, "other", Priority.BULK)
    ticket = ask(builder, [10] * own, "own")
    ahead, served, left = builder.queue.ahead(ticket), 0, own
    wait_in(builder, [Item(ticket, own, own, 0.0, 10)])
    while left >= 0:
        batch = take(builder)
        left -= sum(item.ticket is ticket for item in batch.items)
        served += batch.tokens if left >= 0 else 0
    assert abs(served - ahead) <= 30


def test_what_is_dropped_leaves_nothing_and_the_rest_in_its_order() -> None:
    former = a_builder()
    for tenant in "ab":
        ask(former, [1, 2, 3], tenant)
    queue = former.queue
    queue.drop([item for item in queue if item.tokens == 2 or item.ticket.tenant == "b"])
    assert (queue.waiting.items, queue.waiting.tokens, queue.waiting.requests, queue.tenants) == (2, 4, 1, 1)
    assert [item.tokens for item in take(former).items] == [1, 3]
    assert (len(queue), queue.tenants) == (0, 0)
