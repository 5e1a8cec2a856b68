"""Doubles of what the operating system has: processes, their lines and freezes, a listening socket, and clients."""

from __future__ import annotations

import asyncio
import math
import random
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import anyio
import anyio.lowlevel
import msgspec
import trio

from staged_pool.api.fleet.control import Order, Ready, limits_of
from staged_pool.api.fleet.lines import MissedLine
from staged_pool.stages.changes import Changes
from staged_pool.stages.wire import FrameReader
from tests.sim.fleet.plan import SILENT_S
from tests.sim.lines.plan import LineWorld
from tests.sim.lines.wire import SimStream, joined

KILLED = -9
LOOP_S = 0.6
"""Seconds between two reports of a child, and their way."""

_orders = msgspec.msgpack.Decoder(Order)


def jump(seconds: float) -> None:
    """Let all clocks move on while nothing runs, as in a container that is paused."""
    clock: Any = trio.lowlevel.current_clock() if trio.lowlevel.in_trio_run() else asyncio.get_running_loop()
    clock._now += seconds


class Machine:
    """All processes together, which may be paused: then the clocks move on while nothing runs."""

    def __init__(self) -> None:
        self._pauses: list[tuple[float, float]] = []
        """Start and length of each, by the clock."""

    def pause(self, for_s: float) -> None:
        self._pauses.append((anyio.current_time(), for_s))
        jump(for_s)

    def ran_s(self, at: float | None = None) -> float:
        """Return the seconds that it has run until a time of the clock: until now if that is None."""
        until = anyio.current_time() if at is None else at
        return until - sum(min(for_s, max(0.0, until - start)) for start, for_s in self._pauses)


class Freezing:
    """A process that may stand still."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.frozen_until = 0.0
        self.freezes: list[tuple[float, float]] = []

    def freeze(self, for_s: float) -> None:
        now = anyio.current_time()
        self.frozen_until = max(self.frozen_until, now + for_s)
        self.freezes.append((now, now + for_s))

    @property
    def is_frozen(self) -> bool:
        return anyio.current_time() < self.frozen_until

    async def thawed(self) -> None:
        while self.is_frozen:  # noqa: ASYNC110  # a freeze may be prolonged meanwhile
            await anyio.sleep(self.frozen_until - anyio.current_time())

    async def sleep(self, seconds: float) -> None:
        """Sleep. A sleep that is over within a freeze lasts until the end of that."""
        await anyio.sleep(seconds)
        await self.thawed()

    def stood_still_s(self, since: float) -> float:
        """Return the seconds of its freezes from a time to now; as all times here, by `Machine.ran_s`."""
        now, ran_s = self.machine.ran_s(), self.machine.ran_s
        return sum(max(0.0, min(now, ran_s(end)) - max(since, ran_s(start))) for start, end in self.freezes)


class Held:
    """A stream that one end neither reads nor writes while it is frozen."""

    def __init__(self, stream: SimStream, owner: Freezing) -> None:
        self._stream = stream
        self._owner = owner

    async def send(self, item: bytes) -> None:
        await self._owner.thawed()
        await self._stream.send(item)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data = await self._stream.receive(max_bytes)
        await self._owner.thawed()
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()


class Overheard(Held):
    """The supervisor's end of a control line. It notes when the supervisor learns that the child is ready."""

    def __init__(self, stream: SimStream, owner: Freezing, child: SimProcess) -> None:
        super().__init__(stream, owner)
        self._child = child
        self._frames = FrameReader(limits_of)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data = await super().receive(max_bytes)
        for each in self._frames.feed(data):
            if isinstance(_orders.decode(each.head), Ready):
                self._child.is_known_ready = True
        return data


def control_line(rng: random.Random, pieces: int, wire_ticks: int) -> tuple[SimStream, SimStream]:
    """Return both ends of a control line."""
    return joined(rng, LineWorld(pieces=pieces, wire_ticks=wire_ticks))


