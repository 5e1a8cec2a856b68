"""State of one HTTP server: its connections, requests and waits for clients.

It belongs to the server's event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final

import anyio
import anyio.lowlevel

from staged_pool.api.limits.allowance import Allowances
from staged_pool.api.limits.connection_limit import ConnectionLimit
from staged_pool.api.limits.gc_pauses import GcPauses
from staged_pool.api.limits.loop_lag import LoopLag
from staged_pool.runtime.memory.governor import UNLIMITED_BYTES, MemoryGovernor, Pressure

GRACE_S: Final = 2.0
"""Longest wait for a client during shutdown, in seconds: to read a piece of a response, or to send a request."""


class ServerState:
    """Counts connections and requests, and shortens their timeouts when the server shuts down.

    Args:
        memory: The memory governor of this process. None: memory has no limit.
        max_connections: Maximum number of connections at once.
    """

    def __init__(self, memory: MemoryGovernor | None = None, max_connections: int = 1000) -> None:
        self.limit = ConnectionLimit(max_connections)
        """Limit of connections over TCP and Unix sockets."""
        self.memory = memory or MemoryGovernor(UNLIMITED_BYTES)
        self.requests = 0
        """Requests in progress, over all connections. A stream that its client resets stops counting at once."""
        self.connections_rejected = 0
        """Connections that were closed on arrival because the limit was reached."""
        self.quic_connections = 0
        """Open HTTP/3 connections, which have a limit of their own."""
        self._iterations = anyio.Lock(fast_acquire=True)
        """Held by the connection that has the next iteration of the event loop; others wait for theirs."""
        self.joining = anyio.CapacityLimiter(1)
        """Limiter of the threads that join or decompress a large body: one at a time."""
        self.allowances = Allowances()
        """Allowances of clients for frames that lead to no response."""
        self.lag = LoopLag()
        """Lag of the server's event loop."""
        self.gc = GcPauses()
        """Pauses of the garbage collector while the server runs."""
        self.leaving = False
        """True once the server shuts down: idle connections close."""
        self._leave: Final[set[Callable[[], None]]] = set()
        self._waits: Final[set[anyio.CancelScope]] = set()
        self._gone = anyio.Event()
        self.forget_memory = self.memory.listen(self._on_pressure, lambda: self.requests > 0)
        """Stops to follow the pressure of a memory governor that outlives this server."""

    async def watch(self) -> None:
        """Measure the lag of the event loop and the pauses of collections until cancelled."""
        with self.gc.watched():
            await self.lag.watch()

    @property
    def keeps_alive(self) -> bool:
        """True while connections may wait for a next request: no shutdown, and enough memory."""
        return not self.leaving and self.memory.pressure < Pressure.NO_KEEP_ALIVE

    def _on_pressure(self, pressure: Pressure) -> None:
        """Close the idle connections while memory is short."""
        if pressure >= Pressure.NO_KEEP_ALIVE:
            self._tell_to_leave()

    def _tell_to_leave(self) -> None:
        for leave in list(self._leave):
            leave()

    @property
    def body_bytes(self) -> int:
        """Bytes of all bodies that are announced, arriving, or part of a running request."""
        return self.memory.budget.bodies.held_bytes

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._leave)

    def enter(self, leave: Callable[[], None]) -> None:
        """Count a connection; `leave` is called when the server shuts down."""
        self._leave.add(leave)

    async def wait_for_iteration(self) -> None:
        """Wait for an iteration of the event loop to process received body bytes in: one connection has each.

        Otherwise hundreds of connections would process theirs in one iteration, and all other tasks would wait.
        """
        async with self._iterations:
            await anyio.lowlevel.checkpoint()

    def exit(self, leave: Callable[[], None]) -> None:
        """Stop counting a connection."""
        self._leave.discard(leave)
        self._gone.set()

    async def changed(self) -> None:
        """Wait until a connection has ended."""
        self._gone = anyio.Event()
        await self._gone.wait()

    def timeout(self, seconds: float) -> ClientTimeout:
        """Return a scope for a wait on a client: cancelled after `seconds`, or sooner when the server shuts down."""
        return ClientTimeout(self._waits, min(seconds, GRACE_S) if self.leaving else seconds)

    def end(self) -> None:
        """Shut connections down: idle ones at once, the others once their clients have their responses."""
        self.leaving = True
        self._tell_to_leave()
        latest = anyio.current_time() + GRACE_S
        for scope in list(self._waits):
            scope.deadline = min(scope.deadline, latest)


class ClientTimeout:
    """A cancel scope with a deadline, which a shutdown may shorten."""

    __slots__ = ("_scope", "_waits")

    def __init__(self, waits: set[anyio.CancelScope], seconds: float) -> None:
        self._waits = waits
        self._scope = anyio.move_on_after(seconds)

    def __enter__(self) -> anyio.CancelScope:
        self._waits.add(self._scope)
        return self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._waits.discard(self._scope)
        return bool(self._scope.__exit__(kind, error, trace))
