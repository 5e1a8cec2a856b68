"""What the transports of asyncio and trio have in common, by themselves."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
import sniffio

from staged_pool.api.asyncio_transport import AsyncioTransport
from staged_pool.api.transports import Cancellable
from staged_pool.api.trio_transport import TrioTransport

pytestmark = pytest.mark.anyio


def cancellable() -> Cancellable:
    """Of the loop that runs; a connection has nothing to do with it."""
    transport = TrioTransport if sniffio.current_async_library() == "trio" else AsyncioTransport
    return transport.cancellable(transport.__new__(transport))  # type: ignore[arg-type]


async def test_a_block_that_is_cancelled_ends_and_its_task_goes_on() -> None:
    events = list[str]()
    block = cancellable()

    async def work() -> None:
        with block:
            events.append("begun")
            try:
                await anyio.sleep_forever()
            finally:
                events.append("ended")
        await anyio.lowlevel.checkpoint()
        events.append("went on")

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        await anyio.wait_all_tasks_blocked()
        block.cancel()
        block.cancel()
    assert events == ["begun", "ended", "went on"]
    block.cancel()  # which is too late, and nothing


async def test_a_block_may_cancel_itself() -> None:
    with cancellable() as block:
        block.cancel()
        await anyio.sleep_forever()
    await anyio.lowlevel.checkpoint()


async def test_an_error_leaves_the_block() -> None:
    async def fail_when_cancelled(block: Cancellable) -> None:
        with block:
            block.cancel()
            try:
                await anyio.sleep_forever()
            finally:
                raise ValueError("on its way out")

    with pytest.raises(ValueError, match="a bug"), cancellable():
        raise ValueError("a bug")
    with pytest.raises(ValueError, match="on its way out"):
        await fail_when_cancelled(cancellable())


@pytest.mark.parametrize("both", [False, True])
async def test_what_cancels_the_task_itself_is_not_taken_for_the_end_of_the_block(both: bool) -> None:
    events = list[str]()
    block = cancellable()

    async def work() -> None:
        with block:
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        events.append("too far")

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        await anyio.wait_all_tasks_blocked()
        if both:
            block.cancel()
        group.cancel_scope.cancel()
    assert events == []
