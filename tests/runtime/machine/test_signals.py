"""Signals: each entry point sets its handlers in one place, and a program that embeds an engine keeps its own."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import anyio
import pytest

from staged_pool.runtime.machine import signals
from tests.servers.preloaded import ROOT

PLACES = ("api", "runtime", "stages")

SETTERS = frozenset({"signal", "set_wakeup_fd", "add_signal_handler", "open_signal_receiver", "register", "enable"})
"""Functions that set a handler: of `signal`, event loops, anyio and `faulthandler`."""

ENTRY_POINTS = {
    "staged_pool.api.commands.cli:main": "all commands; `process.run` sets the handlers of those with an event loop, "
    "and `serve` notes signals before",
    "api/commands/child.py": "sets them first of all",
    "api/commands/reference.py": "prints a page of the documents, and ends",
    "runtime/workers/program.py": "sets them first of all; its pipe ends it",
}
"""All programs of the package, each with the way in which it handles signals."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for place in PLACES:
        for path in sorted((ROOT / place).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def test_every_entry_point_is_known_here() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values()
    programs = {path for path, module in sources() if any(_is_main(node) for node in module.body)}
    assert programs | set(scripts) == set(ENTRY_POINTS)


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def test_handlers_are_set_in_one_place() -> None:
    setting = {
        path
        for path, module in sources()
        for node in ast.walk(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in SETTERS
        and ast.unparse(node.func.value) in {"signal", "anyio", "faulthandler", "loop", "asyncio.get_running_loop()"}
    }
    assert setting == {"runtime/machine/signals.py"}


def test_every_event_loop_of_a_command_runs_behind_the_handlers() -> None:
    running = {
        path
        for path, module in sources()
        if path.startswith("api/commands/")
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"anyio.run", "asyncio.run", "trio.run"}
    }
    assert running == {"api/commands/process.py"}


def handled(program: str, *sent: signal.Signals) -> int:
    """Send signals to a program that has printed a line. Returns its exit code."""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        for number in sent:
            process.send_signal(number)
        process.communicate("\n")
        return process.returncode


RUNS = "from staged_pool.runtime.machine import signals\n{}\nprint('begun', flush=True)\ninput()"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_that_ask_for_stacks_end_nothing(number: signal.Signals) -> None:
    assert handled(RUNS.format("signals.write_stacks_on_signals()"), number, number) == 0
    assert handled(RUNS.format(""), number) == -number, "without the handler they end the process"


def test_a_child_leaves_signals_that_end_to_its_parent_and_passes_none_of_it_on() -> None:
    ending = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    assert handled(RUNS.format("signals.leave_the_end_to_the_parent()"), *ending) == 0
    starting = "import subprocess, sys, signal; signals.leave_the_end_to_the_parent()\n"
    starting += "own = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
    starting += "own.send_signal(signal.SIGTERM); assert own.wait() == -signal.SIGTERM"
    assert handled(RUNS.format(starting)) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_noted_ends_nothing_and_a_second_one_ends_the_process(number: signal.Signals) -> None:
    program = RUNS.format("signals.note_end_signals()")
    assert handled(program, number) == 0
    twice = RUNS.format(f"import os; signals.note_end_signals(); os.kill(os.getpid(), {number:d})")
    assert handled(twice, signal.SIGTERM) == 128 + signal.SIGTERM


@pytest.fixture
def noting() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    signals.note_end_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.anyio
@pytest.mark.usefixtures("noting")
async def test_a_signal_that_was_noted_is_received_before_later_ones() -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    with signals.end_signals() as received:
        os.kill(os.getpid(), signal.SIGTERM)
        with anyio.fail_after(60):
            assert [await anext(received) for _ in range(2)] == [signal.SIGHUP, signal.SIGTERM]


@pytest.mark.anyio
@pytest.mark.usefixtures("noting")
async def test_a_signal_that_was_noted_is_received_once() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    with signals.end_signals() as received:
        with anyio.fail_after(60):
            assert await anext(received) == signal.SIGTERM
        again = anyio.move_on_after(0.1)
        with again:
            await anext(received)
        assert again.cancelled_caught
        os.kill(os.getpid(), signal.SIGTERM)
        with anyio.fail_after(60):
            assert await anext(received) == signal.SIGTERM


def test_only_the_first_interrupt_is_ignored() -> None:
    taken: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: taken.append(number))
    try:
        with signals.first_interrupt_ignored():
            os.kill(os.getpid(), signal.SIGINT)
            assert not taken
            os.kill(os.getpid(), signal.SIGINT)
            assert taken == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_the_host_stays() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        signals.write_stacks_on_signals()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
