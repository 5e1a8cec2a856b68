"""Many random schedules of a pipeline on two engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from itertools import islice
from typing import Any
from unittest import mock

import anyio
import pytest

from staged_pool.runtime.engine.entrance import Entrance
from staged_pool.runtime.engine.waiting_engine import WaitingEngine
from staged_pool.runtime.pipelines.parts import Expansion
from staged_pool.runtime.pipelines.run import PipelineRun
from staged_pool.runtime.pipelines.source import END, Source
from staged_pool.runtime.pipelines.window import Window
from staged_pool.stages.user_code import Panic
from tests.sim.clock import BACKENDS, Backend
from tests.sim.pipes.plan import draw, from_json
from tests.sim.pipes.running import FunctionThreads, run_pipes
from tests.sim.running import collect_garbage, prepared
from tests.sim.shrink import deviations, shrunk, way
from tests.sim.world import to_json

BLOCK = 100
BLOCKS = [(BACKENDS[first // BLOCK % 2], first) for first in range(0, 200, BLOCK)]


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """Do not watch for blocking calls: the simulator has no sockets, threads or real time."""


@pytest.mark.parametrize(("backend", "first"), BLOCKS)
def test_every_request_has_one_right_outcome_and_nothing_is_left(backend: Backend, first: int) -> None:
    failed, outcomes = {}, list[str]()
    with prepared():
        for seed in range(first, first + BLOCK):
            simulation = run_pipes(draw(seed), backend)
            outcomes += simulation.outcomes.values()
            if simulation.violations:
                failed[seed] = simulation.violations
        collect_garbage()
    assert not failed
    assert outcomes.count("answered") > len(outcomes) / 4, "these worlds are too hostile to prove anything"


def _places_are_not_given_back() -> Any:
    return mock.patch.object(Window, "leave")


def _windows_have_no_limit() -> Any:
    original = Window.enter

    async def enter(self: Window, *args: Any, **how: Any) -> None:
        self.limit += 1
        try:
            await original(self, *args, **how)
        finally:
            self.limit -= 1

    return mock.patch.object(Window, "enter", enter)


def _engines_reject_inside() -> Any:
    return mock.patch.object(WaitingEngine, "submit", lambda self, *args, **how: self._engine.submit(*args, **how))


def _a_departure_lets_nobody_in() -> Any:
    original = Entrance.grant
    return mock.patch.object(Entrance, "grant", lambda self: original(self) if self.waiting == 1 else None)


def _failures_are_forgotten() -> Any:
    return mock.patch.object(PipelineRun, "fail")


def _cancelled_turns_keep_their_place() -> Any:
    return mock.patch("staged_pool.runtime.pipelines.window.FairQueue.drop")


class _NoBoundary:
    """Stands for a block of `user_code`, and lets everything out."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        pass


def _stages_have_no_boundary() -> Any:
    return mock.patch("staged_pool.runtime.pipelines.run.user_code", _NoBoundary)


def _sources_have_no_boundary() -> Any:
    return mock.patch("staged_pool.runtime.pipelines.source.user_code", _NoBoundary)


def _strays_of_sources_end_them() -> Any:
    original = Source.next

    async def take(self: Source) -> object:
        try:
            return await original(self)
        except Panic as panic:
            if "Cancel" not in panic.kind:
                raise
            return END

    return mock.patch.object(Source, "next", take)


def _an_error_of_a_source_drops_what_is_done() -> Any:
    original = PipelineRun.fail
    return mock.patch.object(PipelineRun, "fail", lambda self, error, **_: original(self, error))


def _one_more_part_is_taken() -> Any:
    return mock.patch("staged_pool.runtime.pipelines.parts.islice", lambda values, most: islice(values, most + 1))


def _a_part_too_many_goes_on() -> Any:
    return mock.patch.object(Expansion, "_checked", lambda self, parts: parts)


def _functions_hold_their_callers() -> Any:
    original = FunctionThreads.__call__

    async def call(self: FunctionThreads, function: Any, argument: Any) -> Any:
        with anyio.CancelScope(shield=True):
            return await original(self, function, argument)

    return mock.patch.object(FunctionThreads, "__call__", call)


def _parts_go_before_everybody() -> Any:
    """Parts get a priority of their own, as they once had."""
    spread, enter, leave = PipelineRun._spread, Window.enter, Window.leave
    of_parts: ContextVar[bool] = ContextVar("of_parts", default=False)
    urgent: dict[Window, list[anyio.Event]] = {}

    async def spread_first(self: PipelineRun, count: int, way: Any) -> None:
        of_parts.set(True)
        await spread(self, count, way)

    async def enter_first(self: Window, claim: Any) -> None:
        if not of_parts.get() or self.taken < self.limit:
            await enter(self, claim)
            return
        urgent.setdefault(self, []).append(turn := anyio.Event())
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self.leave()
            else:
                urgent[self].remove(turn)
            raise

    def leave_first(self: Window) -> None:
        if urgent.get(self):
            urgent[self].pop(0).set()
        else:
            leave(self)

    stack = ExitStack()
    stack.enter_context(mock.patch.object(PipelineRun, "_spread", spread_first))
    stack.enter_context(mock.patch.object(Window, "enter", enter_first))
    stack.enter_context(mock.patch.object(Window, "leave", leave_first))
    return stack


@pytest.mark.parametrize(
    "bug",
    [
        _stages_have_no_boundary,
        _sources_have_no_boundary,
        _strays_of_sources_end_them,
        _an_error_of_a_source_drops_what_is_done,
        _one_more_part_is_taken,
        _a_part_too_many_goes_on,
        _functions_hold_their_callers,
        _parts_go_before_everybody,
        _places_are_not_given_back,
        _windows_have_no_limit,
        _engines_reject_inside,
        _a_departure_lets_nobody_in,
        _failures_are_forgotten,
        _cancelled_turns_keep_their_place,
    ],
)
def test_a_planted_bug_is_noticed(bug: Callable[[], Any]) -> None:
    with prepared(), bug():
        assert any(run_pipes(draw(seed), BACKENDS[seed % 2]).violations for seed in range(150))
        collect_garbage()


def test_a_failing_world_is_reduced_and_reads_back_from_its_json() -> None:
    with prepared(), _windows_have_no_limit():
        world, found = next(
            (world, simulation.violations)
            for seed in range(150)
            for world in [draw(seed)]
            if (simulation := run_pipes(world, "trio")).violations
        )
        given = to_json(world)
        assert from_json(json.loads(json.dumps(given))) == world

        def fails(candidate: Any) -> bool:
            try:
                violations = run_pipes(from_json(candidate), "trio").violations
            except (TypeError, ValueError, LookupError):
                return False
            return bool(violations) and way(violations[0]) == way(found[0])

        small = shrunk(given, fails, most_runs=150)
        assert deviations(small) < deviations(given)
        collect_garbage()
