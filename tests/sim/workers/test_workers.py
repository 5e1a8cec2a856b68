"""Many random schedules of a pool of worker processes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from staged_pool.runtime.workers import pool as pool_module
from staged_pool.runtime.workers.jobs import NotBegun, WorkerDied
from staged_pool.runtime.workers.pool import Call, WorkerPool
from tests.sim.running import collect_garbage, prepared
from tests.sim.shrink import deviations, shrunk, way
from tests.sim.workers.plan import draw, from_json
from tests.sim.workers.processes import VirtualProcess
from tests.sim.workers.running import run_workers
from tests.sim.world import to_json

SEEDS = 500
"""Seeds among which each planted bug is noticed."""
SOUND = 150
"""Seeds of the short form; `python -m tests.sim --workers` runs more."""


def test_every_job_has_one_right_outcome_and_nothing_is_left() -> None:
    failed, outcomes = {}, Counter[str]()
    with prepared():
        for seed in range(SOUND):
            report = run_workers(draw(seed))
            outcomes += report.outcomes
            if report.violations:
                failed[seed] = report.violations
        collect_garbage()
    assert not failed
    assert outcomes["Done"] > outcomes.total() / 3, "these worlds are too hostile to prove anything"


def _a_job_is_lost_with_a_process_that_has_not_begun_it() -> Any:
    return mock.patch.object(pool_module, "NotBegun", ())


def _a_job_goes_to_another_process_also_when_it_was_begun() -> Any:
    return mock.patch.object(pool_module, "NotBegun", (NotBegun, WorkerDied))


def _places_of_processes_that_ended_are_lost() -> Any:
    return mock.patch.object(WorkerPool, "_vacate")


def _dead_processes_become_idle() -> Any:
    return mock.patch.object(WorkerPool, "_retire", WorkerPool._give_back)


def _a_late_cancellation_kills_the_process_of_another_job() -> Any:
    original = WorkerPool._give_back

    def give_back(self: WorkerPool, process: Any, call: Call) -> None:
        original(self, process, call)
        call.process = process

    return mock.patch.object(WorkerPool, "_give_back", give_back)


def _a_cancelled_job_runs_to_its_end() -> Any:
    return mock.patch.object(VirtualProcess, "kill")


def _a_call_that_waits_does_not_see_that_it_is_cancelled() -> Any:
    return mock.patch.object(WorkerPool, "_check")


def _processes_are_replaced_before_they_have_ended() -> Any:
    return mock.patch.object(VirtualProcess, "reap")


@pytest.mark.parametrize(
    "bug",
    [
        _a_job_is_lost_with_a_process_that_has_not_begun_it,
        _a_job_goes_to_another_process_also_when_it_was_begun,
        _places_of_processes_that_ended_are_lost,
        _dead_processes_become_idle,
        _a_late_cancellation_kills_the_process_of_another_job,
        _a_cancelled_job_runs_to_its_end,
        _a_call_that_waits_does_not_see_that_it_is_cancelled,
        _processes_are_replaced_before_they_have_ended,
    ],
)
def test_a_planted_bug_is_noticed(bug: Callable[[], Any]) -> None:
    with prepared(), bug():
        assert any(run_workers(draw(seed)).violations for seed in range(SEEDS))
        collect_garbage()


def test_the_same_seed_runs_the_same_way() -> None:
    with prepared(), _processes_are_replaced_before_they_have_ended():
        assert [run_workers(draw(seed)) for seed in range(40)] == [run_workers(draw(seed)) for seed in range(40)]
        collect_garbage()


def test_a_failing_world_is_reduced_and_reads_back_from_its_json() -> None:
    with prepared(), _a_job_is_lost_with_a_process_that_has_not_begun_it():
        world, found = next(
            (world, report.violations)
            for seed in range(SEEDS)
            for world in [draw(seed)]
            if (report := run_workers(world)).violations
        )
        given = to_json(world)
        assert from_json(json.loads(json.dumps(given))) == world

        def fails(candidate: Any) -> bool:
            try:
                violations = run_workers(from_json(candidate)).violations
            except (TypeError, ValueError, LookupError):
                return False
            return bool(violations) and way(violations[0]) == way(found[0])

        small = shrunk(given, fails, most_runs=150)
        assert deviations(small) < deviations(given)
        collect_garbage()
