"""Waiting for memory: one at a time gathers what others release, and each has its turn."""

from __future__ import annotations

import anyio
import pytest

from staged_pool.runtime.memory.budget import ByteAccount, Holding
from staged_pool.stages.scheduling.entries import Priority
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def settle() -> None:
    """Let all other tasks run as far as they can."""
    await anyio.wait_all_tasks_blocked()


class Gatherers:
    """Requests that wait for bytes, and the order in which they got them."""

    def __init__(self, account: ByteAccount, tasks: anyio.abc.TaskGroup) -> None:
        self._account = account
        self._tasks = tasks
        self.order: list[str] = []
        self.holdings: dict[str, Holding] = {}

    async def begin(
        self, name: str, count: int, *, tenant: str = "", priority: Priority = Priority.BULK
    ) -> anyio.CancelScope:
        """Let a request wait for bytes; return the scope of its task."""
        holding = self.holdings[name] = self._account.hold(tenant or name)
        scope = anyio.CancelScope()

        async def gather() -> None:
            with scope:
                await holding.gather(count, priority)
                self.order.append(name)

        self._tasks.start_soon(gather)
        await settle()
        return scope


async def test_one_that_waits_gathers_what_others_release_however_many_come_meanwhile() -> None:
    account = ByteAccount(800)
    others = [account.hold("others") for _ in range(7)]
    assert all(each.take(100) for each in others)
    async with anyio.create_task_group() as tasks:
        waiting = Gatherers(account, tasks)
        await waiting.begin("large", 600)
        for _ in range(40):  # each that leaves is followed by one that takes as much as it gets
            if waiting.order:
                break
            others.pop(0).give_back()
            newcomer = account.hold("others")
            others.append(newcomer)
            while newcomer.take(10):
                pass
            await settle()
        assert waiting.order == ["large"]
        assert account.held_bytes <= 800
    assert account.waiting == 0


async def test_those_who_do_not_wait_find_some_room_beside_one_that_gathers() -> None:
    account = ByteAccount(800)
    with account.hold("first") as first:
        assert first.take(640)
        async with anyio.create_task_group() as tasks:
            await Gatherers(account, tasks).begin("large", 700)
            assert account.held_bytes == 640 + 140
            assert account.hold("small").take(10)
            tasks.cancel_scope.cancel()
        assert account.waiting == 0
    assert account.held_bytes == 10


async def test_those_who_do_not_wait_find_some_room_beside_many_that_have_gathered() -> None:
    """Else each would gather most of what the one before has left."""
    account = ByteAccount(800)
    with account.hold("first") as first:
        assert first.take(640)
        async with anyio.create_task_group() as tasks:
            waiting = Gatherers(account, tasks)
            for name in "abcd":
                await waiting.begin(name, 300)
            first.give_back()
            await settle()
            assert sorted(waiting.order) == ["a", "b"]
            assert account.held_bytes == 700
            small = account.hold("small")
            assert small.take(80)
            waiting.holdings["a"].give_back()
            await settle()
            assert account.held_bytes == 780, "the next one gathers what was released, and no more"
            small.give_back()
            assert account.held_bytes == 700
            assert account.hold("small").take(80)
            for name in "bcd":
                await settle()
                waiting.holdings[name].give_back()
    assert sorted(waiting.order) == ["a", "b", "c", "d"]
    assert account.waiting == 0


async def test_one_that_needs_all_of_it_has_it_once_nobody_else_holds_any() -> None:
    account = ByteAccount(100)
    first = account.hold("first")
    assert first.take(50)
    async with anyio.create_task_group() as tasks:
        waiting = Gatherers(account, tasks)
        await waiting.begin("all", 100)
        assert not account.hold("late").take(1), "else it would wait for ever"
        first.give_back()
        await until(lambda: waiting.order == ["all"])
    assert account.held_bytes == 100


async def test_urgent_ones_and_all_tenants_have_their_turns() -> None:
    account = ByteAccount(100)
    first = account.hold("first")
    assert first.take(80)
    async with anyio.create_task_group() as tasks:
        waiting = Gatherers(account, tasks)
        for number in range(3):
            await waiting.begin(f"a{number}", 80, tenant="a")
        await waiting.begin("b0", 80, tenant="b")
        await waiting.begin("now", 80, tenant="c", priority=Priority.INTERACTIVE)
        first.give_back()
        for _ in range(5):
            await settle()
            waiting.holdings[waiting.order[-1]].give_back()
    assert waiting.order.index("now") <= 1, "behind the one whose turn it was"
    assert waiting.order.index("b0") < waiting.order.index("a2")
    assert sorted(waiting.order) == ["a0", "a1", "a2", "b0", "now"]
    assert account.held_bytes == account.waiting == 0


