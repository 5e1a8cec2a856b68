"""Time limits of requests that wait for the engine process, or for its answer."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import anyio
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.front_desk import FrontDesk
from staged_pool.runtime.remote.line import FrontLine
from staged_pool.stages.errors import ADMISSION, DeadlineExceeded
from tests.servers.fronts import Joined, device_engine_on, fronts_on, join
from tests.support.deadlines import LATER_S
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

LIMIT_S = 0.01


async def cut(front: Joined) -> None:
    """End the line of a front."""
    front.scope.cancel()
    await until(lambda: len(front.ends) == 1)


async def test_the_wait_for_an_engine_process_counts_against_the_time_limit() -> None:
    config, asked, ask = EngineConfig(), list[float](), FrontLine.ask

    async def noted(self: FrontLine, number: int, arriving: Any, *, waits: bool) -> int:
        asked.append(arriving.timeout_s)
        return await ask(self, number, arriving, waits=waits)

    async def embed(engine: Any) -> None:
        await engine.embed("meanwhile", timeout_s=LATER_S)

    async with (
        anyio.create_task_group() as tasks,
        fronts_on(LetterModel(), config, patience_s=math.inf) as ((engine,), _, desk, (front,)),
    ):
        await cut(front)
        new_desk = FrontDesk()
        with mock.patch.object(FrontLine, "ask", noted):
            async with (
                device_engine_on(LetterModel(), config, new_desk) as new_device,
                anyio.create_task_group() as one,
            ):
                new_desk.add(new_device, desk._terms[0])
                one.start_soon(embed, engine)
                await anyio.sleep(2 * LIMIT_S)
                await join(tasks, new_desk, front)
        assert len(asked) == 1
        assert LATER_S - 60 < asked[0] < LATER_S - LIMIT_S
        front.scope.cancel()
        await until(lambda: len(front.ends) == 2)


async def test_a_request_asks_for_nothing_once_its_time_limit_has_passed() -> None:
    async def too_long(self: FrontLine, timeout_s: float) -> None:
        await anyio.sleep(2 * timeout_s)

    async with fronts_on(LetterModel()) as ((engine,), _, _, (front,)):
        await cut(front)
        with mock.patch.object(FrontLine, "wait_for_engine", too_long):
            with pytest.raises(DeadlineExceeded) as late:
                await engine.embed("late", timeout_s=LIMIT_S)
        assert late.value.stage == ADMISSION
        assert str(late.value) == "The time limit of the request passed; the engine process was away."


async def test_the_error_of_a_request_that_is_admitted_too_late_has_no_number_in_it() -> None:
    """The time that is left to it is below 0 by then."""
    ask = FrontLine.ask

    async def late(self: FrontLine, number: int, arriving: Any, *, waits: bool) -> int:
        request = await ask(self, number, arriving, waits=waits)
        await anyio.sleep(2 * arriving.timeout_s)
        return request

    async with fronts_on(LetterModel()) as ((engine,), _, _, _):
        with mock.patch.object(FrontLine, "ask", late), pytest.raises(DeadlineExceeded) as failure:
            await engine.embed("late", timeout_s=LIMIT_S)
        assert not any(letter.isdigit() for letter in str(failure.value)), failure.value


async def test_an_engine_process_that_does_not_answer_costs_no_more_than_the_time_limit() -> None:
    async with fronts_on(LetterModel()) as ((engine,), _, _, _):
        with mock.patch.object(FrontLine, "_answer"), pytest.raises(DeadlineExceeded) as failure:
            await engine.embed("late", timeout_s=LIMIT_S)
        message = "The time limit of the request passed before the engine process had admitted it."
        assert str(failure.value) == message
