"""Stages that end although nobody has asked for it: a fault, which every caller and the host learn of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest
import structlog

from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.stage_group import StageGroup
from staged_pool.stages.errors import EngineStopped
from staged_pool.stages.stage import Stage
from tests.servers.engines import engine_on
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.user_code import RustPanic, stray_cancellation
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def _return() -> None:
    """End as at the end of a stream."""


async def _panic() -> None:
    raise RustPanic("boom")


async def _exit() -> None:
    raise SystemExit(0)


async def _fail_without_a_text() -> None:
    raise AssertionError


ENDS = [_return, _panic, _exit, _fail_without_a_text, stray_cancellation]


def ended_by(monkeypatch: pytest.MonkeyPatch, end: Callable[[], Awaitable[None]]) -> anyio.Event:
    """Make the stages of the next engine end so once the event is set."""
    ends, run = anyio.Event(), StageGroup.run

    async def run_until(group: StageGroup, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with anyio.create_task_group() as tasks:
            await tasks.start(lambda *, task_status: run(group, task_status=task_status))
            task_status.started()
            await ends.wait()
            tasks.cancel_scope.cancel()
        await end()

    monkeypatch.setattr(StageGroup, "run", run_until)
    return ends


@pytest.mark.parametrize("end", ENDS)
async def test_every_caller_and_the_host_learn_that_the_stages_have_ended(
    end: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, gate = ended_by(monkeypatch, end), Gate()
    told: list[EngineStopped] = []

    async def ask(engine: Engine) -> None:
        try:
            await engine.embed("text")
        except EngineStopped as error:
            told.append(error)

    async with engine_on(LetterModel(on_forward=lambda _: gate())) as engine:
        async with anyio.create_task_group() as asking:
            asking.start_soon(ask, engine)
            await gate.arrived()
            ends.set()
            gate.open()
            assert (reason := await engine.wait_broken())
        assert len(told) == 1
        assert engine.fault == reason
        with pytest.raises(EngineStopped, match="takes no requests"):
            await engine.embed("text")


async def test_an_engine_that_is_closed_in_order_is_not_broken(logged: list[structlog.typing.EventDict]) -> None:
    async with engine_on(LetterModel()) as engine:
        await engine.embed("text")
    assert await engine.wait_broken() == ""
    assert not [event for event in logged if event["log_level"] == "error"]


async def test_an_engine_whose_host_is_cancelled_is_not_broken(logged: list[structlog.typing.EventDict]) -> None:
    with anyio.CancelScope() as scope:
        async with engine_on(LetterModel()) as engine:
            scope.cancel()
            await anyio.sleep_forever()
    assert await engine.wait_broken() == ""
    assert not [event for event in logged if event["log_level"] == "error"]


@pytest.mark.parametrize("end", ENDS[1:])
async def test_a_worker_that_ends_so_has_crashed_and_begins_again(
    end: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ended = Stage._supervise, [False]

    async def supervise(stage: Stage, worker: Callable[[], Awaitable[None]]) -> None:
        async def work() -> None:
            if not ended[0]:
                ended[0] = True
                await end()
            await worker()

        await run(stage, work)

    monkeypatch.setattr(Stage, "_supervise", supervise)
    async with engine_on(LetterModel()) as engine:
        await until(lambda: ended[0])
        await engine.embed("text")
        assert sum(stage.crashes for stage in engine.statistics().stages) == 1
        assert engine.fault is None
