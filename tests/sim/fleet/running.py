"""Runs worlds of a fleet: somebody accepts, nobody healthy is killed, and the end comes in time with its exit code."""

from __future__ import annotations

import errno
import math
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import anyio

from staged_pool.api.fleet import names
from staged_pool.api.fleet.control import Beat, Control, Drain, Ready
from staged_pool.api.fleet.front_control import FrontControl
from staged_pool.api.fleet.lines import take_lines
from staged_pool.api.fleet.processes import Started
from staged_pool.api.fleet.snapshot import Snapshot
from staged_pool.api.fleet.supervisor import EXIT_CONFIG, EXIT_LOST, Outside, Supervisor
from staged_pool.api.http.server import EXIT_OVERDUE, OVERDUE_S
from staged_pool.api.limits.server_state import GRACE_S
from staged_pool.runtime.remote.line import BEAT_S
from tests.sim import clock as virtual
from tests.sim.clock import Backend, Stuck
from tests.sim.fleet.doubles import (
    Connection,
    Freezing,
    Handover,
    Held,
    Listener,
    Machine,
    Overheard,
    SimLine,
    SimProcess,
    as_socket,
    control_line,
)
from tests.sim.fleet.plan import DRAIN_S, SILENT_S, EventPlan, FleetWorld, draw, from_json
from tests.sim.lines.wire import SimStream
from tests.sim.running import LOGGED, SLIPS, Report, run_block, slips

HANG_S = 400.0
LOOK_S = 0.02
DEAF_S = 0.4
"""Longest wait of a connection for a front that can take it."""
REST_S = 60.0
"""Longest time until all is at rest, after the last event."""
EXIT_ORPHANED = 4
NOTHING = Snapshot(engines={}, loads={}, pipelines={}, http=None, cpu_s=0.0, peak_bytes=0)


