"""Many random fates of a fleet: the real supervisor over doubles of its processes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import anyio.lowlevel
import pytest

from staged_pool.api.app import fleet as app_fleet
from staged_pool.api.app.fleet import Accepting
from staged_pool.api.fleet import lines, supervisor
from staged_pool.api.fleet.control import Drain
from staged_pool.api.fleet.lines import MissedLine
from staged_pool.api.fleet.names import ENGINE
from staged_pool.api.fleet.processes import Child
from staged_pool.api.fleet.supervisor import Supervisor
from staged_pool.stages.changes import Changes
from tests.sim.clock import BACKENDS, Backend
from tests.sim.fleet import running
from tests.sim.fleet.plan import draw, from_json
from tests.sim.fleet.running import run_fleet, run_fleet_json
from tests.sim.running import collect_garbage, prepared
from tests.sim.world import to_json

WORLDS = 100
"""On each backend; `python -m tests.sim --fleet` runs more."""

FOUND = sorted(Path(__file__).with_name("worlds").glob("*.json"))
"""Worlds that failed once, each with the reason."""


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """Do not watch for blocking calls: the simulator has no sockets, threads or real time."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_somebody_accepts_nobody_healthy_is_killed_and_the_end_is_in_time(backend: Backend) -> None:
    failed, outcomes = {}, Counter[str]()
    with prepared():
        for seed in range(WORLDS):
            report = run_fleet(draw(seed), backend)
            outcomes += report.outcomes
            if report.violations:
                failed[seed] = report.violations
        left = collect_garbage()
    assert not failed
    assert not left
    assert min(outcomes["answered"], outcomes["503"], outcomes["reset"]) > 100, "little happens in these worlds"


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_a_world_that_failed_once_fails_no_more(path: Path) -> None:
    found: dict[str, Any] = json.loads(path.read_text())
    with prepared():
        assert not run_fleet_json(found["world"], found["backend"]).violations, found["bug"]
        collect_garbage()


@pytest.mark.parametrize("wrong", [{"fronts": 0}, {"pieces": 0}, {"every_s": 0.0}])
def test_a_world_in_which_nothing_can_run_is_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a world has"):
        from_json(wrong)


def test_a_world_reads_back_from_its_json() -> None:
    for seed in range(20):
        assert from_json(json.loads(json.dumps(to_json(draw(seed))))) == draw(seed)


# ---- planted bugs ----


def an_event_is_replaced_under_its_waiter() -> Any:
    def welcomed(self: Accepting) -> None:
        self._phase = app_fleet._Phase.OPENING
        self._changes = Changes()

    return mock.patch.object(Accepting, "welcomed", welcomed)


def a_starting_front_never_learns_that_nobody_serves() -> Any:
    return mock.patch.object(Accepting, "tell")


def a_front_does_not_ask_whether_others_serve() -> Any:
    original = Accepting.__init__

    def begin(self: Accepting) -> None:
        original(self)
        self._others_serve = False

    return mock.patch.object(Accepting, "__init__", begin)


def a_front_accepts_before_it_is_ready() -> Any:
    return mock.patch.object(Accepting, "is_on", True)


def a_child_that_is_being_started_is_not_drained() -> Any:
    async def end(self: Supervisor, ending: Sequence[str], limit_s: float) -> bool:
        for name in ending:
            if (child := self._children.get(name)) is not None:
                child.control.post(Drain())
        with anyio.move_on_after(limit_s) as limit:
            await self._changes.until(lambda: self._kept.isdisjoint(ending))
        return not limit.cancelled_caught

    return mock.patch.object(Supervisor, "_end", end)


def only_children_that_run_are_waited_for() -> Any:
    original = Supervisor._end

    async def end(self: Supervisor, ending: Sequence[str], limit_s: float) -> bool:
        return await original(self, [name for name in ending if name in self._children], limit_s)

    return mock.patch.object(Supervisor, "_end", end)


def silence_is_measured_by_the_clock() -> Any:
    def heard(self: Child, take: Callable[[Child, Any], object]) -> Callable[[Any], object]:
        def note(order: Any) -> None:
            self._started_at = anyio.current_time()
            take(self, order)

        return note

    async def watch(self: Supervisor) -> None:
        while True:
            await self._outside.sleep(1.0)
            for child in list(self._children.values()):
                if child.lived_s > self._silent_s:
                    child.kill()

    return mock.patch.multiple(Child, _heard=heard), mock.patch.object(Supervisor, "_watch", watch)


