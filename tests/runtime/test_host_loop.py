"""Engines and their tasks, seen from other tasks, event loops and threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest
import trio

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.host_loop import OwnTask
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.errors import ConfigError
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def _running(model: LetterModel) -> AsyncIterator[Engine]:
    config = EngineConfig()
    async with DeviceThreads("test device", watchdog_s=config.watchdog_s).running() as device:
        async with run_engine(config, model, device=device) as engine:
            yield engine


def open_letters(model: LetterModel | None = None) -> OwnTask[Engine]:
    """As `open_engine`, with a model that loads at once."""
    return OwnTask(lambda: _running(model or LetterModel()), "The engine")


async def _give(rows: object) -> None:
    await anyio.lowlevel.checkpoint()


CALLS: dict[str, Callable[[Engine], Any]] = {
    "embed": lambda engine: engine.embed("a"),
    "embed with a time limit": lambda engine: engine.embed("a", timeout_s=60),
    "tokenize": lambda engine: engine.tokenize("a"),
    "stream": lambda engine: engine.stream(lambda: pytest.fail("decoded"), lambda places, result: result, _give),
    "drain": lambda engine: engine.drain(1.0),
    "wait_broken": lambda engine: engine.wait_broken(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("other", ["asyncio", "trio"])
async def test_a_call_from_another_event_loop_says_so_at_once(call: Callable[[Engine], Any], other: str) -> None:
    async with open_letters() as engine:

        async def ask() -> None:
            with anyio.fail_after(30), pytest.raises(RuntimeError, match="another event loop"):
                await call(engine)

        await anyio.to_thread.run_sync(lambda: anyio.run(ask, backend=other))
        await engine.embed("its own loop is served")


async def test_a_worker_thread_asks_through_the_engines_own_loop() -> None:
    async with open_letters() as engine:
        result = await anyio.to_thread.run_sync(lambda: anyio.from_thread.run(engine.embed, "a"))
    assert result.embeddings.shape == (1, 4)


def test_an_engine_whose_loop_has_ended_says_so() -> None:
    left: list[Engine] = []

    async def opens() -> None:
        left.append(await open_letters().__aenter__())
        await left[0].embed("a")

    asyncio.run(opens())
    with pytest.raises(RuntimeError, match="has ended: open one in each event loop"):
        asyncio.run(_embed(left[0]))
    with pytest.raises(RuntimeError, match="Here runs one of trio"):
        trio.run(_embed, left[0])


async def _embed(engine: Engine) -> None:
    await engine.embed("a")


async def _in_a_task_of_its_own(function: Callable[[], Any]) -> Any:
    results = []

    async def run() -> None:
        results.append(await function())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
    return results[0]


async def test_one_task_opens_another_asks_and_a_third_closes() -> None:
    stack = AsyncExitStack()
    engine: Engine = await _in_a_task_of_its_own(lambda: stack.enter_async_context(open_letters()))
    result = await _in_a_task_of_its_own(lambda: engine.embed("a"))
    assert result.embeddings.shape == (1, 4)
    await _in_a_task_of_its_own(stack.aclose)
    assert engine.phase == "stopped"


async def test_a_request_in_flight_is_finished_before_another_task_has_closed_the_engine() -> None:
    device, answers = Gate(), []
    opened = open_letters(LetterModel(on_forward=device))
    engine = await _in_a_task_of_its_own(opened.__aenter__)

    async def ask() -> None:
        answers.append(await engine.embed("a"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await device.arrived()
        tasks.start_soon(opened.__aexit__, None, None, None)
        await until(lambda: engine.phase == "draining")
        device.open()
    assert len(answers) == 1


async def test_the_error_of_the_block_stops_the_engine_and_is_raised_as_it_is() -> None:
    with pytest.raises(ValueError, match="the host's own"):
        async with open_letters() as engine:
            raise ValueError("the host's own")
    assert engine.phase == "stopped"


async def test_a_cancelled_block_stops_the_engine() -> None:
    with anyio.CancelScope() as scope:
        async with open_letters() as engine:
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert engine.phase == "stopped"


async def test_an_error_of_opening_is_raised_to_the_caller_that_opens() -> None:
    found: str | None = None

    @asynccontextmanager
    async def fails() -> AsyncIterator[None]:
        await anyio.lowlevel.checkpoint()
        if found is None:
            raise ConfigError("no such model")
        yield

    with pytest.raises(ConfigError, match="no such model"):
        await OwnTask(fails, "The engine").__aenter__()


async def test_opening_that_is_cancelled_is_undone_before_the_caller_goes_on() -> None:
    said: list[str] = []
    loading = anyio.Event()

    @asynccontextmanager
    async def opens() -> AsyncIterator[None]:
        try:
            loading.set()
            await anyio.sleep_forever()
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            said.append("undone")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(OwnTask(opens, "The engine").__aenter__)
        await loading.wait()
        tasks.cancel_scope.cancel()
    assert said == ["undone"]


async def test_an_error_of_closing_is_raised_to_the_caller_that_closes() -> None:
    @asynccontextmanager
    async def opens() -> AsyncIterator[int]:
        await anyio.lowlevel.checkpoint()
        yield 7
        raise OSError("cannot close")

    with pytest.raises(OSError, match="cannot close"):
        async with OwnTask(opens, "The engine") as value:
            assert value == 7


async def test_one_that_is_opened_twice_or_closed_unopened_says_so() -> None:
    opened = open_letters()
    with pytest.raises(RuntimeError, match="never opened"):
        await opened.__aexit__(None, None, None)
    async with opened:
        with pytest.raises(RuntimeError, match="opened before"):
            await opened.__aenter__()


_NEVER_CLOSED = """
import anyio, gc
from tests.runtime.test_host_loop import open_letters

async def main(requests):
    engine = await open_letters().__aenter__()
    for _ in range(requests):
        gc.collect()
        await engine.embed("a")

for requests in (0, 2):
    anyio.run(main, requests, backend={backend!r}, backend_options={options!r})
    print("ended")
"""


@pytest.mark.parametrize(("backend", "options"), [("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})])
def test_an_engine_that_is_never_closed_ends_with_its_loop(backend: str, options: dict[str, bool]) -> None:
    program = _NEVER_CLOSED.format(backend=backend, options=options)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "ended\nended\n", "")
