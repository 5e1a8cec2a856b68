"""Duties of a child: whatever ends one unasked is an error, and never a quiet end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest

from staged_pool.api.fleet.duties import go_on
from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.user_code import Panic

pytestmark = pytest.mark.anyio


async def ended_by(duty: Callable[[], Awaitable[object]]) -> None:
    with single_errors():
        async with anyio.create_task_group() as duties:
            duties.start_soon(go_on, duty)
            duties.start_soon(anyio.sleep_forever)


async def test_a_duty_that_returns_is_an_error() -> None:
    async def duty() -> None:
        await anyio.lowlevel.checkpoint()

    with pytest.raises(StagedPoolError, match="duty has ended, and nobody has asked for it"):
        await ended_by(duty)


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError()], ids=repr)
async def test_a_duty_that_something_else_than_an_exception_ends_is_an_error(error: BaseException) -> None:
    async def duty() -> None:
        await anyio.lowlevel.checkpoint()
        raise error

    with pytest.raises(Panic):
        await ended_by(duty)


async def test_a_duty_that_is_cancelled_ends() -> None:
    async with anyio.create_task_group() as duties:
        duties.start_soon(go_on, anyio.sleep_forever)
        await anyio.wait_all_tasks_blocked()
        duties.cancel_scope.cancel()
