"""The limit of connections. When it is reached, the connection that has waited longest for its client makes room.

Those that are idle go before those that are slow, unless nearly all are slow.

Every step takes the same time, however many connections there are.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from staged_pool.api.asgi import Scope
from staged_pool.stages.scheduling.tuning import TIMES_FREE

RESERVE: Final = 32
"""Connections beyond the limit, for probes: they are answered on open paths alone. A choice: a few probes a second."""

CONNECTION: Final = "staged_pool.connection"
"""Where the `state` of a request's scope has its connection."""


class Member(Protocol):
    """A connection, as the limit sees it."""

    @property
    def address(self) -> str | None:
        """The client's address."""

    def evict(self) -> None:
        """End soon, to make room."""

    def begin_work(self) -> None:
        """Count a request that this server works on: meanwhile the connection makes no room."""

    def end_work(self) -> None:
        """Count it no more."""


class ConnectionLimit:
    """Knows the connections of one server, and which of them waits for its client since when.

    One address may have `TIMES_FREE` times as many connections as it leaves free; then it makes room for itself.

    Args:
        most: Connections at once.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.evicted = 0
        """Connections that were closed to make room."""
        self._members: set[Member] = set()
        self._extra: set[Member] = set()
        """Those that were let in though there were as many as may be."""
        self._addresses: Counter[str | None] = Counter()
        self._all = _Waits()
        self._of: dict[str | None, _Waits] = {}

    def admit(self, address: str | None) -> bool:
        """Make room for one connection more, if need be. False: there is none, and it is to be closed."""
        if not self.is_crowded(address, 1):
            return True
        count, is_full = self._addresses[address], len(self._members) >= self.most
        own = self._of.get(address)
        if own is not None and (not is_full or 2 * count > self.most) and self._evict(own.longest()):
            return True
        if is_full and self._evict(self._all.longest()):
            return True
        return len(self._members) < self.most + RESERVE

    def is_crowded(self, address: str | None, more: int = 0) -> bool:
        """True where there are more connections than may be, at all or of this address, and may so many more."""
        free = self.most - len(self._members) - more
        return free < 0 or self._addresses[address] + more > TIMES_FREE * (free + 1)

    def is_extra(self, member: Member) -> bool:
        """True where a connection is one of the reserve, and may ask what probes ask alone."""
        if member not in self._extra:
            return False
        if not self.is_crowded(member.address):
            self._extra.discard(member)
            return False
        return True

    def make_room(self) -> bool:
        """Have the connection that has waited longest end; False: none waits."""
        return self._evict(self._all.longest())

    def enter(self, member: Member) -> None:
        """Count a connection, which waits for its client's first bytes."""
        self._members.add(member)
        self._addresses[member.address] += 1
        if self.is_crowded(member.address):
            self._extra.add(member)
        self.wait(member, idle=True)

    def leave(self, member: Member) -> None:
        """Count a connection no more. Does nothing for one that is not counted."""
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
        """Note that a connection waits for its client from now on, unless it does so already.

        Args:
            member: The connection.
            idle: It waits for a request; else for the rest of one, or for its answer to be read.
        """
        if member in self._members:
            self._all.add(member, idle=idle)
            self._of.setdefault(member.address, _Waits()).add(member, idle=idle)

    def work(self, member: Member) -> None:
        """Note that a connection does not wait for its client."""
        self._all.remove(member)
        if (own := self._of.get(member.address)) is not None:
            own.remove(member)

    def _evict(self, member: Member | None) -> bool:
        if member is None:
            return False
        self.leave(member)  # it may take a moment, in which nobody waits for it
        self.evicted += 1
        member.evict()
        return True


class _Waits:
    """Connections that wait for their clients, in the order in which they began to."""

    __slots__ = ("_idle", "_slow")

    def __init__(self) -> None:
        self._idle: OrderedDict[Member, None] = OrderedDict()
        self._slow: OrderedDict[Member, None] = OrderedDict()

    def add(self, member: Member, *, idle: bool) -> None:
        here, there = (self._idle, self._slow) if idle else (self._slow, self._idle)
        there.pop(member, None)
        here.setdefault(member)

    def remove(self, member: Member) -> None:
        self._idle.pop(member, None)
        self._slow.pop(member, None)

    def longest(self) -> Member | None:
        """The one to make room: the idle ones go first, for they lose nothing, as long as they are not few.

        A client that has just connected is idle too. Among many slow ones it must not go before it has asked.
        """
        first, then = self._idle, self._slow
        if len(then) > TIMES_FREE * len(first):
            first, then = then, first
        return next(iter(first or then), None)


def connection_of(scope: Scope) -> Member | None:
    """Return the connection of a request; None over HTTP/3."""
    member: Member | None = (scope.get("state") or {}).get(CONNECTION)
    return member


@contextmanager
def at_work(scope: Scope) -> Iterator[None]:
    """A block in which this server works on a request, and its connection makes no room."""
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
    """A block within `at_work` that waits for the client."""
    if (member := connection_of(scope)) is None:
        yield
        return
    member.end_work()
    try:
        yield
    finally:
        member.begin_work()
