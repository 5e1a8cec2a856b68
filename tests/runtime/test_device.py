"""The device's threads: how many calls at once, what a stuck one does, and what cancellation does."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import torch

from staged_pool.runtime.models.kernels.torch_threads import restore_threads, use_threads
from staged_pool.runtime.threads import openmp
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.errors import DeviceLost
from tests.support.gates import Gate
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def thread_of(_: object) -> int:
    return threading.get_ident()


async def test_calls_one_after_the_other_run_on_one_thread() -> None:
    async with DeviceThreads("test device", watchdog_s=30).running() as device:
        device.grow(3)
        assert len({await device(thread_of, None) for _ in range(5)}) == 1


async def test_as_many_calls_run_at_once_as_there_are_threads() -> None:
    gates = [Gate() for _ in range(3)]
    begun: list[int] = []

    def call(number: int) -> None:
        begun.append(number)
        gates[number]()

    async with DeviceThreads("test device", watchdog_s=30).running() as device, anyio.create_task_group() as tasks:
        device.grow(2)
        for number in range(2):
            tasks.start_soon(device, call, number)
            await gates[number].arrived()
        tasks.start_soon(device, call, 2)
        await anyio.wait_all_tasks_blocked()
        assert begun == [0, 1]
        gates[1].open()
        await gates[2].arrived()
        assert begun == [0, 1, 2]
        gates[0].open()
        gates[2].open()


async def test_an_error_is_raised_where_the_call_was_made_and_the_thread_goes_on() -> None:
    def fail(_: object) -> None:
        raise ValueError("mine")

    async with DeviceThreads("test device", watchdog_s=30).running() as device:
        with pytest.raises(ValueError, match="mine"):
            await device(fail, None)
        assert await device(len, "abc") == 3


async def test_a_call_that_waits_for_a_thread_is_not_stuck() -> None:
    """The watchdog counts from when a call begins: the one in front has no limit here, and takes longer."""
    gate = Gate()
    results: list[int] = []

    async with DeviceThreads("test device", watchdog_s=0.05).running() as device, anyio.create_task_group() as tasks:

        async def measured() -> None:
            results.append(await device(len, "abc"))

        async def unlimited() -> None:
            await device.run(gate, None)

        tasks.start_soon(unlimited)
        await gate.arrived()
        tasks.start_soon(measured)
        with anyio.move_on_after(0.2):  # several times the watchdog
            await until(lambda: bool(results))
        assert not results
        gate.open()
        await until(lambda: results == [3])


async def test_a_stuck_call_fails_the_calls_that_wait_and_lets_those_end_that_run() -> None:
    stuck, running = Gate(), Gate()
    outcomes: dict[str, object] = {}

    async with DeviceThreads("test device", watchdog_s=0.05).running() as device, anyio.create_task_group() as tasks:
        device.grow(2)

        async def call(name: str, gate: Gate, timeout_s: float | None) -> None:
            try:
                outcomes[name] = await device.run(gate, None, timeout_s=timeout_s)
            except DeviceLost as error:
                outcomes[name] = error

        tasks.start_soon(call, "runs", running, None)
        await running.arrived()
        tasks.start_soon(call, "stuck", stuck, 0.05)
        await stuck.arrived()
        tasks.start_soon(call, "waits", Gate(), None)
        await until(lambda: "waits" in outcomes)
        assert isinstance(outcomes["stuck"], DeviceLost)
        assert isinstance(outcomes["waits"], DeviceLost)
        assert "runs" not in outcomes
        running.open()
        await until(lambda: outcomes.get("runs", "not there") is None)
        with pytest.raises(DeviceLost):
            await device(len, "abc")
        stuck.open()


async def test_a_cancelled_call_that_waits_never_begins_and_one_that_runs_ends_first() -> None:
    gate = Gate()
    begun: list[str] = []

    def call(name: str) -> None:
        begun.append(name)
        gate()

    async with DeviceThreads("test device", watchdog_s=30).running() as device:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(device, call, "runs")
            await gate.arrived()
            with anyio.move_on_after(0):
                await device(call, "waits")
            tasks.cancel_scope.cancel()
            gate.open()
        assert begun == ["runs"]
        assert await device(len, "abc") == 3


async def test_no_thread_is_left() -> None:
    async with DeviceThreads("test device", watchdog_s=30).running() as device:
        device.grow(3)
        device.grow(2)
        mine = [thread for thread in threading.enumerate() if thread.name.startswith("test device")]
        assert len(mine) == 3
    assert not any(thread.is_alive() for thread in mine)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not show threads as files")
async def test_an_idle_thread_keeps_no_openmp_team() -> None:
    def shown() -> int:
        names = Path("/proc/self/task").glob("*/comm")
        return sum(name.read_text() == "helped device 0\n" for name in names)

    def share(_: object) -> int:
        with restore_threads():
            use_threads(2)
            torch.ones(4_000_000).sum()
        return shown()

    if await anyio.to_thread.run_sync(openmp._pause) is None:
        pytest.skip("this build of torch has another OpenMP")
    async with DeviceThreads("helped device", watchdog_s=30).running() as device:
        for _ in range(2):
            shared = await device(share, None)
            with anyio.fail_after(30):
                while await anyio.to_thread.run_sync(shown) != shared - 1:
                    pass


FROZEN = """
import sys, threading, anyio
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.errors import DeviceLost

go = threading.Event()

def call(_):
    print("begun", flush=True)
    go.wait()
    return "answered"

async def main():
    async with DeviceThreads("frozen", watchdog_s=4.0).running() as device, anyio.create_task_group() as tasks:
        async def thawed():
            await anyio.to_thread.run_sync(sys.stdin.readline)
            go.set()
        tasks.start_soon(thawed)
        try:
            print(await device(call, None), flush=True)
        except DeviceLost as error:
            print(error, flush=True)
            go.set()

anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_process_that_stood_still_for_longer_than_the_limit_loses_no_device(backend: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FROZEN, backend], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(5.0)  # the process is stopped meanwhile
        process.send_signal(signal.SIGCONT)
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "answered\n"