class SimLine:
    """A line between a front and the engine process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.taken = anyio.Event()
        self.ended = anyio.Event()


class Handover:
    """Brings the ends of lines to a process.

    Args:
        process: The process.
        missed: Numbers of the lines for whose end it has no room.
    """

    def __init__(self, process: SimProcess, missed: Sequence[int]) -> None:
        self._process = process
        self._missed = missed
        self._waiting: deque[SimLine] = deque()
        self._changes = Changes()
        self.is_closed = False

    def put(self, line: SimLine) -> None:
        if self._process.code is not None or self.is_closed:
            line.ended.set()
            return
        self._process.lines.append(line)
        self._waiting.append(line)
        self._changes.note()

    async def get(self) -> SimLine | MissedLine:
        await self._changes.until(lambda: bool(self._waiting))
        await self._process.thawed()
        line = self._waiting.popleft()
        if line.number in self._missed:
            line.ended.set()
            return MissedLine(line.number, "this process may open no more files")
        return line

    async def aclose(self) -> None:
        self.is_closed = True
        await anyio.lowlevel.checkpoint()


class SimProcess(Freezing):
    """A process. It ends when its program returns, or when it is killed."""

    def __init__(
        self,
        name: str,
        pid: int,
        supervisor: Freezing,
        on_kill: Callable[[SimProcess], None],
        missed_lines: Sequence[int],
    ) -> None:
        super().__init__(supervisor.machine)
        self.name = name
        self.pid = pid
        self.code: int | None = None
        self.lines: list[SimLine] = []
        self.connections: set[Connection] = set()
        self.is_known_ready = False
        """The supervisor has read that it is ready."""
        self.is_welcomed = self.is_draining = self.is_closed = False
        self.ready_at = self.reaped_at = math.inf
        self.is_struck_in_drain = False
        """An event has killed it in the drain, when the supervisor knew that it served."""
        self.is_struck = False
        """An event has killed it."""
        self.listens_since: float | None = None
        self.handover = Handover(self, missed_lines)
        self._supervisor = supervisor
        self._on_kill = on_kill
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    @property
    def is_alive(self) -> bool:
        return self.code is None

    @property
    def has_said_ready(self) -> bool:
        return self.ready_at < math.inf

    async def run(self, program: Callable[[], Awaitable[int]], listener: Listener, control: SimStream) -> None:
        try:
            with self._scope:
                code = await program()
                await self.thawed()
                self.end(code)
        finally:
            control.cut()
            listener.leave(self)

    def end(self, code: int) -> None:
        """End at once."""
        if self.code is None:
            self.code = code
            self._scope.cancel()
            self._ended.set()
            for line in self.lines:
                line.ended.set()
            for connection in tuple(self.connections):
                connection.end("reset")

    def kill(self) -> None:
        if self.code is None:
            self._on_kill(self)
            self.end(KILLED)

    async def wait(self) -> int:
        await self._ended.wait()
        await self._supervisor.thawed()
        self.reaped_at = min(self.reaped_at, self.machine.ran_s())
        assert self.code is not None
        return self.code

    async def feed(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self.is_closed = True
        await anyio.lowlevel.checkpoint()

    @property
    def may_be_taken_for_dead(self) -> bool:
        """True if it has said nothing for so long that a supervisor kills it."""
        now = self.machine.ran_s()
        return self.stood_still_s(now - SILENT_S - 4 * LOOP_S) >= SILENT_S / 3


class Connection:
    """A connection of a client, with one request."""

    def __init__(self) -> None:
        self.outcome: str | None = None
        self.done = anyio.Event()

    def end(self, outcome: str) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self.done.set()


class Listener:
    """The listening socket of all fronts and the supervisor: connections wait in it while one of them has it open."""

    family = socket.AF_INET

    def __init__(self) -> None:
        self._holders: set[object] = {self}
        self.waiting: deque[Connection] = deque()
        self._arrived = anyio.Event()

    def connect(self) -> Connection | None:
        """Return a connection; None: nobody listens."""
        if not self._holders:
            return None
        connection = Connection()
        self.waiting.append(connection)
        arrived, self._arrived = self._arrived, anyio.Event()
        arrived.set()
        return connection

    async def readable(self) -> None:
        """Wait until a connection is there; another process may have taken it when this returns."""
        if not self.waiting:
            await self._arrived.wait()

    def hold(self, holder: object) -> None:
        self._holders.add(holder)

    def leave(self, holder: object) -> None:
        self._holders.discard(holder)
        if not self._holders:
            while self.waiting:
                self.waiting.popleft().end("reset")

    def close(self) -> None:
        """Close it in the supervisor."""
        self.leave(self)


def as_socket(listener: Listener) -> socket.socket:
    return cast(socket.socket, listener)