class FleetSimulation:
    """One run of a world."""

    def __init__(self, world: FleetWorld) -> None:
        self.world = world
        self.violations: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.exit_code: int | None = None
        self._rng = random.Random(world.seed)
        self._listener = Listener()
        self._machine = Machine()
        self._now = self._machine.ran_s
        """All times are those in which the machine ran: while it is paused, nobody can do or learn anything."""
        self._supervisor = Freezing(self._machine)
        self._processes: list[SimProcess] = []
        self._controls: list[SimStream] = []
        self._starts = 0
        self._changed_at = 0.0
        self._told_at = math.inf
        """Time of the first SIGTERM, or of wrong settings."""
        self._drains_since = math.inf
        """Time at which the supervisor has taken the first SIGTERM."""
        self._is_told_twice = self._is_wrong = self._is_at_rest = False
        self._over = anyio.Event()
        self._supervising = anyio.CancelScope()
        self._signals, self._signalled = anyio.create_memory_object_stream[signal.Signals](8)

    async def run(self) -> None:
        """Run the world until its server has ended."""
        with anyio.move_on_after(HANG_S) as hang, self._signals, self._signalled:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._supervise)
                self._tasks.start_soon(self._visit)
                self._tasks.start_soon(self._listen)
                self._tasks.start_soon(self._happen)
                await self._over.wait()
                await anyio.sleep(2 * self.world.import_s + 1.0)  # children find that their supervisor is gone
                self._check_end()
                self._tasks.cancel_scope.cancel()
        if hang.cancelled_caught:
            self.violations.append("it hangs")

    # ---- the supervisor ----

    async def _supervise(self) -> None:
        outside = Outside(self._start, self._send_line, self._end_signals, self._end_process, self._supervisor.sleep)
        supervisor = Supervisor(outside, fronts=self.world.fronts, drain_s=DRAIN_S, silent_s=SILENT_S)
        try:
            with self._supervising:
                self.exit_code = await supervisor.run(as_socket(self._listener))
        finally:
            self._listener.close()
            for control in self._controls:
                control.cut()
            self._over.set()

    async def _start(self, name: str) -> Started:
        number, self._starts = self._starts, self._starts + 1
        await self._supervisor.sleep(self.world.fork_s)
        if number in self.world.failing_starts:
            raise BlockingIOError("there is no room for another process")
        ours, theirs = control_line(self._rng, self.world.pieces, self.world.wire_ticks)
        missed = self.world.missed_lines.get(name, ())
        process = SimProcess(name, number, self._supervisor, self._check_kill, missed)
        self._processes.append(process)
        self._controls.append(ours)
        self._changed_at = self._now()
        self._listener.hold(process)
        control = Held(theirs, process)

        async def program() -> int:
            await process.sleep(self.world.import_s)
            if number == self.world.wrong_start:
                self._is_wrong = True
                self._told_at = min(self._told_at, self._now())
                return EXIT_CONFIG
            if name == names.ENGINE:
                return await _Engine(self, process, control).run()
            return await _Front(self, process, control).run()

        self._tasks.start_soon(process.run, program, self._listener, theirs)
        return Started(process, Overheard(ours, self._supervisor, process), process.handover)

    async def _send_line(self, number: int, first: Handover, second: Handover) -> None:
        await self._supervisor.sleep(0)
        line, fails = SimLine(number), number in self.world.failing_lines
        if not fails or number % 2 == 0:
            first.put(line)
        if fails:
            line.ended.set()
            raise OSError(errno.ETOOMANYREFS, "there is no room for another line")
        second.put(line)

    @contextmanager
    def _end_signals(self) -> Iterator[AsyncIterator[signal.Signals]]:
        async def received() -> AsyncIterator[signal.Signals]:
            async for number in self._signalled:
                await self._supervisor.thawed()
                self._drains_since = min(self._drains_since, self._now())
                yield number

        yield received()

    def _end_process(self, code: int) -> None:
        self.exit_code = code
        self._supervising.cancel()

    # ---- what happens ----

    async def _happen(self) -> None:
        async with anyio.create_task_group() as happening:
            for event in self.world.events:
                happening.start_soon(self._happen_once, event)
            if self.world.ends_at < math.inf:
                happening.start_soon(self._terminate, self.world.ends_at)
        if self.world.ends_at == math.inf:
            await self._come_to_rest()
            await self._terminate(0.0)

    async def _terminate(self, after_s: float) -> None:
        await anyio.sleep(after_s)
        self._told_at = min(self._told_at, self._now())
        await self._signals.send(signal.SIGTERM)
        if self.world.again_after_s < math.inf:
            await anyio.sleep(self.world.again_after_s)
            self._is_told_twice = not self._over.is_set()
            await self._signals.send(signal.SIGTERM)

    async def _happen_once(self, event: EventPlan) -> None:
        await anyio.sleep(event.at)
        if event.who == "all":
            self._machine.pause(event.for_s)
            return
        if event.who == "supervisor":
            self._supervisor.freeze(event.for_s)
            return
        for process in self._processes:
            if process.name == event.who and process.is_alive:
                self._changed_at = self._now()
                if event.kind == "kill":
                    process.is_struck = True
                    process.is_struck_in_drain = process.is_known_ready and self._drains_since < math.inf
                    process.end(-9)
                elif event.kind == "freeze":
                    process.freeze(event.for_s)
                else:
                    for line in process.lines:
                        line.ended.set()

    # ---- clients ----

    async def _visit(self) -> None:
        while not self._over.is_set() and not self._is_at_rest:
            self._tasks.start_soon(self._ask)
            await anyio.sleep(self.world.every_s)

    async def _ask(self) -> Connection | None:
        connection = self._listener.connect()
        if connection is not None:
            await connection.done.wait()
        self.outcomes["refused" if connection is None else connection.outcome or ""] += 1
        return connection

    # ---- invariants ----

    def _alive(self, name: str | None = None) -> list[SimProcess]:
        alive = [process for process in self._processes if process.is_alive]
        return [each for each in alive if (each.name != names.ENGINE if name is None else each.name == name)]

    def _can_accept(self) -> bool:
        """Tell if a front is there that has to accept connections."""
        now, fronts = self._now(), self._alive()
        able = [front for front in fronts if not front.is_frozen and not front.is_draining]
        if any(front.has_said_ready for front in able):
            return True
        if any(front.has_said_ready for front in fronts) or self._supervisor.is_frozen:
            return False
        return any(
            front.listens_since is not None and now - max(front.listens_since, self._changed_at) > 2 * DEAF_S
            for front in able
            if not front.is_welcomed
        )

    async def _listen(self) -> None:
        """Look at each moment for connections that wait, and a front that leaves them waiting."""
        deaf_s = 0.0
        while not self._over.is_set():
            await anyio.sleep(LOOK_S)
            deaf_s = deaf_s + LOOK_S if self._listener.waiting and self._can_accept() else 0.0
            if deaf_s > DEAF_S:
                self.violations.append("connections wait, and a front could accept them")
                return

    def check_turn(self, front: SimProcess) -> None:
        """Check that a front which is not ready leaves connections to those that are."""
        others = [other for other in self._alive() if other is not front and not other.is_draining]
        now = self._now()
        if (
            not front.has_said_ready
            and not front.stood_still_s(now - 1.0)
            and not self._supervisor.stood_still_s(now - 1.0)
            and any(other.ready_at < now - DEAF_S and not other.stood_still_s(now - 1.0) for other in others)
        ):
            self.violations.append(f"{front.name} accepts, is not ready, and another front is")

    def _check_kill(self, process: SimProcess) -> None:
        loads = process.name == names.ENGINE and not process.is_known_ready
        if loads and not self._alive() and self._told_at < math.inf:
            return  # as far as the supervisor knows, it loads for nobody
        is_ending = self._is_told_twice or self._is_wrong or self._now() - self._told_at > DRAIN_S + GRACE_S
        if not is_ending and not process.may_be_taken_for_dead:
            self.violations.append(f"{process.name} was killed, and was well")

    async def _come_to_rest(self) -> None:
        """Wait until all processes serve again; then each connection is answered."""
        latest = anyio.current_time() + REST_S
        while not self._over.is_set():
            if self._supervisor.is_frozen:
                latest = anyio.current_time() + REST_S
            elif self._all_serve():
                break
            elif anyio.current_time() > latest:
                states = {each.name: each.has_said_ready for each in (*self._alive(), *self._alive(names.ENGINE))}
                self.violations.append(f"it never comes to rest: {states}")
                return
            await anyio.sleep(LOOK_S)
        self._is_at_rest = True
        for front in self._alive():
            await self._check_alone(front)

    async def _check_alone(self, front: SimProcess) -> None:
        """Check that a front answers while the others stand still for a moment."""
        await anyio.sleep(3 * BEAT_S)  # the others have reported since their last freeze
        limit_s = self.world.request_s + DEAF_S
        for other in self._alive():
            if other is not front:
                other.freeze(2 * limit_s)
        with anyio.move_on_after(limit_s):
            connection = await self._ask()
            if connection is not None and connection.outcome == "answered":
                return
        if not self._over.is_set():
            self.violations.append(f"all is at rest, and {front.name} answers nobody")

    def _all_serve(self) -> bool:
        fronts = self._alive()
        return (
            len(fronts) == self.world.fronts
            and all(front.has_said_ready and self.is_up(front) and not front.is_frozen for front in fronts)
            and any(engine.has_said_ready and not engine.is_frozen for engine in self._alive(names.ENGINE))
        )

    def is_up(self, front: SimProcess) -> bool:
        """Tell if a front has a line to an engine process that computes."""
        return any(line.taken.is_set() and not line.ended.is_set() for line in front.lines)

    def _check_end(self) -> None:
        world, ended_at = self.world, self._now()
        froze = any(process.stood_still_s(self._told_at - 1.0) > 0 for process in self._processes)
        permitted = {0}
        if self._is_wrong:
            permitted.add(EXIT_CONFIG)
            if world.ends_at == math.inf:
                permitted.discard(0)
        if self._is_told_twice:
            permitted = permitted | {128 + signal.SIGTERM}
        if froze:
            permitted |= {EXIT_OVERDUE, EXIT_LOST}
        if any(each.is_struck and each.reaped_at > self._drains_since - LOOK_S for each in self._processes):
            permitted.add(EXIT_LOST)
        if any(each.is_struck_in_drain for each in self._processes):
            permitted.discard(0)
        if self.exit_code not in permitted:
            self.violations.append(f"the exit code is {self.exit_code}, and not one of {sorted(permitted)}")
        limit_s = 2 * (world.fork_s + world.import_s) + world.request_s + 2.5 + (2 * world.import_s + 1.0)
        limit_s += self._supervisor.stood_still_s(self._told_at)
        if froze:
            limit_s += DRAIN_S + 2 * (GRACE_S + OVERDUE_S)
        if ended_at - self._told_at > limit_s:
            self.violations.append(f"the end took {ended_at - self._told_at:.1f} s of {limit_s:.1f} s")
        left = [process.name for process in self._processes if process.is_alive]
        if left:
            self.violations.append(f"{left} are left behind")
        if world.ends_at == math.inf and not self._is_told_twice:
            self.violations += [
                f"{each.name} was never reaped"
                for each in self._processes
                if not each.is_alive and not (each.is_closed and each.handover.is_closed)
            ]


