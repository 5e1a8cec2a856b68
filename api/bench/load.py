"""Generators of load: an open loop, whose requests come at given times, and a closed loop of clients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import anyio
import anyio.abc
import anyio.lowlevel

from staged_pool.api.bench.connection import BrokenAnswer, Connection
from staged_pool.api.bench.records import BROKEN, NO_CONNECTION, NOT_SENT, OK, REJECTED, TIMED_OUT, UNFINISHED, Records
from staged_pool.api.bench.workload import Made, Maker

RETRY_AFTER_S: Final = 1.0
"""Pause of a client of a closed loop after a 429 that names none."""

FAILED_PAUSE_S: Final = 0.2
"""Pause of a client of a closed loop after a failure, in seconds."""

LOOK_EVERY_S: Final = 0.02
"""Seconds between two looks at the lag of the event loop, in a closed loop."""


MOST_EARLY_S: Final = 0.001
"""Most seconds by which a sleep is made longer, if earlier ones ended too soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a generator."""

    timeout_s: float = 30.0
    """Time after which a client closes its connection."""
    max_connections: int = 1024
    """Most requests in flight of an open loop; further ones are not sent."""


class Generator:
    """Generator of load. Cancellation ends a load at once; requests in flight are recorded as unfinished.

    Args:
        make: Makes the requests.
        connect: Makes a connection; its first exchange opens it.
        records: Takes the outcomes.
        limits: Limits of the generator.
        clock: Clock of all times, in seconds. That of uvloop counts whole milliseconds only.
    """

    def __init__(
        self,
        make: Maker,
        connect: Callable[[], Connection],
        records: Records,
        limits: Limits,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._make = make
        self._connect = connect
        self._records = records
        self._limits = limits
        self._clock = clock
        self._idle: list[_Client] = []
        """Clients of an open loop without a request; the last one is the next to get one."""
        self._clients = 0
        self._busy = 0
        self._done: anyio.Event | None = None

    async def open_loop(self, times: Iterable[float], start: float) -> None:
        """Send a request at each time, and wait for all outcomes.

        Args:
            times: Seconds from the start, in order.
            start: Time of the start, by the clock.
        """
        early_s = 0.0
        async with anyio.create_task_group() as tasks:
            for at in times:
                made, due = self._make(), start + at  # made before it is due
                # Without the checkpoint, a late generator would starve the clients, and then be late for ever.
                await anyio.lowlevel.checkpoint()
                while (left_s := due - self._clock()) > 0:
                    await anyio.sleep(left_s + early_s)
                    # Timers of uvloop are early by up to half a millisecond, and waking twice costs most at low rates.
                    early_s = min(max(early_s, early_s + due - self._clock()), MOST_EARLY_S)
                self._send(tasks, made, due)
            if self._busy:
                self._done = anyio.Event()
                await self._done.wait()
            tasks.cancel_scope.cancel()

    def _send(self, tasks: anyio.abc.TaskGroup, made: Made, due: float) -> None:
        """Give a request to the client that was idle last, or to a new one."""
        if self._idle:
            self._busy += 1
            self._idle.pop().wake(made, due)
        elif self._clients < self._limits.max_connections:
            self._busy += 1
            self._clients += 1
            self._records.connections = max(self._records.connections, self._clients)
            tasks.start_soon(self._run_client, _Client(made, due))
        else:
            now = self._clock()
            self._records.add(made, due, now, now, NOT_SENT)

    async def _run_client(self, client: _Client) -> None:
        connection = self._connect()
        try:
            while True:
                sent = self._clock()
                self._records.lateness.append(sent - client.due)
                await self._exchange(connection, client.made, client.due, sent)
                self._busy -= 1
                if self._done is not None and not self._busy:
                    self._done.set()
                self._idle.append(client)
                await client.next()
        finally:
            with anyio.CancelScope(shield=True):
                await connection.close()

    async def closed_loop(self, clients: int, seconds: float) -> None:
        """Let clients send each its next request after the answer to the last one; wait for the last answers.

        After a 429, a client waits as long as `Retry-After` says.
        """
        end = self._clock() + seconds
        self._records.connections = max(self._records.connections, clients)
        async with anyio.create_task_group() as looking:
            looking.start_soon(self._look)
            async with anyio.create_task_group() as tasks:
                for _ in range(clients):
                    tasks.start_soon(self._run_closed, end)
            looking.cancel_scope.cancel()

    async def _run_closed(self, end: float) -> None:
        connection = self._connect()
        try:
            while (sent := self._clock()) < end:
                pause_s = await self._exchange(connection, self._make(), sent, sent)
                if pause_s:
                    await anyio.sleep(min(pause_s, max(end - self._clock(), 0.0)))
        finally:
            with anyio.CancelScope(shield=True):
                await connection.close()

    async def _look(self) -> None:
        """Record how late the event loop wakes a task."""
        while True:
            due = self._clock() + LOOK_EVERY_S
            await anyio.sleep(LOOK_EVERY_S)
            self._records.lateness.append(max(self._clock() - due, 0.0))

    async def _exchange(self, connection: Connection, made: Made, due: float, sent: float) -> float:
        """Send one request and record its outcome; return the pause that a client should make."""
        add = self._records.add
        try:
            with anyio.move_on_after(self._limits.timeout_s):
                reply = await connection.exchange(made.content)
                add(made, due, sent, self._clock(), reply)
                if reply.status == REJECTED:
                    return _retry_after_s(reply.header("retry-after"))
                return 0.0 if reply.status == OK else FAILED_PAUSE_S
            add(made, due, sent, self._clock(), TIMED_OUT)
        except anyio.get_cancelled_exc_class():
            add(made, due, sent, self._clock(), UNFINISHED)
            raise
        except BrokenAnswer:
            add(made, due, sent, self._clock(), BROKEN)
        except OSError:  # those of TLS included
            add(made, due, sent, self._clock(), NO_CONNECTION)
        with anyio.CancelScope(shield=True):
            await connection.close()
        return FAILED_PAUSE_S


class _Client:
    """One client of an open loop: its request, and the event that wakes it for the next one."""

    __slots__ = ("_woken", "due", "made")

    def __init__(self, made: Made, due: float) -> None:
        self.made = made
        self.due = due
        self._woken = anyio.Event()

    def wake(self, made: Made, due: float) -> None:
        self.made, self.due = made, due
        self._woken.set()

    async def next(self) -> None:
        """Wait for the next request."""
        await self._woken.wait()
        self._woken = anyio.Event()


def _retry_after_s(text: str | None) -> float:
    try:
        pause_s = RETRY_AFTER_S if text is None else float(text)
    except ValueError:  # a date
        return RETRY_AFTER_S
    return pause_s if 0 < pause_s < math.inf else RETRY_AFTER_S
