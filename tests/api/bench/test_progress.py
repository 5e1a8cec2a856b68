"""The line of progress."""

from __future__ import annotations

import io
import re

import anyio
import pytest
from rich.console import Console

from staged_pool.api.bench.address import Address
from staged_pool.api.bench.bench import Bench, Settings
from staged_pool.api.bench.level import Plan
from staged_pool.api.bench.progress import progress_line, show_progress
from staged_pool.api.bench.workload import Inputs, Target
from tests.api.bench.fake_server import FakeServer, answer, fake_server
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def bench_of(server: FakeServer, plan: Plan) -> Bench:
    address = Address.of(server.url)
    target = Target(authority=address.authority)
    return Bench(Settings(address=address, target=target, inputs=Inputs(mix={"texts": 1.0}), plan=plan, seed=1))


@pytest.mark.parametrize(
    ("plan", "phase"),
    [
        (Plan(clients=1, warmup_s=60.0), r"warm-up \d of 60 s"),
        (Plan(clients=1, warmup_s=0.0, round_s=60.0), r"round 1 of 3, \d of 180 s"),
    ],
)
async def test_a_line_says_the_phase_and_the_counts(plan: Plan, phase: str) -> None:
    async with fake_server(lambda asked: answer()) as server, anyio.create_task_group() as tasks:
        bench = bench_of(server, plan)
        assert progress_line(bench) == "asking the server"
        tasks.start_soon(bench.run)
        await until(lambda: bool(bench.levels) and bench.levels[0].records.statuses[200] >= 5)
        line = progress_line(bench)
        bench.stop()
    assert re.fullmatch(rf"level 1: 1 client\(s\), {phase}; \d+ answered, 0 rejected, 0 failed", line), line


async def test_the_last_answers_are_waited_for() -> None:
    gate = anyio.Event()

    async def answering(_: object) -> bytes:
        if bench.levels:
            await gate.wait()
        return answer()

    async with fake_server(answering) as server, anyio.create_task_group() as tasks:
        bench = bench_of(server, Plan(clients=1, warmup_s=0.0, round_s=0.02, rounds=1))
        tasks.start_soon(bench.run)
        await until(lambda: bool(bench.levels) and "waiting for the last answers" in progress_line(bench))
        gate.set()


@pytest.mark.parametrize("is_terminal", [True, False])
async def test_it_is_shown_on_terminals_only(is_terminal: bool) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, width=100)
    async with fake_server(lambda asked: answer()) as server, anyio.create_task_group() as tasks:
        bench = bench_of(server, Plan(clients=1))
        tasks.start_soon(show_progress, bench, console)
        await until(lambda: bool(shown.getvalue()) or not is_terminal)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert ("asking the server" in shown.getvalue()) == is_terminal
    assert bool(shown.getvalue()) == is_terminal
