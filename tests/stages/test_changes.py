"""Changes: each waiter sees the change that it waits for, however often and by whom it is noted."""

from __future__ import annotations

import anyio
import pytest

from staged_pool.stages.changes import Changes

pytestmark = pytest.mark.anyio


async def test_all_waiters_wake_whose_condition_holds_and_the_others_wait_on() -> None:
    changes, state, woken = Changes(), 0, list[int]()

    async def wait_for(least: int) -> None:
        await changes.until(lambda: state >= least)
        woken.append(least)

    async with anyio.create_task_group() as tasks:
        for least in (1, 1, 2, 3):
            tasks.start_soon(wait_for, least)
        await anyio.wait_all_tasks_blocked()
        for state in (1, 2, 3):
            changes.note()
            await anyio.wait_all_tasks_blocked()
            assert woken == sorted(woken)
            assert max(woken) == state
    assert sorted(woken) == [1, 1, 2, 3]


async def test_no_wake_up_is_lost_between_two_changes_at_once() -> None:
    changes, is_open = Changes(), False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(changes.until, lambda: is_open)
        await anyio.wait_all_tasks_blocked()
        changes.note()
        changes.note()  # before the waiter has looked again
        is_open = True
        changes.note()


async def test_a_condition_that_holds_already_is_not_waited_for() -> None:
    with anyio.fail_after(0):
        await Changes().until(lambda: True)
