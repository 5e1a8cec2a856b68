"""Calls in threads under a limiter."""

from __future__ import annotations

import anyio
import pytest

from staged_pool.stages.errors import Abandoned
from staged_pool.stages.offload import ThreadOffload
from tests.support.gates import Gate
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_an_offload_has_its_own_limit_and_no_other() -> None:
    """Anyio's own limit is 40 threads for all calls of the process."""
    gate, offload, here = Gate(), ThreadOffload(60), list[int]()

    def call(place: int) -> None:
        here.append(place)
        gate()

    async with anyio.create_task_group() as tasks:
        for place in range(60):
            tasks.start_soon(offload, call, place)
        await until(lambda: len(here) == 60)
        gate.open()


async def test_who_waits_for_a_thread_that_another_offload_holds_is_let_go() -> None:
    gate, first, second = Gate(), ThreadOffload(1), ThreadOffload(1)
    second.limiter = first.limiter
    ended: list[str] = []

    async def call(offload: ThreadOffload, name: str) -> None:
        try:
            await offload(gate, name)
        except Abandoned:
            ended.append(f"{name} let go")
        else:
            ended.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, first, "holds")
        await gate.arrived()
        tasks.start_soon(call, second, "waits")
        await until(lambda: first.limiter.statistics().tasks_waiting == 1)
        second.abandon()
        await until(lambda: bool(ended))
        assert ended == ["waits let go"], "what hangs belongs to another"
        gate.open()
    assert ended == ["waits let go", "holds"]