def the_limit_of_a_drain_is_by_the_clock() -> Any:
    class Limit:
        def __init__(self, seconds: float, _sleep: object) -> None:
            self._scope = anyio.move_on_after(seconds)

        async def __aenter__(self) -> anyio.CancelScope:
            return self._scope.__enter__()

        async def __aexit__(self, *error: Any) -> Any:
            return self._scope.__exit__(*error)

    return mock.patch.object(supervisor, "move_on_awake_after", Limit)


def a_load_is_waited_for_at_the_end() -> Any:
    return mock.patch.object(Supervisor, "_order_the_end", lambda self, child: child.control.post(Drain()))


def an_engine_process_that_is_ready_is_killed_at_the_end() -> Any:
    original = Supervisor._order_the_end

    def order(self: Supervisor, child: Child) -> None:
        child.kill() if child.name == ENGINE else original(self, child)

    return mock.patch.object(Supervisor, "_order_the_end", order)


def an_engine_process_that_loads_is_killed_when_its_fronts_end() -> Any:
    original = Supervisor._note

    def note(self: Supervisor) -> None:
        original(self)
        engine = self._children.get(ENGINE)
        if engine is not None and not engine.is_ready and engine.lived_s > 0.1 and not self._running_fronts():
            engine.kill()

    return mock.patch.object(Supervisor, "_note", note)


def a_lost_line_is_not_replaced() -> Any:
    return mock.patch.object(Supervisor, "_take_lost")


def a_front_says_nothing_of_a_line_that_it_cannot_take() -> Any:
    async def take(receive: Callable[[], Awaitable[Any]], *rest: Any) -> None:
        async def whole() -> Any:
            while isinstance(line := await receive(), MissedLine):
                pass
            return line

        await lines.take_lines(whole, *rest)

    return mock.patch.object(running, "take_lines", take)


def a_line_that_could_not_be_made_counts_as_made() -> Any:
    async def join(self: Supervisor) -> None:
        while True:
            await self._changes.until(lambda: self._unjoined() is not None)
            engine, front = self._children[ENGINE], self._unjoined()
            assert front is not None
            front.line, front.joined = next(self._lines), engine
            with suppress(OSError):
                await self._outside.send_line(front.line, front.handover, engine.handover)

    return mock.patch.object(Supervisor, "_join", join)


def a_child_that_hangs_is_left_alone() -> Any:
    return mock.patch.object(Child, "kill", lambda self: None if self.silent_s > 1.0 else self.process.kill())


def a_child_is_started_again_only_after_long() -> Any:
    return mock.patch.object(supervisor, "FIRST_PAUSE_S", 1000.0)


def a_child_that_fails_in_the_drain_is_forgotten() -> Any:
    return mock.patch.object(Supervisor, "_note_end")


def streams_of_a_child_stay_open() -> Any:
    original = Child.run

    async def run(self: Child) -> int:
        self.handover = mock.Mock(wraps=self.handover, aclose=anyio.lowlevel.checkpoint)
        return await original(self)

    return mock.patch.object(Child, "run", run)


BUGS: dict[Callable[[], Any], int] = {
    an_event_is_replaced_under_its_waiter: 45,
    a_starting_front_never_learns_that_nobody_serves: 149,
    a_front_does_not_ask_whether_others_serve: 1004950,
    a_front_accepts_before_it_is_ready: 44,
    a_child_that_is_being_started_is_not_drained: 3,
    only_children_that_run_are_waited_for: 3,
    silence_is_measured_by_the_clock: 10,
    the_limit_of_a_drain_is_by_the_clock: 23,
    a_load_is_waited_for_at_the_end: 13,
    an_engine_process_that_is_ready_is_killed_at_the_end: 0,
    an_engine_process_that_loads_is_killed_when_its_fronts_end: 29,
    a_lost_line_is_not_replaced: 4,
    a_front_says_nothing_of_a_line_that_it_cannot_take: 27,
    a_line_that_could_not_be_made_counts_as_made: 4,
    a_child_that_hangs_is_left_alone: 146,
    a_child_is_started_again_only_after_long: 1,
    a_child_that_fails_in_the_drain_is_forgotten: 12,
    streams_of_a_child_stay_open: 0,
}
"""Bugs, each with a seed that has noticed it; after a change of the worlds others may."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(bug: Callable[[], Any]) -> None:
    planted = bug()
    with prepared(), ExitStack() as stack:
        for each in planted if isinstance(planted, tuple) else (planted,):
            stack.enter_context(each)
        assert any(run_fleet(draw(seed), BACKENDS[seed % 2]).violations for seed in (BUGS[bug], *range(200)))
        collect_garbage()
