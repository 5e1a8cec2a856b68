"""Limit of open connections, which evicts the one that has waited longest for its client.

Idle connections are evicted before slow ones, unless nearly all are slow. Each operation takes constant time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from staged_pool.api.asgi import Scope
from staged_pool.stages.scheduling.tuning import TIMES_FREE

RESERVE: Final = 32
"""Connections beyond the limit, which serve health probes alone. Enough for a few probes per second."""

NEWEST: Final = 64
"""Newest connections, which are closed last: their requests may have come, and are read in the next iterations.

Four times what one iteration accepts. At most a quarter of the limit.
"""

CONNECTION: Final = "staged_pool.connection"
"""Key of the connection in the `state` of a request's scope."""


class Member(Protocol):
    """A connection, as the limit sees it."""

    @property
    def address(self) -> str | None:
        """Address of the client."""

    def evict(self) -> None:
        """Close soon, to make room for another connection."""

    def begin_work(self) -> None:
        """Count a request in progress: the connection is not evicted until `end_work`."""

    def end_work(self) -> None:
        """Stop counting that request."""


class ConnectionLimit:
    """Connections of one server, ordered by how long they have waited for their clients.

    One address may have `TIMES_FREE` times as many connections as it leaves free. Beyond that its own connections are
    evicted.

    Args:
        most: Maximum number of connections at once.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.evicted = 0
        """Connections that were closed to make room."""
        self._members: set[Member] = set()
        self._extra: set[Member] = set()
        """Connections that were accepted beyond the limit."""
        self._addresses: Counter[str | None] = Counter()
        self._entered = 0
        """Connections since the start."""
        self._newest = min(NEWEST, most // 4)
        self._all = _Waits()
        self._of: dict[str | None, _Waits] = {}

    def admit(self, address: str | None) -> bool:
        """Make room for one more connection if needed. Return False if there is none: the caller closes it."""
        if not self.is_crowded(address, 1):
            return True
        count, is_full = self._addresses[address], len(self._members) >= self.most
        own = self._of.get(address)
        if own is not None and (not is_full or 2 * count > self.most) and self._evict(self._longest(own)):
            return True
        if is_full and self._evict(self._longest(self._all)):
            return True
        return len(self._members) < self.most + RESERVE

    def is_crowded(self, address: str | None, more: int = 0) -> bool:
        """Tell if `more` further connections would exceed the limit, in total or for this address."""
        free = self.most - len(self._members) - more
        return free < 0 or self._addresses[address] + more > TIMES_FREE * (free + 1)

    def is_extra(self, member: Member) -> bool:
        """Tell if a connection is beyond the limit: it serves probes alone."""
        if member not in self._extra:
            return False
        if not self.is_crowded(member.address):
            self._extra.discard(member)
            return False
        return True

    def make_room(self) -> bool:
        """Evict the connection that has waited longest. Return False if none waits."""
        return self._evict(self._longest(self._all))

    def enter(self, member: Member) -> None:
        """Count a new connection, which waits for the first bytes of its client."""
        self._members.add(member)
        self._entered += 1
        self._addresses[member.address] += 1
        if self.is_crowded(member.address):
            self._extra.add(member)
        self.wait(member, idle=True)

    def leave(self, member: Member) -> None:
        """Stop counting a connection; one that is not counted is ignored."""
        if member not in self._members:
            return
        self.work(member)
        self._members.discard(member)
        self._extra.discard(member)
        self._addresses[member.address] -= 1
        if not self._addresses[member.address]:
            del self._addresses[member.address]
            self._of.pop(member.address, None)

    def wait(self, member: Member, *, idle: bool) -> None:
        """Note that a connection waits for its client from now on, unless it does already.

        Args:
            member: The connection.
            idle: True while it waits for a request; False for the rest of a request, or for the client to read.
        """
        if member in self._members:
            self._all.add(member, self._entered, idle=idle)
            self._of.setdefault(member.address, _Waits()).add(member, self._entered, idle=idle)

    def work(self, member: Member) -> None:
        """Note that a connection no longer waits for its client."""
        self._all.remove(member)
        if (own := self._of.get(member.address)) is not None:
            own.remove(member)

    def _longest(self, waits: _Waits) -> Member | None:
        return waits.longest(self._entered - self._newest)

    def _evict(self, member: Member | None) -> bool:
        if member is None:
            return False
        self.leave(member)  # closing takes a moment, and a new connection must not wait for it
        self.evicted += 1
        member.evict()
        return True


class _Waits:
    """Connections that wait for their clients, in the order in which they began to wait."""

    __slots__ = ("_idle", "_slow")

    def __init__(self) -> None:
        self._idle: OrderedDict[Member, int] = OrderedDict()
        self._slow: OrderedDict[Member, int] = OrderedDict()

    def add(self, member: Member, entered: int, *, idle: bool) -> None:
        """Note that a connection waits since that many had entered."""
        here, there = (self._idle, self._slow) if idle else (self._slow, self._idle)
        there.pop(member, None)
        here.setdefault(member, entered)

    def remove(self, member: Member) -> None:
        self._idle.pop(member, None)
        self._slow.pop(member, None)

    def longest(self, entered: int) -> Member | None:
        """Return the connection to evict: an idle one, which loses nothing, unless nearly all are slow.

        A client that has just connected counts as idle too. Among slow ones it must not be evicted before its request
        is read.

        Args:
            entered: An idle connection that waits since more had entered is evicted only if none is slow.
        """
        first, then = self._idle, self._slow
        since = next(iter(first.values()), 0)
        if len(then) > TIMES_FREE * len(first) or (then and since > entered):
            first, then = then, first
        return next(iter(first or then), None)


def connection_of(scope: Scope) -> Member | None:
    """Return the connection of a request; None over HTTP/3."""
    member: Member | None = (scope.get("state") or {}).get(CONNECTION)
    return member


@contextmanager
def at_work(scope: Scope) -> Iterator[None]:
    """Mark a block that works on a request: its connection is not evicted meanwhile."""
    if (member := connection_of(scope)) is None:
        yield
        return
    member.begin_work()
    try:
        yield
    finally:
        member.end_work()


@contextmanager
def on_idle(scope: Scope) -> Iterator[None]:
    """Mark a block within `at_work` that waits for the client."""
    if (member := connection_of(scope)) is None:
        yield
        return
    member.end_work()
    try:
        yield
    finally:
        member.begin_work()
