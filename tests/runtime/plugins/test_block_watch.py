"""Hooks that block the event loop are found and named, while they block and afterwards."""

from __future__ import annotations

import threading
import time
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import structlog
from blockbuster import BlockBuster

from staged_pool.runtime.plugins import block_watch
from staged_pool.runtime.plugins.block_watch import BlockWatch
from staged_pool.runtime.plugins.processor import PluginContext
from tests.runtime.plugins.hosting import Letters, statistics
from tests.servers.engines import engine_of_plugin

pytestmark = pytest.mark.anyio


async def test_a_step_that_blocks_is_named_with_its_line_while_it_blocks(
    logged: list[structlog.typing.EventDict], nothing_blocks_the_event_loop: BlockBuster
) -> None:
    nothing_blocks_the_event_loop.deactivate()  # this test blocks it
    found = threading.Event()

    class Blocks(Letters):
        async def load(self, prompt: Any, context: PluginContext) -> Any:
            await anyio.lowlevel.checkpoint()
            deadline = time.monotonic() + 30
            while not any(event["event"] == "plugin.hook_blocks" for event in logged) and time.monotonic() < deadline:
                time.sleep(0.001)  # noqa: ASYNC251  # it is to block
            found.set()
            return await super().load(prompt, context)

    async with engine_of_plugin(Blocks()) as engine:
        assert (await engine.process({"text": "a"}))["codes"] == [97]
        assert found.is_set()
        assert dict(statistics(engine).blocked) == {"load": 1}
    (event,) = [event for event in logged if event["event"].startswith("plugin.")]
    assert (event["plugin"], event["hook"]) == ("codes", "load")
    assert "test_block_watch.py" in event["where"]


async def test_a_step_is_named_afterwards_if_the_thread_could_not_run(
    logged: list[structlog.typing.EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_watch, "BLOCKS_S", 0.0)  # every step is too long, and the watching thread is not there
    watch = BlockWatch("p")

    async def hook() -> str:
        await anyio.lowlevel.checkpoint()
        return "done"

    assert await watch.watched("parse", hook()) == "done"
    assert watch.blocked["parse"] >= 2
    assert {event["event"] for event in logged} == {"plugin.hook_blocked"}


async def test_steps_that_wait_are_no_blocks(
    logged: list[structlog.typing.EventDict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_watch, "BLOCKS_S", 0.5)  # longer than a busy machine holds a step up
    watch = BlockWatch("p")

    async def hook() -> int:
        await anyio.sleep(block_watch.BLOCKS_S + 0.1)
        return 1

    async with watch.running():
        assert await watch.watched("load", hook()) == 1
    assert not watch.blocked
    assert not logged


async def test_errors_and_cancellations_pass_through() -> None:
    watch, seen = BlockWatch("p"), []

    async def fails() -> None:
        await anyio.lowlevel.checkpoint()
        raise KeyError("a")

    with pytest.raises(KeyError):
        await watch.watched("load", fails())

    async def waits() -> None:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            seen.append("cancelled")
            raise

    with anyio.move_on_after(0.01) as scope:
        await watch.watched("load", waits())
    assert scope.cancelled_caught
    assert seen == ["cancelled"]
