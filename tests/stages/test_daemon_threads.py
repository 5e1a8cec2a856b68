"""Threads for calls that may be left behind: they reach the event loop, and keep no program from its end."""

from __future__ import annotations

import contextvars
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest
import sniffio

from staged_pool.stages import daemon_threads
from staged_pool.stages.daemon_threads import NAME, call_in_daemon
from tests.servers.preloaded import ROOT
from tests.support.gates import Gate
from tests.support.waiting import until

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")

OFFLOAD = """
from staged_pool.stages.errors import Abandoned
from staged_pool.stages.offload import ThreadOffload

async def main():
    offload = ThreadOffload(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(let_go, offload)
        await anyio.to_thread.run_sync(began.wait)
        offload.abandon()

async def let_go(offload):
    try:
        await offload(hang, None)
    except Abandoned:
        print("left", flush=True)
"""

PIPELINE = """
from staged_pool import DeadlineExceeded, Pipeline

async def main():
    try:
        await Pipeline([hang]).submit([1], timeout_s=0.2)
    except DeadlineExceeded:
        print("left", flush=True)
"""

CANCELLED = """
from staged_pool.runtime.config import EngineConfig
from tests.runtime.plugins.hosting import AwaitedLetters
from tests.servers.engines import engine_of_plugin
from tests.support.waiting import until

class Hangs(AwaitedLetters):
    def cancelled(self, context):
        hang(context)

async def main():
    letters = Hangs(waits_in="load")
    async with engine_of_plugin(letters) as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.process, {"text": "a"})
            await until(lambda: letters.waiting == 1)
            tasks.cancel_scope.cancel()
    print("left", flush=True)
"""

PROGRAM = """
import sys, threading
import anyio
began = threading.Event()

def hang(_):
    began.set()
    threading.Event().wait()
{}
options = {{"use_uvloop": True}} if sys.argv[1] == "uvloop" else {{}}
anyio.run(main, backend="trio" if sys.argv[1] == "trio" else "asyncio", backend_options=options)
"""


@pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])
@pytest.mark.parametrize("program", [OFFLOAD, PIPELINE, CANCELLED], ids=["offload", "pipeline", "cancelled"])
def test_a_program_ends_although_a_call_that_it_has_left_hangs(program: str, backend: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(program), backend]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=40, check=False)
    assert (ended.returncode, ended.stdout) == (0, "left\n"), ended.stderr


@pytest.mark.anyio
async def test_a_call_reaches_its_event_loop() -> None:
    found: list[object] = []
    here = threading.get_ident()

    async def answer() -> int:
        await anyio.lowlevel.checkpoint()
        return threading.get_ident()

    def call() -> None:
        found.extend((anyio.from_thread.run(answer), anyio.from_thread.run_sync(threading.get_ident)))
        anyio.from_thread.check_cancelled()

    await call_in_daemon(call)
    assert found == [here, here]


@pytest.mark.anyio
async def test_a_call_that_was_left_can_notice_it() -> None:
    gate, noticed = Gate(), threading.Event()

    def call() -> None:
        gate()
        try:
            anyio.from_thread.check_cancelled()
        except BaseException:  # noqa: BLE001  # the cancellation of the event loop
            noticed.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call_in_daemon, call)
        await gate.arrived()
        tasks.cancel_scope.cancel()
    gate.open()
    await until(noticed.is_set)


@pytest.mark.anyio
async def test_a_call_has_the_context_of_its_task_and_no_event_loop() -> None:
    VARIABLE.set("given")
    found: list[object] = []

    def call() -> None:
        found.append(VARIABLE.get())
        VARIABLE.set("lost")
        with pytest.raises(sniffio.AsyncLibraryNotFoundError):
            sniffio.current_async_library()

    await call_in_daemon(call)
    assert (found, VARIABLE.get()) == (["given"], "given")


@pytest.mark.anyio
@pytest.mark.parametrize("can_claim", [True, False])
async def test_calls_at_once_have_threads_of_their_own(can_claim: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_threads, "_can_claim", can_claim)
    together = threading.Barrier(5, timeout=30)
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(call_in_daemon, together.wait)


class Thing:
    def use(self) -> None: ...


@pytest.mark.anyio
async def test_an_idle_thread_keeps_nothing_alive() -> None:
    thing = Thing()
    gone = weakref.ref(thing)
    await call_in_daemon(thing.use)
    del thing
    await until(lambda: gone() is None)


async def twice(call: Callable[[], object]) -> None:
    for _ in range(2):
        await call_in_daemon(call)


def test_threads_serve_one_event_loop_after_the_other_and_end_when_they_are_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    for _ in range(2):
        anyio.run(twice, lambda: threads.append(threading.current_thread()))
    assert len(set(threads)) == 1
    assert {(thread.name, thread.daemon) for thread in threads} == {(NAME, True)}
    monkeypatch.setattr(daemon_threads, "IDLE_S", 0.0)
    anyio.run(call_in_daemon, gc.collect)  # it looks at the time anew
    threads[0].join(30)
    assert not threads[0].is_alive()
    anyio.run(call_in_daemon, partial(threads.append, threads[0]))  # a new one
    assert len(threads) == 5
