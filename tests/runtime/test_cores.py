"""Threads that take turns at cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import anyio
import pytest
from numpy.testing import assert_array_equal

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.machine import cores as machine_cores
from staged_pool.runtime.machine.cores import usable_cores
from staged_pool.runtime.threads import core_limiter as cores_module
from staged_pool.runtime.threads.core_limiter import CoreLimiter, lend_core
from staged_pool.runtime.threads.dedicated_threads import DedicatedThreads
from staged_pool.runtime.threads.device import DeviceThreads
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

A = TypeVar("A")
T = TypeVar("T")

pytestmark = pytest.mark.anyio


class Calls:
    """Calls that are held in the middle, each by a gate of its own."""

    def __init__(self, count: int) -> None:
        self.gates = [Gate() for _ in range(count)]
        self.begun: list[int] = []

    def __call__(self, number: int) -> None:
        self.begun.append(number)
        self.gates[number]()


def waiting(cores: CoreLimiter) -> int:
    """Threads that wait for a core."""
    return len(cores._changed._waiters)  # type: ignore[attr-defined]  # nothing else says so


async def test_threads_of_two_pools_compute_on_no_more_cores_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores_module, "CORE_TIMEOUT_S", 60.0)
    cores, calls = CoreLimiter(2), Calls(4)
    async with DedicatedThreads("some").running(0) as some, DedicatedThreads("others").running(0) as others:
        for threads in (some, others):
            threads.grow(2)
            threads.core = cores.acquire
        async with anyio.create_task_group() as tasks:
            for number, threads in enumerate((some, others)):
                tasks.start_soon(threads, calls, number)
                await calls.gates[number].arrived()
            tasks.start_soon(some, calls, 2)
            tasks.start_soon(others, calls, 3)
            await until(lambda: waiting(cores) == 2)
            assert calls.begun == [0, 1]
            calls.gates[0].open()
            await until(lambda: len(calls.begun) == 3)
            third = calls.begun[2]
            calls.gates[third].open()
            await until(lambda: len(calls.begun) == 4)
            for gate in calls.gates:
                gate.open()


async def test_a_core_comes_back_after_an_error() -> None:
    cores = CoreLimiter(1)
    async with DedicatedThreads("failing").running(0) as threads:
        threads.grow(1)
        threads.core = cores.acquire
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await threads(lambda _: 1 // 0, None)
        assert cores._free == 1


async def test_a_call_that_hangs_does_not_keep_the_others_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores_module, "CORE_TIMEOUT_S", 0.001)
    cores, calls = CoreLimiter(1), Calls(1)
    async with DedicatedThreads("hanging").running(0) as hanging, DedicatedThreads("others").running(0) as others:
        for threads in (hanging, others):
            threads.grow(1)
            threads.core = cores.acquire
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hanging, calls, 0)
            await calls.gates[0].arrived()
            assert [await others(len, "abc") for _ in range(3)] == [3, 3, 3]
            calls.gates[0].open()
        assert cores._free == 1


async def test_what_is_urgent_waits_for_nobody_and_one_less_of_the_others_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cores_module, "CORE_TIMEOUT_S", 60.0)
    cores, calls = CoreLimiter(1), Calls(4)
    async with DedicatedThreads("urgent").running(2) as urgent, DedicatedThreads("others").running(2) as others:
        urgent.core, others.core = cores.bypass, cores.acquire
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(others, calls, 0)
            await calls.gates[0].arrived()
            for number in (1, 2):
                tasks.start_soon(urgent, calls, number)
                await calls.gates[number].arrived()
            tasks.start_soon(others, calls, 3)
            await until(lambda: waiting(cores) == 1)
            assert cores._free == -2
            calls.gates[0].open()
            await until(lambda: cores._free == -1)
            calls.gates[1].open()
            await until(lambda: cores._free == 0)
            assert (waiting(cores), calls.begun) == (1, [0, 1, 2])
            calls.gates[2].open()
            await calls.gates[3].arrived()
            calls.gates[3].open()
        assert cores._free == 1


async def test_threads_without_cores_wait_for_none() -> None:
    calls = Calls(3)
    async with DedicatedThreads("free").running(3) as threads, anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(threads, calls, number)
            await calls.gates[number].arrived()
        for gate in calls.gates:
            gate.open()


class Late:
    """An `Offload` whose thread has to wait for a core first."""

    def __init__(self) -> None:
        self.waits = anyio.Event()
        self.has_core = anyio.Event()

    async def __call__(self, function: Callable[[A], T], argument: A, /) -> T:
        self.waits.set()
        await self.has_core.wait()
        return function(argument)


async def test_nothing_is_prepared_for_a_caller_who_left_while_the_thread_waited() -> None:
    model, late = LetterModel(), Late()
    async with (
        DeviceThreads("test device", watchdog_s=30).running() as device,
        run_engine(EngineConfig(preprocess_limit=1), model, device=device, preprocess=late) as engine,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.embed, "gone")
            await late.waits.wait()
            tasks.cancel_scope.cancel()
        late.has_core.set()
        assert_array_equal((await engine.embed("a")).embeddings, [expected("a")])
        assert engine.statistics().stages[1].dropped == {"abandoned": 1, "expired": 0, "failed": 0}
    assert model.preprocessed == [["a"]]


def test_a_process_may_run_on_fewer_cores_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_cores, "_QUOTA", None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3}, raising=False)
    assert usable_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert usable_cores() == 5


class Parts:
    """A long call of two parts, each of which is held; between them it lends its core."""

    def __init__(self) -> None:
        self.gates = [Gate(), Gate()]

    def __call__(self, _: object) -> None:
        self.gates[0]()
        lend_core()
        self.gates[1]()


@pytest.mark.parametrize("urgent", [True, False])
async def test_a_long_call_lends_its_core_between_its_parts(urgent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores_module, "CORE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(cores_module, "CORE_TURN_S", 0.0)
    cores, parts, calls = CoreLimiter(1), Parts(), Calls(1)
    async with DedicatedThreads("long").running(1) as long, DedicatedThreads("others").running(1) as others:
        long.core, others.core = cores.acquire, cores.bypass if urgent else cores.acquire
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long, parts, None)
            await parts.gates[0].arrived()
            tasks.start_soon(others, calls, 0)
            await (calls.gates[0].arrived() if urgent else until(lambda: waiting(cores) == 1))
            parts.gates[0].open()
            await calls.gates[0].arrived()
            await until(lambda: waiting(cores) == 1)  # the long call
            calls.gates[0].open()
            await parts.gates[1].arrived()
            assert cores._free == 0
            parts.gates[1].open()
        assert cores._free == 1


async def test_a_core_is_kept_if_nobody_needs_it_and_no_more_lent_if_it_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cores_module, "CORE_TIMEOUT_S", 0.001)
    cores, lent = CoreLimiter(1), [0]
    lend = CoreLimiter.lend

    def counted(limiter: CoreLimiter) -> bool:
        lent[0] += 1
        return lend(limiter)

    monkeypatch.setattr(CoreLimiter, "lend", counted)

    def long(times: int) -> None:
        for _ in range(times):
            lend_core()

    async with DedicatedThreads("long").running(1) as threads:
        long(3)  # a thread without a core
        threads.core = cores.acquire
        await threads(long, 3)
        assert lent == [0]
        with cores.bypass(), cores.bypass():  # as if they hung
            await threads(long, 3)
        assert lent == [1]
        await threads(long, 3)
        assert (lent, cores._free) == ([1], 1)
