"""The rules of batch forming, on arbitrary arrivals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from staged_pool.stages.scheduling.batch_former import BatchFormer
from staged_pool.stages.scheduling.entries import BatchTrigger
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.work import Request
from tests.support.tickets import NoLoad, wait_in


def a_ticket() -> Ticket:
    return Ticket(Request, lambda result: None, NoLoad())


def a_request(builder: BatchFormer[Item[int]], token_counts: list[int]) -> Ticket:
    ticket = a_ticket()
    wait_in(builder, [Item(ticket, place, place, 0.0, tokens) for place, tokens in enumerate(token_counts)])
    return ticket


token_counts = st.integers(1, 40)
arrivals = st.lists(st.tuples(token_counts, st.sampled_from("ab"), st.booleans()), max_size=60)
limits = st.tuples(st.integers(1, 8), st.integers(1, 60), st.booleans())


def items_of(arrived: list[tuple[int, str, bool]]) -> list[Item[int]]:
    ticket = a_ticket()
    return [Item(ticket, i, i, float(i), tokens, key) for i, (tokens, key, _) in enumerate(arrived)]


@given(arrivals, limits)
def test_every_wanted_item_goes_exactly_once_and_no_unwanted_one(
    arrived: list[tuple[int, str, bool]], limit: tuple[int, int, bool]
) -> None:
    max_items, max_batch_tokens, pads = limit
    builder: BatchFormer[Item[int]] = BatchFormer(max_items=max_items, max_batch_tokens=max_batch_tokens, pads=pads)
    items = items_of(arrived)
    wait_in(builder, items)
    wanted = {item.index for item, (_, _, want) in zip(items, arrived, strict=True) if want}
    waiting = set(wanted)
    while batch := builder.take(lambda item: item.index in wanted):
        taken = [item.index for item in batch.items]
        assert set(taken) <= waiting
        assert len(taken) == len(set(taken))
        assert min(waiting) in taken, "of one request, the oldest item is in the next batch of all"
        assert len({item.batch_key for item in batch.items}) == 1
        assert len(taken) <= max_items
        longest = max(item.tokens for item in batch.items)
        total = longest * len(taken) if pads else sum(item.tokens for item in batch.items)
        assert batch.tokens == total
        assert len(taken) == 1 or total <= max_batch_tokens
        waiting -= set(taken)
    assert not waiting
    assert len(builder.queue) == 0
    assert builder.queue.waiting.tokens == 0


@given(arrivals, limits)
def test_a_batch_is_cut_only_where_the_next_item_would_not_fit(
    arrived: list[tuple[int, str, bool]], limit: tuple[int, int, bool]
) -> None:
    max_items, max_batch_tokens, _ = limit
    builder: BatchFormer[Item[int]] = BatchFormer(max_items=max_items, max_batch_tokens=max_batch_tokens, pads=False)
    wait_in(builder, items_of(arrived))
    left = {item.index: item for item in items_of(arrived)}
    while batch := builder.take(lambda item: True):
        for item in batch.items:
            del left[item.index]
        same_key = [item for item in left.values() if item.batch_key == batch.items[0].batch_key]
        match batch.trigger:
            case BatchTrigger.DEMAND:
                assert not same_key
            case BatchTrigger.SIZE:
                assert len(batch.items) == max_items
                assert same_key
            case BatchTrigger.BUDGET:
                assert batch.tokens + same_key[0].tokens > max_batch_tokens


@given(arrivals, st.integers(1, 20), st.integers(1, 60))
def test_the_budget_grows_with_what_waits(arrived: list[tuple[int, str, bool]], least: int, most: int) -> None:
    builder: BatchFormer[Item[int]] = BatchFormer(
        max_items=100, max_batch_tokens=most, min_batch_tokens=least, pads=False
    )
    wait_in(builder, items_of(arrived))
    while waiting := builder.queue.waiting.tokens:
        batch = builder.take(lambda item: True)
        assert batch is not None
        assert len(batch.items) == 1 or batch.tokens <= min(most, max(least, waiting / 8))


def test_a_long_queue_gets_batches_of_the_whole_budget_and_a_short_one_small_ones() -> None:
    builder: BatchFormer[Item[int]] = BatchFormer(max_items=1000, max_batch_tokens=100, min_batch_tokens=20, pads=False)
    for _ in range(100):
        wait_in(builder, items_of([(10, "a", True)]))
    token_counts = []
    while batch := builder.take(lambda item: True):
        token_counts.append(batch.tokens)
    assert token_counts[:3] == [100, 100, 100]
    assert token_counts[-4:] == [20, 20, 20, 10]
    assert token_counts == sorted(token_counts, reverse=True)


def test_one_large_request_gets_small_batches() -> None:
    builder: BatchFormer[Item[int]] = BatchFormer(max_items=1000, max_batch_tokens=100, min_batch_tokens=20, pads=False)
    wait_in(builder, items_of([(10, "a", True)] * 100))
    batch = builder.take(lambda item: True)
    assert batch is not None
    assert batch.tokens == 20


def test_there_is_a_full_batch_where_more_waits_than_goes_into_one() -> None:
    builder: BatchFormer[Item[int]] = BatchFormer(max_items=1000, max_batch_tokens=20, pads=False)
    full = []
    for _ in range(4):
        full.append(builder.has_full_batch)
        a_request(builder, [10])
    assert full == [False, False, False, True]
    assert builder.take(lambda item: True) is not None
    assert not builder.has_full_batch


def test_one_large_request_makes_no_full_batch() -> None:
    builder: BatchFormer[Item[int]] = BatchFormer(max_items=1000, max_batch_tokens=20, pads=False)
    a_request(builder, [10] * 50)
    assert not builder.has_full_batch


def test_padded_batches_keep_to_similar_lengths() -> None:
    builder: BatchFormer[Item[int]] = BatchFormer(max_items=4, max_batch_tokens=1000, pads=True)
    wait_in(builder, items_of([(tokens, "a", True) for tokens in (10, 100, 11, 101, 9, 99, 12, 98)]))
    first, second = builder.take(lambda item: True), builder.take(lambda item: True)
    assert first is not None
    assert second is not None
    assert sorted(item.tokens for item in first.items) == [9, 10, 11, 12]
    assert sorted(item.tokens for item in second.items) == [98, 99, 100, 101]


@given(st.lists(st.integers(1, 10), min_size=1, max_size=6), st.integers(10, 40))
def test_a_small_request_overtakes_a_large_one_that_came_before(small: list[int], max_batch_tokens: int) -> None:
    builder: BatchFormer[Item[int]] = BatchFormer(max_items=100, max_batch_tokens=max_batch_tokens, pads=False)
    a_request(builder, [10] * 50)
    assert builder.take(lambda item: True) is not None
    late = a_request(builder, small)
    served, left = 0, len(small)
    while left:
        batch = builder.take(lambda item: True)
        assert batch is not None
        served += batch.tokens
        left -= sum(item.ticket is late for item in batch.items)
    assert served <= 2 * sum(small) + 2 * max_batch_tokens, "it has half of the device"


def test_requests_share_the_device_by_tokens_and_not_by_items() -> None:
    builder: BatchFormer[Item[int]] = BatchFormer(max_items=100, max_batch_tokens=40, pads=False)
    long, short = a_request(builder, [20] * 20), a_request(builder, [1] * 400)
    served = dict.fromkeys((long, short), 0)
    for _ in range(10):
        batch = builder.take(lambda item: True)
        assert batch is not None
        for item in batch.items:
            served[item.ticket] += item.tokens
    assert abs(served[long] - served[short]) <= 40


def test_a_large_request_gets_on_however_many_small_ones_come() -> None:
    builder: BatchFormer[Item[int]] = BatchFormer(max_items=100, max_batch_tokens=20, pads=False)
    large = a_request(builder, [10] * 30)
    batches, left = 0, 30
    while left:
        for _ in range(2):
            a_request(builder, [10])  # as much as the device can do
        batch = builder.take(lambda item: True)
        assert batch is not None
        left -= sum(item.ticket is large for item in batch.items)
        batches += 1
        assert batches < 1000


def test_a_request_that_comes_back_after_a_pause_has_saved_up_nothing() -> None:
    builder: BatchFormer[Item[int]] = BatchFormer(max_items=100, max_batch_tokens=10, pads=False)
    paused = a_request(builder, [10])
    assert builder.take(lambda item: True) is not None
    steady = a_request(builder, [10] * 20)
    for _ in range(10):
        builder.take(lambda item: True)
    wait_in(builder, [Item(paused, place, place, 0.0, 10) for place in range(10)])
    taken = [batch.items[0].ticket for _ in range(10) if (batch := builder.take(lambda item: True))]
    assert 4 <= taken.count(steady) <= 6
