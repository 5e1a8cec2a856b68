"""The memory budget: the bytes that bodies, answers and image decodes may hold at once.

Each of the three has a share of its own, so that none can take what another needs to go on. Bodies and answers are
admitted or rejected at once, and belong to the event loop. Decodes wait for their turn in their threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from staged_pool.stages.scheduling.tuning import TIMES_FREE

SHARES: Final = {"bodies": 0.25, "answers": 0.25, "decodes": 0.5}
"""Parts of the budget. An encoded image takes up to a hundred times its bytes while it is decoded, so decodes have the
largest. A choice: any division works that leaves room for one large request of each kind."""


class MemoryBudget:
    """The bytes that requests may hold at once, divided by purpose.

    Args:
        limit_bytes: Bytes of all purposes together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bodies = ByteAccount(int(limit_bytes * SHARES["bodies"]))
        """Request bodies, as they arrive and while they are worked on."""
        self.answers = ByteAccount(int(limit_bytes * SHARES["answers"]))
        """Rows of the device, and the answers made of them, until they are sent."""
        self.decodes = DecodeMemory(int(limit_bytes * SHARES["decodes"]))
        """Images while they are decoded and resized."""

    def resize(self, limit_bytes: int) -> None:
        """Change the limit. What is held already stays, and nothing more is admitted before it fits."""
        self.limit_bytes = limit_bytes
        self.bodies.limit_bytes = int(limit_bytes * SHARES["bodies"])
        self.answers.limit_bytes = int(limit_bytes * SHARES["answers"])
        self.decodes.resize(int(limit_bytes * SHARES["decodes"]))


class ByteAccount:
    """Bytes that are held for one purpose, by party. It belongs to one event loop.

    A party may hold `TIMES_FREE` times what it leaves free, which is a dynamic threshold (Choudhury and Hahne, 1998).
    So however much one holds, another still finds room.

    Args:
        limit_bytes: Bytes that all parties may hold together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        """Bytes that all parties hold now."""
        self.rejected = 0
        """Times that somebody asked for more than there was room for."""
        self._parties: dict[Hashable, int] = {}

    def hold(self, party: Hashable = None) -> Holding:
        """Open the account of one request, in which it holds nothing yet.

        Args:
            party: Tenant or client that the bytes count for. None is a party like any other.
        """
        return Holding(self, party)

    def has_room(self, count: int, party: Hashable = None) -> bool:
        """True where a party may hold so many bytes more. Nothing is taken."""
        if not count:
            return True
        free = self.limit_bytes - self.held_bytes - count
        if not self.held_bytes:
            return free >= 0
        return self._parties.get(party, 0) + count <= TIMES_FREE * free

    def _add(self, count: int, party: Hashable) -> None:
        self.held_bytes += count
        has = self._parties.get(party, 0) + count
        if has:
            self._parties[party] = has
        else:
            self._parties.pop(party, None)


class Holding:
    """The bytes that one request holds for one purpose; given back when its block ends."""

    __slots__ = ("_account", "_party", "held_bytes")

    def __init__(self, account: ByteAccount, party: Hashable) -> None:
        self._account = account
        self._party = party
        self.held_bytes = 0

    def __enter__(self) -> Holding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()

    def take(self, count: int) -> bool:
        """Hold so many bytes more, if there is room. False: there is none, and nothing was taken."""
        if not self._account.has_room(count, self._party):
            self._account.rejected += 1
            return False
        self.add(count)
        return True

    def add(self, count: int) -> None:
        """Count bytes that are there already, with or without room; fewer, where negative."""
        self.held_bytes += count
        self._account._add(count, self._party)

    def set(self, count: int) -> None:
        """Count so many bytes in all: it is known now what the request holds."""
        self.add(count - self.held_bytes)

    def give_back(self) -> None:
        """Hold nothing."""
        self.set(0)


class DecodeMemory:
    """Bytes that image decodes hold, in any number of threads. A thread waits until its decode fits, in order.

    One decode alone always goes, so that a limit which is too small makes decodes take turns and stops none.

    Args:
        limit_bytes: Bytes of all decodes together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @property
    def limit_bytes(self) -> int:
        return self._limit_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the decodes that run now."""
        return self._held_bytes

    def resize(self, limit_bytes: int) -> None:
        """Change the limit; those who wait look again."""
        with self._changed:
            self._limit_bytes = limit_bytes
            self._changed.notify_all()

    @contextmanager
    def room(self, count: int) -> Iterator[None]:
        """Wait in this thread until a decode of so many bytes fits, and hold them during the block."""
        place = object()
        with self._changed:
            self._waiting.append(place)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is place and self._fits(count))
                self._held_bytes += count
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()  # the next in line may fit, too
        try:
            yield
        finally:
            with self._changed:
                self._held_bytes -= count
                self._changed.notify_all()

    def _fits(self, count: int) -> bool:
        return not self._held_bytes or self._held_bytes + count <= self._limit_bytes
