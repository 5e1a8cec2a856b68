"""The decision of a front to accept connections: it never waits for ever."""

from __future__ import annotations

import anyio
import pytest

from staged_pool.api.app.fleet import Accepting

pytestmark = pytest.mark.anyio


async def test_a_front_that_began_to_wait_before_the_welcome_accepts_once_it_is_ready() -> None:
    accepting = Accepting()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(accepting.until_on)
            await anyio.wait_all_tasks_blocked()
            accepting.welcomed()
            await anyio.wait_all_tasks_blocked()
            assert not accepting.is_on, "another front may be ready by now"
            accepting.ready()
    assert accepting.is_on


async def test_a_front_that_starts_accepts_while_nobody_else_serves() -> None:
    accepting = Accepting()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(accepting.until_on)
            await anyio.wait_all_tasks_blocked()
            accepting.tell(others_serve=False)
    accepting.tell(others_serve=True)
    assert not accepting.is_on


async def test_a_front_that_is_ready_accepts_whatever_others_do() -> None:
    accepting, decisions = Accepting(), list[bool]()

    def decide() -> None:
        decisions.append(accepting.is_on)

    decide()  # it does not know of the others yet
    accepting.tell(others_serve=False)
    decide()  # it answers that the models load
    accepting.welcomed()
    decide()
    accepting.ready()
    for others_serve in (True, False):
        accepting.tell(others_serve=others_serve)
        decide()
    assert decisions == [False, True, False, True, True]
