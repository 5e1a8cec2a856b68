"""Hooks in processes: their errors, their values, and the ends of their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.plugins.processor import PluginContext, Processor
from staged_pool.stages.errors import InvalidInput, PluginFailed
from tests.runtime.plugins.hosting import is_idle
from tests.servers.engines import engine_of_plugin
from tests.support.waiting import until
from tests.support.worker_processes import make_zombie, prepare_zombie, processes

pytestmark = pytest.mark.anyio


class Bomb:
    """A value that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise SystemExit("a secret")


class Odd(Processor):
    """A plugin in processes, whose requests say what happens."""

    isolation = "process"

    def __init__(self) -> None:
        self.calls = 0

    def preprocess(self, loaded: Any, context: PluginContext) -> Any:
        self.calls += 1
        match loaded:
            case "pid":
                return [os.getpid()]
            case "calls":
                return [self.calls]
            case "zombie":
                return [prepare_zombie()]
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "reject":
                raise InvalidInput("this will not do", param="data", index=2)
            case "raise":
                raise ZeroDivisionError("a secret")
            case "exit":
                raise SystemExit("a secret")
            case "lock":
                context.state = threading.Lock()
        return [loaded]

    def forward(self, batch: Any) -> Any:
        return batch

    def postprocess(self, rows: Any, context: PluginContext) -> Any:
        return rows[0]


async def test_a_process_that_died_while_idle_costs_no_request() -> None:
    async with engine_of_plugin(Odd(), config=EngineConfig(preprocess_limit=1)) as engine:
        os.kill(await engine.process("pid"), signal.SIGKILL)
        assert await engine.process("a") == "a"
        half_dead = await engine.process("zombie")
        await anyio.to_thread.run_sync(make_zombie, half_dead)
        assert await engine.process("b") == "b"
        assert await engine.process("pid") != half_dead


async def test_a_process_that_dies_in_a_hook_fails_its_request_alone(
    logged: list[structlog.typing.EventDict],
) -> None:
    async with engine_of_plugin(Odd(), config=EngineConfig(preprocess_limit=1)) as engine:
        with pytest.raises(PluginFailed, match="hook `preprocess`"):
            await engine.process("die")
        assert await engine.process("a") == "a"
        await until(lambda: is_idle(engine))
    assert [event["exit_code"] for event in logged if event["event"] == "workers.process_died"] == [-signal.SIGKILL]


async def test_errors_of_hooks_keep_their_class_and_their_traceback(
    logged: list[structlog.typing.EventDict],
) -> None:
    async with engine_of_plugin(Odd(), config=EngineConfig(preprocess_limit=1)) as engine:
        with pytest.raises(PluginFailed, match="hook `preprocess`"):
            await engine.process(Bomb())
        with pytest.raises(InvalidInput, match="this will not do") as rejected:
            await engine.process("reject")
        assert (rejected.value.param, rejected.value.index) == ("data", 2)
        for loaded in ("raise", "exit", "lock"):
            with pytest.raises(PluginFailed) as failed:
                await engine.process(loaded)
            assert "secret" not in str(failed.value)
        assert await engine.process("a") == "a"
    errors = [event["exc_info"] for event in logged if event["event"] == "plugin.failed"]
    assert isinstance(errors[0].__cause__, SystemExit)
    assert isinstance(errors[1], ZeroDivisionError)
    assert 'raise ZeroDivisionError("a secret")' in errors[1].__notes__[0]
    assert isinstance(errors[2].__cause__, SystemExit)
    assert "pickle" in str(errors[3])


async def test_a_plugin_is_sent_to_a_process_once_and_processes_end_with_the_engine() -> None:
    plugin = Odd()
    before = await anyio.to_thread.run_sync(processes)
    async with engine_of_plugin(plugin, config=EngineConfig(preprocess_limit=1)) as engine:
        assert await anyio.to_thread.run_sync(processes) == before
        await engine.process("a")
        assert len(await anyio.to_thread.run_sync(processes) - before) == 1
        # Hooks in one process share its copy of the plugin, as those in threads share the plugin.
        assert await engine.process("calls") == 2
        assert plugin.calls == 0
    assert await anyio.to_thread.run_sync(processes) == before


PROGRAM = """
import anyio

from staged_pool import EngineConfig, Processor, open_engine


class Own:
    def __init__(self, text):
        self.text = text


class Mine(Processor):
    isolation = "process"

    def parse(self, data, context):
        return Own(data["text"])

    def preprocess(self, own, context):
        return [own.text]

    def forward(self, batch):
        return [len(text) for text in batch]

    def postprocess(self, rows, context):
        return Own(f"{rows} of the program")


async def main():
    async with open_engine(EngineConfig(), plugins=[Mine()]) as engine:
        print((await engine.process({"text": "abc"})).text)


if __name__ == "__main__":
    anyio.run(main)
"""


def test_a_plugin_and_its_values_may_be_of_the_program_itself(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "[3] of the program\n", done.stderr
