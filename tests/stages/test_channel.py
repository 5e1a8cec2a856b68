"""Bounded channels: order, room, and workers that are woken."""

from __future__ import annotations

import gc

import anyio
import pytest

from staged_pool.stages.channel import Channel, WorkerNotifier
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


pytestmark = pytest.mark.anyio


async def test_a_channel_ends_with_the_last_of_its_senders() -> None:
    channel = Channel[int]("behind", 3)
    second = channel.sender.clone()
    await channel.sender.send(1)
    channel.sender.close()
    await second.send(2)
    second.close()
    assert [number async for number in channel.receiver] == [1, 2]
    channel.receiver.close()


async def test_closing_a_receiver_returns_what_nobody_took_and_tells_those_who_wait_for_room() -> None:
    channel = Channel[int]("behind", 2)
    sent, rejected = list[int](), list[int]()

    async def send(number: int) -> None:
        try:
            await channel.sender.send(number)
        except anyio.BrokenResourceError:
            rejected.append(number)
        else:
            sent.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(send, number)
        await until(lambda: channel.waiting == 4)
        assert channel.receiver.close() == sent
    assert len(sent) == len(rejected) == 2
    assert channel.waiting == 0
    channel.sender.close()
    gc.collect()


async def test_a_channel_has_room_for_so_much_and_gives_it_in_the_order_in_which_it_is_wanted() -> None:
    channel = Channel[str]("behind", 4, size=len)
    sent: list[str] = []

    async def send(message: str) -> None:
        await channel.sender.send(message)
        sent.append(message)

    async def is_sent(*messages: str) -> None:
        await until(lambda: sent == list(messages))
        await anyio.wait_all_tasks_blocked()
        assert sent == list(messages)

    async with anyio.create_task_group() as tasks:
        for message in ("aa", "bb"):
            await send(message)
        for message in ("larger than it", "c"):
            tasks.start_soon(send, message)
            await anyio.wait_all_tasks_blocked()
        assert channel.receiver.receive_waiting() == "aa"
        await is_sent("aa", "bb")  # there would be room for `c`, but it is not its turn
        assert channel.receiver.receive_waiting() == "bb"
        await is_sent("aa", "bb", "larger than it")
        assert channel.receiver.receive_waiting() == "larger than it"
        await is_sent("aa", "bb", "larger than it", "c")
    assert channel.receiver.close() == ["c"]
    channel.sender.close()


async def test_a_sender_that_leaves_holds_no_room_and_nobody_up() -> None:
    channel = Channel[str]("behind", 2, size=len)
    await channel.sender.send("a")
    async with anyio.create_task_group() as tasks:
        leaves, told = anyio.CancelScope(), anyio.CancelScope()

        async def send(message: str, scope: anyio.CancelScope) -> None:
            with scope:
                await channel.sender.send(message)

        tasks.start_soon(send, "two", leaves)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(send, "b", anyio.CancelScope())
        await anyio.wait_all_tasks_blocked()
        assert channel.waiting == 3
        leaves.cancel()  # `b` fits, where what was before it did not
        await until(lambda: channel.waiting == 2)
        tasks.start_soon(send, "c", told)
        await anyio.wait_all_tasks_blocked()
        assert channel.receiver.receive_waiting() == "a"
        told.cancel()  # it has room by now, and is to be there to use it, or to give it back
    if channel.waiting == 1:
        await channel.sender.send("d")
    assert channel.receiver.close() in (["b", "c"], ["b", "d"])
    channel.sender.close()


async def test_a_worker_for_what_comes_in_one_iteration_and_another_for_what_it_leaves() -> None:
    channel = Channel[int]("behind", 8)
    took: dict[str, list[int]] = {}
    busy = anyio.Event()

    async def work(name: str) -> None:
        took[name] = []
        async for number in channel.receiver:
            took[name].append(number)
            if number == 2:
                await busy.wait()

    async with anyio.create_task_group() as tasks:
        for name in ("first", "second", "third"):
            tasks.start_soon(work, name)
        await anyio.wait_all_tasks_blocked()
        for number in range(4):
            await channel.sender.send(number)
        await anyio.wait_all_tasks_blocked()
        assert sorted(number for numbers in took.values() for number in numbers) == [0, 1, 2, 3]
        assert [] in took.values()  # two workers took all; the third got nothing
        busy.set()
        channel.sender.close()
    channel.receiver.close()


async def test_who_is_rung_for_and_leaves_has_another_come_instead() -> None:
    notifier = WorkerNotifier()
    came: list[int] = []
    scopes = [anyio.CancelScope() for _ in range(2)]

    async def wait(number: int) -> None:
        with scopes[number]:
            await notifier.wait()
            came.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(2):
            tasks.start_soon(wait, number)
            await anyio.wait_all_tasks_blocked()
        notifier.notify()
        notifier.notify()  # one is on its way: for the same work no other is
        scopes[0].cancel()
        await anyio.wait_all_tasks_blocked()
        scopes[1].cancel()
    assert came in ([0], [1])  # it was there before it could be cancelled, or the other one came


async def test_what_is_in_the_channel_when_the_sender_closes_still_arrives() -> None:
    channel = Channel[int]("behind", 3)
    for number in range(3):
        await channel.sender.send(number)
    channel.sender.close()
    assert [number async for number in channel.receiver] == [0, 1, 2]
    assert channel.receiver.receive_waiting() is None
    channel.receiver.close()
