"""One world of a pool of processes: the real pool, with virtual threads and processes."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from staged_pool.runtime.workers.jobs import Done, Failed, JobCancelled, WorkerDied
from staged_pool.runtime.workers.pool import Call, Machine, WorkerPool
from staged_pool.stages.errors import ConfigError, EngineStopped
from tests.sim.clock import Backend, Stuck
from tests.sim.running import Report, run_block
from tests.sim.workers.plan import JobPlan, WorkersWorld, draw, from_json
from tests.sim.workers.processes import GRACE_S, Farm
from tests.sim.workers.threads import VirtualCondition, VirtualThreads

EPSILON = 1e-9
LATE_S = 2 * GRACE_S
"""Longest wait for a cancelled call whose process starts: it waits for the end of that."""


@dataclass(frozen=True)
class AnyWork:
    """Work that nobody opens: the processes are doubles."""


class WorkersSimulation:
    """One run of a world."""

    def __init__(self, world: WorkersWorld) -> None:
        self.world = world
        self.violations: list[str] = []
        self.outcomes: dict[int, str] = {}
        rng = random.Random(world.seed)
        self._threads = VirtualThreads(rng)
        self._farm = Farm(world, self._threads, rng, self.violations.append)
        self._left = len(world.jobs)
        self._closed_at = math.inf
        self._pool: WorkerPool | None = None

    def run(self) -> None:
        """Run the world until each job has its outcome, and the pool is closed."""
        self._threads.start(self._run)
        try:
            self._threads.run()
        except Stuck as stuck:
            waiting = sorted(set(range(len(self.world.jobs))) - self.outcomes.keys())
            self.violations.append(f"{stuck}; jobs without an outcome: {waiting}")
            if self._pool is not None:
                self._pool._end_all.detach()
        self.violations += [f"a thread ended by {error!r}" for error in self._threads.errors]

    def _run(self) -> None:
        threads, world = self._threads, self.world
        machine = Machine(process=self._farm.start, condition=lambda: VirtualCondition(threads), thread=threads.start)
        for kill in world.kills:
            threads.start(partial(self._at, kill.at, partial(self._farm.kill, kill)))
        try:
            self._pool = pool = WorkerPool("sim", AnyWork(), world.processes, lazily=world.lazily, machine=machine)  # type: ignore[arg-type]
        except (ConfigError, OSError):
            self.outcomes = dict.fromkeys(range(len(world.jobs)), "not opened")
            if not self._farm.refusals:
                self.violations.append("the pool cannot start, and nothing is in its way")
            self._check_ended()
            return
        began_at = threads.now
        for number, plan in enumerate(world.jobs):
            threads.start(partial(self._at, began_at + plan.arrives_at, partial(self._ask, pool, number, plan)))
        if world.closes_at < math.inf:
            threads.start(partial(self._at, began_at + world.closes_at, partial(self._close, pool)))
        threads.wait(lambda: not self._left)
        if world.closes_at == math.inf:
            self._check_rest(pool)
            self._close(pool)
        self._check_ended()

    def _at(self, time: float, function: Any) -> None:
        self._threads.sleep_until(time)
        function()

    def _close(self, pool: WorkerPool) -> None:
        self._closed_at = self._threads.now
        pool.close()

    def _ask(self, pool: WorkerPool, number: int, plan: JobPlan) -> None:
        call, asked_at = Call(), self._threads.now
        cancelled_at = asked_at - plan.arrives_at + plan.cancelled_at
        if cancelled_at < math.inf:
            self._threads.start(partial(self._at, cancelled_at, partial(pool.cancel, call)))
        found: Any
        try:
            found = pool.answer((number, plan.kind, plan.ticks), call)
        except (WorkerDied, EngineStopped, JobCancelled) as error:
            found = error
        self.outcomes[number] = type(found).__name__
        self._left -= 1
        if wrong := self._wrong(number, plan, found, asked_at, cancelled_at):
            self.violations.append(f"job {number}: {found!r}: {wrong}")

    def _wrong(self, number: int, plan: JobPlan, found: Any, asked_at: float, cancelled_at: float) -> str | None:
        """Explain a wrong outcome; None if it is right."""
        now, farm = self._threads.now, self._farm
        if now > cancelled_at + (LATE_S if farm.begun[number] == 0 else EPSILON):
            return f"it had to wait {now - cancelled_at:g} s after it was cancelled"
        match found:
            case Done(result):
                return None if (plan.kind, result, farm.begun[number]) == ("done", number * 2, 1) else "not its result"
            case Failed(kind):
                return (
                    None if (plan.kind, kind, farm.begun[number]) == ("failed", "ZeroDivisionError", 1) else "no error"
                )
            case JobCancelled():
                return None if now >= cancelled_at - EPSILON else "nobody has cancelled it"
            case EngineStopped():
                return None if now >= self._closed_at else "the pool is open"
        if farm.begun[number]:
            return None if farm.lost_its_process(number) else "nothing has ended its process"
        if farm.handed_over[number] >= self.world.processes + 2 or any(time >= asked_at for time in farm.refusals):
            return None
        return "it was never begun, and lost"

    def _check_rest(self, pool: WorkerPool) -> None:
        """Check that each place is idle or vacant, once all processes that died are replaced."""
        self._threads.sleep_until(self._threads.now + 10 * GRACE_S)
        idle, kept = set(pool._idle), set(pool._all)
        running = {process for process in self._farm.processes if process.exit_code is None}
        if len(idle) + pool._vacancies != self.world.processes or idle != kept or not running <= kept:
            self.violations.append(
                f"at rest, {len(idle)} of {len(kept)} processes are idle, {pool._vacancies} places are vacant, "
                f"and {len(running)} processes run"
            )

    def _check_ended(self) -> None:
        self._threads.sleep_until(self._threads.now + 10 * GRACE_S)
        if left := sum(process.exit_code is None for process in self._farm.processes):
            self.violations.append(f"{left} processes are left")


def run_workers(world: WorkersWorld, backend: Backend = "trio") -> Report:
    """Run one world. Call it inside `prepared()`.

    Args:
        world: The world.
        backend: For the report alone: no event loop runs.
    """
    simulation = WorkersSimulation(world)
    simulation.run()
    return Report(world.seed, backend, tuple(simulation.violations), (), Counter(simulation.outcomes.values()))


def run_workers_json(given: Any, backend: Backend) -> Report:
    """Run the world that a JSON value describes."""
    return run_workers(from_json(given), backend)


def run_workers_block(block: tuple[Sequence[int], Backend]) -> tuple[int, list[Report], Counter[str]]:
    """Run a block of seeds, as `tests.sim.running.run_block` does."""
    return run_block(block, lambda seed, backend: run_workers(draw(seed), backend))
