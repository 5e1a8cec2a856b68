"""Many random schedules of the real engine: each seed that fails is named with the command that repeats it."""

from __future__ import annotations

import pytest

from tests.sim.clock import BACKENDS, Backend
from tests.sim.running import Report, prepared, run_block, run_seed
from tests.sim.seeds import FOUND

BLOCK = 100
BLOCKS = [(BACKENDS[first // BLOCK % 2], first) for first in range(0, 2000, BLOCK)]


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """Nothing here could: there are no sockets, no threads and no time."""


def shown(failed: list[Report]) -> str:
    return "\n".join(f"{violation}\n  {report.command}" for report in failed for violation in report.violations)


@pytest.mark.parametrize(("backend", "first"), BLOCKS)
def test_every_request_has_one_right_outcome_whatever_happens(backend: Backend, first: int) -> None:
    _, failed, outcomes = run_block((range(first, first + BLOCK), backend))
    assert not failed, shown(failed)
    assert outcomes["answered"] > outcomes.total() / 5, "these worlds are too hostile to prove anything"


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeds_that_found_a_bug_once_find_none_now(backend: Backend) -> None:
    _, failed, _ = run_block((list(FOUND), backend))
    assert not failed, shown(failed)


def test_a_seed_is_the_same_every_time() -> None:
    with prepared():
        for seed in range(20):
            assert run_seed(seed, "trio", verbose=True) == run_seed(seed, "trio", verbose=True)
