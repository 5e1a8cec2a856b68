"""Patience: requests that wait for room in an engine."""

from __future__ import annotations

import math

import anyio
import pytest

from staged_pool.runtime.engine.patience import patiently
from staged_pool.stages.errors import DeadlineExceeded, InvalidInput, Overloaded

pytestmark = pytest.mark.anyio


async def test_a_rejected_request_is_made_again_until_there_is_room() -> None:
    limits: list[float] = []

    async def ask(left_s: float) -> str:
        limits.append(left_s)
        if len(limits) < 4:
            raise Overloaded("no room", retry_after_s=0)
        return "answer"

    assert await patiently(ask, 60) == "answer"
    assert sorted(limits, reverse=True) == limits
    assert limits[0] <= 60
    limits.clear()
    assert await patiently(ask, math.inf) == "answer"
    assert limits == [math.inf] * 4


async def test_the_time_limit_holds_for_all_attempts() -> None:
    async def ask(left_s: float) -> str:
        raise Overloaded("no room", retry_after_s=3600)

    with anyio.fail_after(30), pytest.raises(DeadlineExceeded, match="time limit of the call"):
        await patiently(ask, 0.01)


async def test_other_errors_are_raised_at_once() -> None:
    asked = 0

    async def ask(left_s: float) -> str:
        nonlocal asked
        asked += 1
        raise InvalidInput("wrong")

    with pytest.raises(InvalidInput):
        await patiently(ask, 60)
    assert asked == 1
