"""Virtual time: a program of seconds runs in milliseconds, in an order that a seed decides.

Time stands still while any task can run, and jumps to the next deadline when none can. Both backends shuffle the tasks
that can run at one moment with a seeded generator. A program that waits for nothing that will ever happen raises
`Stuck`, and so does one that runs on and on while time stands still.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Literal

import anyio
import trio

Backend = Literal["trio", "asyncio"]
BACKENDS: tuple[Backend, ...] = ("trio", "asyncio")

MAX_ITERATIONS = 20_000
"""Maximum iterations of the event loop at one moment of virtual time; more mean an endless loop."""


class Stuck(BaseException):
    """Deadlock or endless loop in virtual time. Not an `Exception`, so that no tested code catches it."""


class SimClock(trio.abc.Clock):
    """A clock of trio that jumps when no task can run: trio then asks how long it may sleep."""

    def __init__(self) -> None:
        self._now = 0.0
        self._looks = 0
        self._idle = 0

    def start_clock(self) -> None:
        """Nothing to do: virtual time stands still until it jumps."""

    def current_time(self) -> float:
        self._looks += 1
        if self._looks > MAX_ITERATIONS * 5:
            raise Stuck("the program runs on while time stands still")
        return self._now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        if deadline == math.inf:
            self._idle += 1  # trio wakes itself through a socket when it ends, so that once is no proof
            if self._idle > 1000:
                raise Stuck("every task waits, and for nothing that will ever happen")
        elif deadline > self._now:
            self._idle = 0
            self._now = deadline
            self._looks = 0
        return 0


class SimLoop(asyncio.BaseEventLoop):
    """An asyncio loop without sockets, threads or waiting.

    Only the steps of tasks are shuffled: the order of other callbacks is a promise of asyncio.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._now = 0.0
        self._iterations = 0
        self._selector = self
        self.unhandled: list[str] = []
        self.set_exception_handler(lambda _, context: self.unhandled.append(str(context)))

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[object]:
        """Jump to the next deadline: `BaseEventLoop` calls this when everything that was ready has run."""
        self._iterations += 1
        if timeout is None:
            raise Stuck("every task waits, and for nothing that will ever happen")
        if timeout > 0:
            self._now = max(self._now, self._scheduled[0].when())
            self._iterations = 0
        elif self._iterations > MAX_ITERATIONS:
            raise Stuck("the program runs on while time stands still")
        self._due()
        self._shuffle()
        return []

    def _due(self) -> None:
        """Make the tasks that are due ready, so that they are shuffled with the rest."""
        while self._scheduled and self._scheduled[0].when() <= self._now:
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False  # type: ignore[attr-defined]  # as the loop itself does
            self._ready.append(handle)

    def _shuffle(self) -> None:
        ready = self._ready
        if len(ready) < 2:
            return
        steps = [
            i
            for i, handle in enumerate(ready)
            if isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)  # type: ignore[attr-defined]
        ]
        if len(steps) > 1:
            handles = [ready[i] for i in steps]
            self._random.shuffle(handles)
            for i, handle in zip(steps, handles, strict=True):
                ready[i] = handle

    def _process_events(self, _events: object) -> None:
        """Do nothing: the loop has no sockets to process."""

    def _write_to_self(self) -> None:
        """No other thread ever wakes this loop."""


def clock() -> Callable[[], float]:
    """Return the clock of the running loop, which `anyio.current_time` would look up at each call."""
    if trio.lowlevel.in_trio_run():
        return trio.lowlevel.current_clock().current_time
    return asyncio.get_running_loop().time


def run(main: Callable[[], Awaitable[None]], *, backend: Backend, seed: int) -> list[str]:
    """Run a program in virtual time.

    Returns:
        Errors that nobody looked at.

    Raises:
        Stuck: See there; as it is on asyncio, as the cause of a `trio.TrioInternalError` on trio.
    """
    if backend == "asyncio":
        loops: list[SimLoop] = []

        def make_loop() -> SimLoop:
            loops.append(SimLoop(seed))
            return loops[0]

        anyio.run(main, backend="asyncio", backend_options={"loop_factory": make_loop})
        return loops[0].unhandled
    internals = trio._core._run
    before = internals._ALLOW_DETERMINISTIC_SCHEDULING, internals._r.getstate()
    internals._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]  # private, and made for Hypothesis
    internals._r.seed(seed)
    try:
        anyio.run(main, backend="trio", backend_options={"clock": SimClock()})
    finally:
        internals._ALLOW_DETERMINISTIC_SCHEDULING = before[0]  # type: ignore[misc]
        internals._r.setstate(before[1])
    return []