class _Child:
    """The program of a child: what the real one does around its control line."""

    def __init__(self, world: FleetSimulation, process: SimProcess, control: Held) -> None:
        self._sim = world
        self._world = world.world
        self._process = process
        self._stream = control
        self._is_ending = False
        self._control_ended = anyio.Event()

    async def _obey(self, control: FrontControl | Control) -> None:
        await control.run()
        await self._process.thawed()
        self._control_ended.set()
        if not self._is_ending:
            self._process.end(EXIT_ORPHANED)


class _Front(_Child):
    """A front: the real end of its control line, and its real decision to accept."""

    def __init__(self, world: FleetSimulation, process: SimProcess, control: Held) -> None:
        super().__init__(world, process, control)
        self._control = FrontControl(control, follow_load=lambda status: None, snapshot=lambda: NOTHING)
        self._welcomed = anyio.Event()

    async def run(self) -> int:
        process, control = self._process, self._control
        async with anyio.create_task_group() as obeying:
            obeying.start_soon(self._obey, control)
            async with anyio.create_task_group() as serving:
                serving.start_soon(self._beat)
                serving.start_soon(self._take_lines)
                serving.start_soon(self._open)
                serving.start_soon(self._accept)
                process.listens_since = self._sim._now()
                await control.drain.wait()
                await process.thawed()
                process.is_draining = True
                serving.cancel_scope.cancel()
            self._sim._listener.leave(process)
            while process.connections:
                await process.sleep(LOOK_S)
            self._is_ending = True
            control.close()
            with anyio.move_on_after(1.0):
                await self._control_ended.wait()
            obeying.cancel_scope.cancel()
        return 0

    async def _beat(self) -> None:
        while True:
            self._control.beat()
            await self._process.sleep(BEAT_S)

    async def _take_lines(self) -> None:
        await take_lines(self._process.handover.get, self._serve_line, self._control.lost, self._process.sleep)

    async def _serve_line(self, line: SimLine) -> str:
        async with anyio.create_task_group() as until_ended:
            until_ended.start_soon(self._be_welcomed, line)
            await line.ended.wait()
            until_ended.cancel_scope.cancel()
        return "it has ended"

    async def _be_welcomed(self, line: SimLine) -> None:
        await line.taken.wait()
        self._welcomed.set()

    async def _open(self) -> None:
        await self._welcomed.wait()
        await self._process.thawed()
        self._process.is_welcomed = True
        self._control.accepting.welcomed()
        await self._process.sleep(self._world.open_s)
        self._control.ready()
        self._process.ready_at = self._sim._now()

    async def _accept(self) -> None:
        """Accept as the real acceptor does, which needs a socket."""
        listener, accepting = self._sim._listener, self._control.accepting
        while True:
            await listener.readable()
            await self._process.thawed()
            if not accepting.is_on:
                await accepting.until_on()
                continue
            if listener.waiting:
                self._sim.check_turn(self._process)
                connection = listener.waiting.popleft()
                self._process.connections.add(connection)
                self._sim._tasks.start_soon(self._answer, connection)
            await anyio.lowlevel.checkpoint()

    async def _answer(self, connection: Connection) -> None:
        with suppress(KeyError):
            can_answer = self._process.has_said_ready and self._sim.is_up(self._process)
            if can_answer:
                await self._process.sleep(self._world.request_s)
            connection.end("answered" if can_answer else "503")
            self._process.connections.remove(connection)


