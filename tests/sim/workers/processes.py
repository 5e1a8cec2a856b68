"""Processes in virtual time: they do jobs, and may die at any moment and in any order of their parts."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

from staged_pool.runtime.workers.jobs import Done, Failed, NotBegun, WorkerDied
from staged_pool.runtime.workers.pipe import Message, pack
from staged_pool.stages.errors import ConfigError
from tests.sim.workers.plan import TICK_S, KillPlan, WorkersWorld
from tests.sim.workers.threads import VirtualThreads

GRACE_S = 2.0


class Farm:
    """The operating system of a world: its processes, and what has become of each job.

    Args:
        world: The world.
        threads: Virtual time.
        rng: Decides how long an orderly end takes.
        violated: Takes violations.
    """

    def __init__(
        self, world: WorkersWorld, threads: VirtualThreads, rng: random.Random, violated: Callable[[str], None]
    ) -> None:
        self.world = world
        self.threads = threads
        self.rng = rng
        self.violated = violated
        self.processes: list[VirtualProcess] = []
        self.begun: Counter[int] = Counter()
        """Times that a job was begun, by its number."""
        self.beginners: dict[int, VirtualProcess] = {}
        """Process that has begun a job."""
        self.handed_over: Counter[int] = Counter()
        self.refusals: list[float] = []
        """Times at which a process could not be started or opened."""

    def start(self, _pool: str) -> VirtualProcess:
        """Start a process, as `Machine.process`."""
        threads = self.threads
        threads.wait(lambda: True)
        if _is_within(threads.now, self.world.scarce):
            self.refusals.append(threads.now)
            raise BlockingIOError("no more processes")
        process = VirtualProcess(self)
        self.processes.append(process)
        if (running := sum(each.exit_code is None for each in self.processes)) > self.world.processes:
            self.violated(f"{running} processes run, and the pool has {self.world.processes}")
        return process

    def kill(self, plan: KillPlan) -> None:
        """Kill a process from outside, if one runs."""
        running = [process for process in self.processes if process.exit_code is None]
        if running:
            process = running[plan.which % len(running)]
            process.is_victim = True
            process.die(plan.late_ticks * TICK_S, plan.code_ticks * TICK_S)

    def lost_its_process(self, number: int) -> bool:
        """Return True if the process that began a job was killed."""
        return self.beginners[number].is_victim


def _is_within(now: float, times: list[float]) -> bool:
    return any(begin <= now < end for begin, end in zip(times[::2], times[1::2], strict=True))


class VirtualProcess:
    """A process, as `WorkerProcess`. Its parts end one after another: main thread, pipe, and the whole of it."""

    def __init__(self, farm: Farm) -> None:
        self._farm = farm
        self._threads = farm.threads
        self._taken: set[int] = set()
        self.is_victim = False
        """True if it was killed from outside, or by its job."""
        self.main_ends_at = math.inf
        self.pipe_ends_at = math.inf
        self.ends_at = math.inf

    @property
    def exit_code(self) -> int | None:
        return None if self._threads.now < self.ends_at else -9

    def die(self, late_s: float, code_s: float) -> None:
        """End the main thread now, and the rest later."""
        self.main_ends_at = min(self.main_ends_at, self._threads.now)
        self.pipe_ends_at = min(self.pipe_ends_at, self._threads.now + late_s)
        self.ends_at = min(self.ends_at, self._threads.now + late_s + code_s)

    def begin(self, work: Message) -> None:
        work.value()

    def wait_until_ready(self) -> None:
        lives = self._works(self._farm.world.load_ticks)
        if not lives:
            self._wait(lambda: self.exit_code is not None)
        if not lives or _is_within(self._threads.now, self._farm.world.unopenable):
            self._farm.refusals.append(self._threads.now)
            raise ConfigError("it cannot be opened")

    def call(self, job: Message) -> Message:
        farm, (number, kind, ticks) = self._farm, job.value()
        farm.handed_over[number] += 1
        if number in self._taken:
            farm.violated(f"job {number} is handed over twice to the same process")
        self._taken.add(number)
        if not self._works(farm.world.read_ticks):
            raise NotBegun
        farm.begun[number] += 1
        farm.beginners[number] = self
        if farm.begun[number] > 1:
            farm.violated(f"job {number} is begun twice")
        if kind == "fatal":
            self.is_victim = True
            self.die(farm.rng.randint(0, 3) * TICK_S, farm.rng.randint(0, 3) * TICK_S)
        if not self._works(ticks):
            raise WorkerDied
        return pack(Done(number * 2) if kind == "done" else Failed.by(ZeroDivisionError(number)))

    def kill(self) -> None:
        self.die(0, self._farm.rng.randint(0, 3) * TICK_S)
        self.pipe_ends_at = min(self.pipe_ends_at, self._threads.now)

    def terminate(self) -> None:
        self.die(self._farm.rng.randint(0, 3) * TICK_S, self._farm.rng.randint(0, 3) * TICK_S)

    def reap(self) -> None:
        self._wait(lambda: self.exit_code is not None, self._threads.now + GRACE_S)
        self.end()

    def end(self) -> None:
        self.terminate()
        self._wait(lambda: self.exit_code is not None)

    def _works(self, ticks: int) -> bool:
        """Let the main thread work. Returns False at the end of the pipe, if it has died before."""
        threads = self._threads
        self._wait(lambda: self.main_ends_at <= threads.now, threads.now + ticks * TICK_S)
        if threads.now < self.main_ends_at:
            return True
        self._wait(lambda: self.pipe_ends_at <= threads.now)
        return False

    def _wait(self, condition: Callable[[], bool], until: float = math.inf) -> None:
        """Wait for a condition, which may come about by time alone, or until a time."""
        threads = self._threads

        def next_time() -> float:
            ends = (self.main_ends_at, self.pipe_ends_at, self.ends_at)
            return min([until, *(end for end in ends if end > began_at)])

        while True:
            began_at = threads.now
            threads.wait(condition, next_time)
            if condition() or until <= threads.now:
                return
