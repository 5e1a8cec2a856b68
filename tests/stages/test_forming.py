"""The rules of batch forming, on arbitrary arrivals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from staged_pool.stages.forming import BatchBuilder
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import BatchTrigger, EmbedRequest, Item
from tests.doubles import NoLoad

REQUEST = EmbedRequest(inputs=())

costs = st.integers(1, 40)
arrivals = st.lists(st.tuples(costs, st.sampled_from("ab"), st.booleans()), max_size=60)
limits = st.tuples(st.integers(1, 8), st.integers(1, 60), st.booleans())


def items_of(arrived: list[tuple[int, str, bool]]) -> list[Item[int]]:
    ticket = Ticket(lambda: REQUEST, lambda request, rows, tokens: None, NoLoad())
    return [Item(ticket, i, i, float(i), cost, key) for i, (cost, key, _) in enumerate(arrived)]


@given(arrivals, limits)
def test_every_wanted_item_goes_exactly_once_and_no_unwanted_one(
    arrived: list[tuple[int, str, bool]], limit: tuple[int, int, bool]
) -> None:
    max_items, max_cost, pads = limit
    builder: BatchBuilder[int] = BatchBuilder(max_items=max_items, max_cost=max_cost, pads=pads)
    items = items_of(arrived)
    builder.add(items)
    wanted = {item.index for item, (_, _, want) in zip(items, arrived, strict=True) if want}
    waiting = set(wanted)
    while batch := builder.take(lambda item: item.index in wanted):
        taken = [item.index for item in batch.items]
        assert set(taken) <= waiting
        assert len(taken) == len(set(taken))
        assert min(waiting) in taken, "the oldest item is in the next batch of all"
        assert len({item.batch_key for item in batch.items}) == 1
        assert len(taken) <= max_items
        longest = max(item.cost for item in batch.items)
        total = longest * len(taken) if pads else sum(item.cost for item in batch.items)
        assert batch.cost == total
        assert len(taken) == 1 or total <= max_cost
        waiting -= set(taken)
    assert not waiting
    assert len(builder) == 0
    assert builder.cost == 0


@given(arrivals, limits)
def test_a_batch_is_cut_only_where_the_next_item_would_not_fit(
    arrived: list[tuple[int, str, bool]], limit: tuple[int, int, bool]
) -> None:
    max_items, max_cost, _ = limit
    builder: BatchBuilder[int] = BatchBuilder(max_items=max_items, max_cost=max_cost, pads=False)
    builder.add(items_of(arrived))
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
            case BatchTrigger.COST:
                assert batch.cost + same_key[0].cost > max_cost
            case BatchTrigger.SHARE:
                raise AssertionError("nobody else was free")


@given(arrivals, limits, st.integers(1, 4), st.integers(1, 40))
def test_a_share_is_a_batch_and_no_item_is_lost_by_sharing(
    arrived: list[tuple[int, str, bool]], limit: tuple[int, int, bool], among: int, min_share: int
) -> None:
    max_items, max_cost, pads = limit
    builder: BatchBuilder[int] = BatchBuilder(max_items=max_items, max_cost=max_cost, pads=pads, min_share=min_share)
    builder.add(items_of(arrived))
    taken: list[int] = []
    while batch := builder.take(lambda item: True, among=among):
        assert len(batch.items) == 1 or batch.cost <= max_cost
        if batch.trigger is BatchTrigger.SHARE:
            assert among > 1
            assert builder.cost
        taken += [item.index for item in batch.items]
    assert sorted(taken) == list(range(len(arrived)))
    assert builder.cost == 0


def test_what_waits_is_shared_among_the_free_slots() -> None:
    builder: BatchBuilder[int] = BatchBuilder(max_items=100, max_cost=1000, pads=False, min_share=20)
    builder.add(items_of([(10, "a", True)] * 8))
    first, second = builder.take(lambda item: True, among=2), builder.take(lambda item: True, among=1)
    assert first is not None
    assert second is not None
    assert (first.cost, first.trigger) == (40, BatchTrigger.SHARE)
    assert (second.cost, second.trigger) == (40, BatchTrigger.DEMAND)


def test_what_is_too_little_to_share_goes_together() -> None:
    builder: BatchBuilder[int] = BatchBuilder(max_items=100, max_cost=1000, pads=False, min_share=20)
    builder.add(items_of([(13, "a", True)] * 3))
    batch = builder.take(lambda item: True, among=3)
    assert batch is not None
    assert batch.cost == 39


def test_padded_batches_keep_to_similar_lengths() -> None:
    builder: BatchBuilder[int] = BatchBuilder(max_items=4, max_cost=1000, pads=True)
    builder.add(items_of([(cost, "a", True) for cost in (10, 100, 11, 101, 9, 99, 12, 98)]))
    first, second = builder.take(lambda item: True), builder.take(lambda item: True)
    assert first is not None
    assert second is not None
    assert sorted(item.cost for item in first.items) == [9, 10, 11, 12]
    assert sorted(item.cost for item in second.items) == [98, 99, 100, 101]