class _Engine(_Child):
    """The engine process: the real control line, and models that take their time to load."""

    async def run(self) -> int:
        process, drain = self._process, anyio.Event()
        process.is_draining = True  # it takes no connections
        self._sim._listener.leave(process)
        control = Control(self._stream, {Drain: lambda _: drain.set()})
        async with anyio.create_task_group() as background:
            background.start_soon(self._obey, control)
            background.start_soon(self._beat, control)
            await process.sleep(self._world.load_s)  # nothing interrupts it
            process.ready_at = self._sim._now()
            control.post(Ready())
            background.start_soon(self._take_fronts)
            await drain.wait()
            await process.thawed()
            self._is_ending = True
            background.cancel_scope.cancel()
        return 0

    async def _beat(self, control: Control) -> None:
        while True:
            control.post_report(Beat(NOTHING))
            await self._process.sleep(BEAT_S)

    async def _take_fronts(self) -> None:
        while True:
            if isinstance(line := await self._process.handover.get(), SimLine):
                line.taken.set()


def run_fleet(world: FleetWorld, backend: Backend) -> Report:
    """Run one world. Call it inside `prepared()`."""
    simulations: list[FleetSimulation] = []

    async def main() -> None:
        simulations.append(FleetSimulation(world))
        await simulations[0].run()

    violations: list[str] = []
    LOGGED.clear()
    SLIPS.clear()
    try:
        violations += [f"never retrieved: {error}" for error in virtual.run(main, backend=backend, seed=world.seed)]
    except (Exception, Stuck) as error:  # noqa: BLE001  # a violation like any other
        SLIPS.extend(slips(error))
        violations.append(f"the program ended by {error!r}, {error.__cause__!r}")
    violations += [f"a slip: {slip}" for slip, _ in SLIPS]
    own_errors = tuple(slip for slip, is_of_a_mutant in SLIPS if is_of_a_mutant)
    outcomes = simulations[0].outcomes if simulations else Counter[str]()
    found = simulations[0].violations if simulations else []
    return Report(world.seed, backend, (*found, *violations), (), outcomes, own_errors)


def run_fleet_json(given: Any, backend: Backend) -> Report:
    """Run the world that a JSON value describes."""
    return run_fleet(from_json(given), backend)


def run_fleet_block(block: tuple[Sequence[int], Backend]) -> tuple[int, list[Report], Counter[str]]:
    """Run a block of seeds, as `tests.sim.running.run_block` does."""
    return run_block(block, lambda seed, backend: run_fleet(draw(seed), backend))
