"""Threads of our own, and how they stand back."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import weakref
from pathlib import Path

import anyio
import pytest

from staged_pool.runtime.threads.dedicated_threads import DedicatedThreads
from staged_pool.runtime.threads.worker import is_first
from tests.support.gates import Gate
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def priority(_: object = None) -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
async def test_a_nice_thread_stands_back_and_no_other_does() -> None:
    before = priority()
    async with DedicatedThreads("nice", nice=3).running(2) as nice, DedicatedThreads("others").running() as others:
        assert await nice(priority, None) == min(19, before + 3)
        assert await others(priority, None) == before
    assert priority() == before


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not show it")
async def test_the_system_shows_a_thread_by_its_name() -> None:
    def shown(_: object) -> str:
        return Path("/proc/thread-self/comm").read_text()

    async with DedicatedThreads("staged-pool counts letters").running() as threads:
        assert await threads(shown, None) == "counts letters \n"


async def test_what_a_call_was_made_of_is_gone_as_soon_as_its_error() -> None:
    class Body:
        """An object in the argument of a call."""

    def read(body: Body) -> None:
        try:
            raise KeyError(body)
        except KeyError as error:
            raise ValueError("wrong") from error

    body = Body()
    gone = weakref.ref(body)
    async with DedicatedThreads("reader").running() as threads:
        gc.disable()
        try:
            with contextlib.suppress(ValueError):
                await threads(read, body)
            del body
            await until(lambda: gone() is None, within_s=5)
        finally:
            gc.enable()


async def test_threads_can_come_later() -> None:
    async with DedicatedThreads("later").running(0) as threads:
        threads.grow(2)
        assert await threads(len, "abc") == 3


async def test_a_thread_that_has_waited_for_a_while_does_what_it_does_at_rest() -> None:
    rested: list[int] = []

    def thread_of(_: object = None) -> int:
        return threading.get_ident()

    async with DedicatedThreads("rests", on_idle=lambda: rested.append(thread_of())).running() as threads:
        await until(lambda: len(rested) == 1, within_s=10)
        mine = await threads(thread_of, None)
        await until(lambda: rested == [mine, mine], within_s=10)
        assert await threads(thread_of, None) == mine


async def test_the_first_thread_that_is_idle_gets_the_call() -> None:
    gates = {False: Gate(), True: Gate()}

    def stay(wanted: bool) -> bool:
        gates[wanted](None)
        return is_first()

    async with DedicatedThreads("first").running(3) as threads, anyio.create_task_group() as tasks:
        assert [await threads(lambda _: is_first(), None) for _ in range(3)] == [True] * 3
        firsts: list[bool] = []

        async def ask(wanted: bool) -> None:
            firsts.append(await threads(stay, wanted))

        tasks.start_soon(ask, True)
        await gates[True].arrived()
        tasks.start_soon(ask, False)  # while the first is in a call
        await gates[False].arrived()
        gates[True].open()
        await until(lambda: len(threads._idle) == 2)
        gates[False].open()
        await until(lambda: len(firsts) == 2)
        assert firsts == [True, False]
        # Idle in another order than they were made, and yet the first is the first.
        assert await threads(lambda _: is_first(), None)
    assert is_first()  # a thread of nobody's


async def test_a_thread_goes_on_with_a_call_that_waits_before_the_event_loop_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = DedicatedThreads("busy")
    first, second = Gate(), Gate()
    untold: list[tuple[object, ...]] = []
    hears = threads._has_ended
    monkeypatch.setattr(threads, "_has_ended", lambda *what: untold.append(what))
    async with threads.running(), anyio.create_task_group() as tasks:
        tasks.start_soon(threads, first, None)
        await first.arrived()
        tasks.start_soon(threads, second, None)
        await anyio.wait_all_tasks_blocked()
        first.open()
        await second.arrived()
        second.open()
        await until(lambda: len(untold) == 2)
        assert not threads._idle
        for job, goes_on in untold:
            hears(job, goes_on)  # type: ignore[arg-type]
        assert len(threads._idle) == 1


async def test_as_many_calls_as_there_are_run_each_once_and_on_every_thread() -> None:
    seen: list[int] = []
    async with DedicatedThreads("many").running(4) as threads, anyio.create_task_group() as tasks:
        for number in range(500):
            tasks.start_soon(threads, seen.append, number)
    assert sorted(seen) == list(range(500))


async def test_a_call_on_each_thread_runs_on_all_of_them_at_once() -> None:
    meeting = threading.Barrier(3, timeout=10)
    met: list[str] = []

    def meet(_: None) -> None:
        meeting.wait()
        met.append(threading.current_thread().name)

    async with DedicatedThreads("each").running(3) as threads:
        await threads.run_on_each(meet, None)
        assert sorted(met) == ["each 0", "each 1", "each 2"]
        with pytest.raises(ZeroDivisionError):
            await threads.run_on_each(lambda _: 1 // 0, None)
        await threads.run_on_each(meet, None)  # none of them is lost by an error
        assert len(met) == 6


async def test_calls_that_wait_and_are_cancelled_never_begin() -> None:
    begun: list[int] = []
    gate = Gate()

    def call(number: int) -> None:
        begun.append(number)
        gate()

    async with DedicatedThreads("cancelled").running() as threads:
        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(threads, call, number)
            await gate.arrived()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await until(lambda: not threads._waiting)
            gate.open()
        assert len(begun) == 1
        assert await threads(len, "abc") == 3
