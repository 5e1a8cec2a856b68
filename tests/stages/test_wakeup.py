"""An event with a single waiter, on each loop."""

from __future__ import annotations

import anyio
import pytest

from staged_pool.stages.wakeup import Wakeup, wakeup
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_it_wakes_tasks_that_wait_and_tasks_that_come_later() -> None:
    event, woken = wakeup(), list[str]()

    async def wait(name: str) -> None:
        await event.wait()
        woken.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, "before")
        await anyio.wait_all_tasks_blocked()
        assert not event.is_set()
        assert woken == []
        event.set()
        event.set()
        assert event.is_set()
        await until(lambda: woken == ["before"])
        await wait("after")
    assert woken == ["before", "after"]


async def test_to_wait_for_what_is_set_lets_others_run() -> None:
    event, steps = wakeup(), list[str]()
    event.set()

    async def other() -> None:
        steps.append("other")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        for _ in range(3):
            await event.wait()
        steps.append("waited")
    assert steps == ["other", "waited"]


@pytest.mark.parametrize("sets_meanwhile", [False, True])
async def test_a_cancelled_wait_can_be_begun_again(sets_meanwhile: bool) -> None:
    event = wakeup()
    with anyio.move_on_after(0):
        await event.wait()
        pytest.fail("it was not cancelled")
    assert not event.is_set()
    if sets_meanwhile:
        event.set()
        await event.wait()
        return
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(event.wait)
        await anyio.wait_all_tasks_blocked()
        event.set()


async def test_who_is_cancelled_as_it_is_woken_can_see_that_it_was() -> None:
    event = wakeup()
    seen = []

    async def wait(event: Wakeup) -> None:
        try:
            await event.wait()
        finally:
            seen.append(event.is_set())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, event)
        await anyio.wait_all_tasks_blocked()
        event.set()
        tasks.cancel_scope.cancel()
    assert seen == [True]
