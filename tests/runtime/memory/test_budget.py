"""The memory budget: shares that do not touch each other, and parties that always find some room."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from staged_pool.runtime.memory.budget import ByteAccount, MemoryBudget
from staged_pool.runtime.memory.decode_memory import DecodeMemory
from staged_pool.stages.scheduling.tuning import TIMES_FREE


def test_the_purposes_have_shares_that_do_not_touch_each_other() -> None:
    budget = MemoryBudget(1000)
    assert budget.bodies.hold().take(250)
    assert not budget.bodies.hold().take(1)
    assert budget.answers.hold().take(250), "full of bodies, it has all of its room for answers"
    with budget.decodes.room(500):
        assert budget.decodes.held_bytes == 500


def test_a_request_gives_back_what_it_holds() -> None:
    account = ByteAccount(100)
    with account.hold() as holding:
        assert holding.take(60)
        holding.add(70)
        assert account.held_bytes == 130, "what is there already counts, with or without room"
        assert not holding.take(1)
        holding.set(10)
        assert account.held_bytes == 10
    assert account.held_bytes == 0
    assert account.rejected == 1


def test_a_party_leaves_room_for_the_next() -> None:
    account = ByteAccount(800)
    greedy = account.hold("greedy")
    while greedy.take(1):
        pass
    assert greedy.held_bytes == 800 * TIMES_FREE // (TIMES_FREE + 1)
    assert not account.hold("greedy").take(1), "with whichever request"
    assert account.hold("other").take(80)
    assert account.hold("third").take(10)


def test_one_that_is_alone_may_have_all_at_once() -> None:
    assert ByteAccount(100).hold().take(100)
    assert not ByteAccount(100).hold().take(101)


def test_a_smaller_limit_takes_nothing_away() -> None:
    budget = MemoryBudget(1000)
    holding = budget.bodies.hold()
    assert holding.take(200)
    budget.resize(400)
    assert budget.bodies.limit_bytes == 100
    assert holding.held_bytes == 200
    assert not budget.bodies.hold("other").take(1)
    holding.give_back()
    assert budget.bodies.hold("other").take(100)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 300)), max_size=60))
def test_what_is_taken_never_exceeds_the_limit(asked: list[tuple[str, int]]) -> None:
    account = ByteAccount(500)
    holdings = [account.hold(party) for party, _ in asked]
    for holding, (_, count) in zip(holdings, asked, strict=True):
        holding.take(count)
        assert account.held_bytes == sum(each.held_bytes for each in holdings) <= 500
    for holding in holdings:
        holding.give_back()
    assert account.held_bytes == 0
    assert account.hold("d").take(500)


def test_decodes_wait_in_order_until_they_fit() -> None:
    memory = DecodeMemory(100)
    order: list[str] = []
    first_is_in, first_may_end = threading.Event(), threading.Event()

    def first() -> None:
        with memory.room(60):
            first_is_in.set()
            first_may_end.wait()
            order.append("first ends")

    def decode(name: str, count: int) -> None:
        with memory.room(count):
            order.append(name)
            assert memory.held_bytes <= 100

    threads = [threading.Thread(target=first)]
    threads[0].start()
    first_is_in.wait()
    for name, count in (("large", 90), ("small", 10)):
        threads.append(threading.Thread(target=decode, args=(name, count)))
        threads[-1].start()
        while len(memory._waiting) < len(threads) - 1:  # until it waits
            pass
    first_may_end.set()
    for thread in threads:
        thread.join()
    assert order[0] == "first ends"
    assert order.index("large") == 1, "the small one fits beside the first, and does not overtake the large one"
    assert memory.held_bytes == 0


def test_a_decode_that_is_larger_than_the_limit_goes_alone() -> None:
    memory = DecodeMemory(100)
    with memory.room(1000):
        assert memory.held_bytes == 1000
    assert memory.held_bytes == 0


def test_a_larger_limit_admits_the_threads_that_wait() -> None:
    memory = DecodeMemory(100)
    done = threading.Event()

    def decode() -> None:
        with memory.room(50):
            done.set()

    with memory.room(80):
        thread = threading.Thread(target=decode)
        thread.start()
        while not memory._waiting:
            pass
        assert not done.is_set()
        memory.resize(200)
        thread.join()
    assert done.is_set()
