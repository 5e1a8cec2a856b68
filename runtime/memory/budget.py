"""Memory budget: the bytes that bodies, answers and image decodes may hold at once.

Each of the three has its own share, so that none can block another. Bodies and answers are admitted or rejected at
once, on the event loop. Decodes wait in their threads.
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
"""Shares of the budget.

Decoding takes up to a hundred times the bytes of an encoded image, so decodes have the largest share. Any division
works that leaves enough for one large request of each kind."""


class MemoryBudget:
    """Bytes that requests may hold at once, divided by purpose.

    Args:
        limit_bytes: Limit of all purposes together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bodies = ByteAccount(int(limit_bytes * SHARES["bodies"]))
        """Account of request bodies, from their arrival until the request ends."""
        self.answers = ByteAccount(int(limit_bytes * SHARES["answers"]))
        """Account of rows of the device and of encoded answers, until they are sent."""
        self.decodes = DecodeMemory(int(limit_bytes * SHARES["decodes"]))
        """Memory of images while they are decoded and resized."""

    @property
    def held_bytes(self) -> int:
        """Bytes that requests hold now."""
        return self.bodies.held_bytes + self.answers.held_bytes + self.decodes.held_bytes

    def resize(self, limit_bytes: int) -> None:
        """Change the limit. Bytes above a new limit stay held, and nothing more is admitted until it fits."""
        self.limit_bytes = limit_bytes
        self.bodies.limit_bytes = int(limit_bytes * SHARES["bodies"])
        self.answers.limit_bytes = int(limit_bytes * SHARES["answers"])
        self.decodes.resize(int(limit_bytes * SHARES["decodes"]))


class ByteAccount:
    """Account of the bytes that each party holds for one purpose. Not thread-safe: for one event loop.

    A party may hold `TIMES_FREE` times the bytes that it leaves free: a dynamic threshold (Choudhury and Hahne, 1998).
    So one party never takes all.

    Args:
        limit_bytes: Limit of all parties together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        """Bytes that all parties hold."""
        self.rejected = 0
        """Number of rejected requests for bytes."""
        self._parties: dict[Hashable, int] = {}

    def hold(self, party: Hashable = None) -> Holding:
        """Open the holding of one request, with no bytes yet.

        Args:
            party: Tenant or client that the bytes count for. None is a party, too.
        """
        return Holding(self, party)

    def has_room(self, count: int, party: Hashable = None) -> bool:
        """True: a party may hold `count` more bytes. Nothing is reserved."""
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
    """Bytes that one request holds for one purpose. They are released at the end of its block."""

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
        """Reserve `count` more bytes, if they fit. False: they do not, and nothing changed."""
        if not self._account.has_room(count, self._party):
            self._account.rejected += 1
            return False
        self.add(count)
        return True

    def add(self, count: int) -> None:
        """Count bytes that are already in memory, even above the limit. A negative count releases bytes."""
        self.held_bytes += count
        self._account._add(count, self._party)

    def set(self, count: int) -> None:
        """Set the number of bytes that the request holds."""
        self.add(count - self.held_bytes)

    def give_back(self) -> None:
        """Release all bytes."""
        self.set(0)


class DecodeMemory:
    """Memory of image decodes. Thread-safe: threads wait in order until their decodes fit.

    A decode that is alone always fits. So a small limit makes decodes run one by one, and blocks none for ever.

    Args:
        limit_bytes: Limit of all decodes together.
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
        """Bytes of the running decodes."""
        return self._held_bytes

    def resize(self, limit_bytes: int) -> None:
        """Change the limit, and wake the waiting threads."""
        with self._changed:
            self._limit_bytes = limit_bytes
            self._changed.notify_all()

    @contextmanager
    def room(self, count: int) -> Iterator[None]:
        """Wait until a decode of `count` bytes fits, and hold them during the block."""
        place = object()
        with self._changed:
            self._waiting.append(place)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is place and self._fits(count))
                self._held_bytes += count
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()  # the next in the queue may fit, too
        try:
            yield
        finally:
            with self._changed:
                self._held_bytes -= count
                self._changed.notify_all()

    def _fits(self, count: int) -> bool:
        return not self._held_bytes or self._held_bytes + count <= self._limit_bytes
