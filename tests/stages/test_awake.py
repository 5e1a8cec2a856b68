"""Limits that a freeze of the process does not use up, in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from staged_pool.stages.awake import STEP_S, call_awake_after, move_on_awake_after, sleep_awake
from tests.sim import clock as virtual
from tests.sim.clock import BACKENDS, Backend
from tests.sim.fleet.doubles import jump


def run(program: Callable[[], Awaitable[None]], backend: Backend) -> None:
    assert virtual.run(program, backend=backend, seed=0) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_limit_is_over_after_its_seconds(backend: Backend) -> None:
    async def program() -> None:
        async with move_on_awake_after(5.0) as limit:
            await anyio.sleep_forever()
        assert limit.cancelled_caught
        assert anyio.current_time() == pytest.approx(5.0)

    run(program, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_freeze_uses_up_one_step_of_a_limit_at_most(backend: Backend) -> None:
    async def program() -> None:
        async with move_on_awake_after(5.0) as limit:
            await anyio.sleep(1.1)
            jump(1000.0)
            await anyio.sleep(5.0 - 1.1 - 2 * STEP_S)  # the block is still in time
        assert not limit.cancelled_caught

    run(program, backend)


def test_a_freeze_uses_up_one_step_of_a_call_at_most() -> None:
    clock, ran, freezes, calls = [0.0], [0.0], [1000.0], list[float]()

    def sleep(seconds: float) -> None:
        """Sleep as the system does: a sleep within which the process is frozen is over as the freeze ends."""
        clock[0] += seconds
        ran[0] += 0.0 if clock[0] == 3 * STEP_S else seconds
        if clock[0] == 3 * STEP_S:
            clock[0] += freezes.pop()

    call_awake_after(5.0, lambda: calls.append(ran[0]), sleep).join(10)
    assert not freezes, "it was frozen"
    assert calls == [5.0 - STEP_S]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_that_ends_in_time_is_not_cancelled_and_leaves_nothing(backend: Backend) -> None:
    async def program() -> None:
        async with move_on_awake_after(5.0) as limit:
            await anyio.sleep(1.0)
        assert not limit.cancel_called
        assert anyio.current_time() == 1.0
        await sleep_awake(0.1)
        assert anyio.current_time() == pytest.approx(1.1)

    run(program, backend)
