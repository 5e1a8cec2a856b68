"""Credits: senders wait for the receiving stage of another process, in order, as in any channel."""

from __future__ import annotations

import anyio
import pytest

from staged_pool.stages.credit import CreditChannel
from staged_pool.stages.wire import WireError
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_senders_wait_for_credits_in_their_order() -> None:
    posted: list[int] = []
    channel = CreditChannel[int]("there", 2, posted.append)

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(channel.sender.send, number)
            await until(lambda number=number: channel.waiting == number + 1)  # type: ignore[misc]
        assert posted == [0, 1]
        for number in range(2, 5):
            channel.give_back(1)
            await until(lambda number=number: posted == list(range(number + 1)))  # type: ignore[misc]
    assert channel.waiting == 2


async def test_a_sender_that_is_cancelled_takes_no_credit() -> None:
    posted: list[int] = []
    channel = CreditChannel[int]("there", 1, posted.append)
    await channel.sender.send(0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.sender.send, 1)
        await until(lambda: channel.waiting == 2)
        tasks.cancel_scope.cancel()
    assert channel.waiting == 1
    channel.give_back(1)
    await channel.sender.send(2)
    assert posted == [0, 2]


async def test_a_reset_takes_all_credits_back_and_no_more() -> None:
    posted: list[int] = []
    channel = CreditChannel[int]("there", 2, posted.append)
    await channel.sender.send(0)
    await channel.sender.send(1)
    channel.reset()
    assert channel.waiting == 0
    assert [channel.sender.send_nowait(number) for number in range(3)] == [True, True, False]


async def test_a_peer_cannot_return_more_credits_than_it_has() -> None:
    channel = CreditChannel[int]("there", 2, lambda _: None)
    await channel.sender.send(0)
    with pytest.raises(WireError, match="returns 2 credits of the there stage, and has 1"):
        channel.give_back(2)


async def test_a_message_to_a_peer_that_is_gone_takes_no_credit() -> None:
    def post(_: int) -> None:
        raise anyio.BrokenResourceError

    channel = CreditChannel[int]("there", 1, post)
    for number in range(3):
        with pytest.raises(anyio.BrokenResourceError):
            await channel.sender.send(number)
    assert channel.waiting == 0
