"""What the HTTP side of one server holds now, and how long it waits for clients. Belongs to the server's event loop."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final

import anyio
import anyio.lowlevel

from staged_pool.api.limits.allowance import Allowances
from staged_pool.api.limits.connection_limit import ConnectionLimit
from staged_pool.api.limits.loop_lag import LoopLag
from staged_pool.runtime.memory.governor import UNLIMITED_BYTES, MemoryGovernor, Pressure

GRACE_S: Final = 2.0
"""What a client gets to take the next piece of its answer, or to send the rest of its request, once the server ends."""


class ServerState:
    """Counts connections and requests, and hurries them when the server ends.

    Args:
        memory: The governor of this process. None: memory has no limit.
        max_connections: Connections at once.
    """

    def __init__(self, memory: MemoryGovernor | None = None, max_connections: int = 1000) -> None:
        self.limit = ConnectionLimit(max_connections)
        """Of connections over TCP and Unix sockets."""
        self.memory = memory or MemoryGovernor(UNLIMITED_BYTES)
        self.requests = 0
        """Being handled, over all connections; streams that their client has reset leave at once."""
        self.connections_rejected = 0
        """Closed as soon as they came, for there were as many as may be."""
        self.quic_connections = 0
        """Those of the open ones that are HTTP/3's: they have a limit of their own."""
        self._turns = anyio.Lock(fast_acquire=True)
        self.joining = anyio.CapacityLimiter(1)
        """Of threads that join the pieces of a large body."""
        self.allowances = Allowances()
        """Of clients, for frames that bring nothing."""
        self.lag = LoopLag()
        """Of the event loop that all of this lives on."""
        self.leaving = False
        """The server ends: a connection that waits for its next request must not wait on."""
        self._leave: Final[set[Callable[[], None]]] = set()
        self._waits: Final[set[anyio.CancelScope]] = set()
        self._gone = anyio.Event()
        self.memory.listen(self._heed, lambda: self.requests > 0)

    @property
    def keeps_alive(self) -> bool:
        """A connection may wait for its next request: the server does not end, and has memory for it."""
        return not self.leaving and self.memory.pressure < Pressure.NO_KEEP_ALIVE

    def _heed(self, pressure: Pressure) -> None:
        """Let the idle connections go while memory is short."""
        if pressure >= Pressure.NO_KEEP_ALIVE:
            self._tell_to_leave()

    def _tell_to_leave(self) -> None:
        for leave in list(self._leave):
            leave()

    @property
    def body_bytes(self) -> int:
        """Of all bodies that were announced, are arriving, or are being worked on."""
        return self.memory.budget.bodies.held_bytes

    @property
    def connections(self) -> int:
        """Open now."""
        return len(self._leave)

    def enter(self, leave: Callable[[], None]) -> None:
        """Count a connection; `leave` is called when the server ends."""
        self._leave.add(leave)

    async def turn(self) -> None:
        """Wait for a turn with a part of a body that is here: one connection has one in each turn of the event loop.

        A part takes the loop about 0.1 ms. With hundreds of connections everybody else would wait for all of them.
        """
        async with self._turns:
            await anyio.lowlevel.checkpoint()

    def exit(self, leave: Callable[[], None]) -> None:
        """Count a connection no more."""
        self._leave.discard(leave)
        self._gone.set()

    async def changed(self) -> None:
        """Wait until a connection is counted no more."""
        self._gone = anyio.Event()
        await self._gone.wait()

    def timeout(self, seconds: float) -> ClientTimeout:
        """A block that waits for a client: cancelled after so many seconds, or sooner if the server ends."""
        return ClientTimeout(self._waits, min(seconds, GRACE_S) if self.leaving else seconds)

    def end(self) -> None:
        """Let the connections go: the idle ones at once, the others as soon as their clients have their answers."""
        self.leaving = True
        self._tell_to_leave()
        latest = anyio.current_time() + GRACE_S
        for scope in list(self._waits):
            scope.deadline = min(scope.deadline, latest)


class ClientTimeout:
    """A cancel scope with a deadline, known to those who may shorten it."""

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