async def test_one_that_leaves_gives_its_turn_and_its_bytes_to_the_next() -> None:
    account = ByteAccount(100)
    first = account.hold("first")
    assert first.take(60)
    async with anyio.create_task_group() as tasks:
        waiting = Gatherers(account, tasks)
        gathering = await waiting.begin("gathering", 80)
        queued = await waiting.begin("queued", 80)
        last = await waiting.begin("last", 30)
        assert (account.held_bytes, account.waiting) == (95, 3)
        queued.cancel()
        gathering.cancel()
        await until(lambda: waiting.order == ["last"])
        assert (account.held_bytes, account.waiting) == (90, 0)
        last.cancel()  # too late: it holds them
        first.give_back()
    assert account.held_bytes == 30


async def test_a_limit_that_shrinks_holds_up_nobody_for_ever() -> None:
    account = ByteAccount(100)
    first = account.hold("first")
    assert first.take(60)
    async with anyio.create_task_group() as tasks:
        waiting = Gatherers(account, tasks)
        await waiting.begin("large", 80)
        account.limit_bytes = 50
        first.give_back()
        await until(lambda: waiting.order == ["large"])


async def test_a_party_whose_holdings_never_end_leaves_room_for_others_that_wait() -> None:
    account = ByteAccount(800)
    async with anyio.create_task_group() as tasks:
        waiting = Gatherers(account, tasks)
        for number in range(20):  # its clients read nothing: no holding of these ends
            await waiting.begin(f"stalled{number}", 50, tenant="stalled")
        assert account.held_bytes == 700, "an eighth is left to requests that do not wait"
        await waiting.begin("good0", 40, tenant="good")
        assert waiting.order[-1] == "good0"
        await waiting.begin("good1", 40, tenant="good", priority=Priority.INTERACTIVE)
        await waiting.begin("other", 20, tenant="other")
        assert waiting.order[-1] == "other", "also behind one that waits"
        assert "good1" not in waiting.order, "a party that holds something waits for its turn"
        waiting.holdings["good0"].give_back()
        await settle()
        assert waiting.order[-1] == "good1"
        tasks.cancel_scope.cancel()
    for holding in waiting.holdings.values():
        holding.give_back()
    assert account.held_bytes == account.waiting == account._gathered_bytes == 0
    assert not account._waiting, "nor is a party left"


async def test_one_that_needs_all_bars_nobody_while_its_own_party_holds_something() -> None:
    """A party that never ends its holding could else keep everybody out."""
    account = ByteAccount(800)
    unread, other, third = account.hold("greedy"), account.hold("other"), account.hold("third")
    assert unread.take(1)
    async with anyio.create_task_group() as tasks:
        waiting = Gatherers(account, tasks)
        await waiting.begin("all", 800, tenant="greedy")
        assert other.take(50)
        await waiting.begin("good", 700, tenant="good")
        assert account.waiting == 2, "the second has its turn before the first"
        assert third.take(10), "and leaves some room"
        other.give_back()
        await settle()
        assert waiting.order == ["good"]
        unread.give_back()
        await settle()
        assert not account.hold("late").take(80), "else the one that needs all would wait for ever"
        for holding in (third, waiting.holdings["good"]):
            holding.give_back()
        await until(lambda: waiting.order == ["good", "all"])
    waiting.holdings["all"].give_back()
    assert account.held_bytes == account.waiting == account._gathered_bytes == 0


async def test_one_that_needs_what_a_load_has_holds_nothing_until_its_end() -> None:
    account = ByteAccount(800)
    first = account.hold("first")
    assert first.take(640)
    async with anyio.create_task_group() as tasks:
        waiting = Gatherers(account, tasks)
        await waiting.begin("large", 700)
        assert waiting.holdings["large"].held_bytes == 140
        account.resize(500, 300)
        first.set(300)
        assert waiting.holdings["large"].held_bytes == 0, "it was its turn, and it has stepped aside"
        await waiting.begin("small", 100)
        assert waiting.order == ["small"]
        first.give_back()
        waiting.holdings["small"].give_back()
        await settle()
        assert (waiting.order, account.held_bytes, account.waiting) == (["small"], 0, 1)
        account.resize(800)
        account.serve()
        await until(lambda: waiting.order == ["small", "large"])
    waiting.holdings["large"].give_back()
    assert account.held_bytes == account.waiting == account._gathered_bytes == 0
