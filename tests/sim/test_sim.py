"""Many random schedules of the real engine: each seed that fails is named with the command that repeats it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sim import order
from tests.sim.clock import BACKENDS, Backend
from tests.sim.draw import draw
from tests.sim.mutations import planted
from tests.sim.running import Report, collect_garbage, prepared, run_block, run_json, run_seed, smallest
from tests.sim.shrink import deviations
from tests.sim.web.running import run_web_block
from tests.sim.world import World, from_json, to_json

BLOCK = 100
BLOCKS = [(BACKENDS[first // BLOCK % 2], first) for first in range(0, 400, BLOCK)]

FOUND = sorted(Path(__file__).with_name("worlds").glob("*.json"))
"""Worlds that found a bug once, each with the mutation that plants it again."""

HANDFUL = 12
"""Deviations from a plain world."""


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """Do not watch for blocking calls: the simulator has no sockets, threads or real time."""


def shown(failed: list[Report], world: str = "") -> str:
    return "\n".join(f"{violation}\n  {report.command(world)}" for report in failed for violation in report.violations)


@pytest.mark.parametrize(("backend", "first"), BLOCKS)
def test_every_request_has_one_right_outcome_whatever_happens(backend: Backend, first: int) -> None:
    _, failed, outcomes = run_block((range(first, first + BLOCK), backend))
    assert not failed, shown(failed)
    assert outcomes["answered"] > outcomes.total() / 5, "these worlds are too hostile to prove anything"


@pytest.mark.parametrize(("backend", "first"), [(BACKENDS[n % 2], n * 50) for n in range(2)])
def test_every_request_that_is_whole_is_answered_whatever_the_connections_do(backend: Backend, first: int) -> None:
    _, failed, outcomes = run_web_block((range(first, first + 50), backend))
    assert not failed, shown(failed, "web")
    assert outcomes["answered"] > 100, "these connections ask too little to prove anything"


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_a_world_that_found_a_bug_once_finds_it_when_it_is_planted_again_and_nothing_now(path: Path) -> None:
    found: dict[str, Any] = json.loads(path.read_text())
    with prepared():
        assert not run_json(found["world"], found["backend"]).violations, found["bug"]
        with planted(found["mutation"]):
            assert run_json(found["world"], found["backend"]).violations, "the world is stale"
            collect_garbage()


@pytest.mark.parametrize("first", range(0, 300, 150))
def test_items_go_to_the_device_in_the_order_of_a_scheduler_that_is_slow_and_simple(first: int) -> None:
    assert not {seed: wrong for seed in range(first, first + 150) if (wrong := order.check(seed))}


def test_a_seed_is_the_same_every_time() -> None:
    with prepared():
        for seed in range(10):
            assert run_seed(seed, "trio", verbose=True) == run_seed(seed, "trio", verbose=True)


def test_a_world_is_the_same_when_it_has_been_json() -> None:
    for seed in range(100):
        world = draw(seed)
        assert from_json(json.loads(json.dumps(to_json(world)))) == world
    assert to_json(World()) == {}


def test_a_failing_world_is_reduced_to_a_handful_of_deviations_always_the_same() -> None:
    with prepared(), planted("drain_without_a_sweep"):
        seed, report = next((s, r) for s in range(2000) if (r := run_seed(s, "trio")).violations)
        small = smallest(to_json(draw(seed)), report)
        assert small == smallest(to_json(draw(seed)), report)
        assert deviations(small) <= HANDFUL < deviations(to_json(draw(seed)))
        assert run_json(small, "trio").violations
        collect_garbage()
