"""Memory budget: the bytes that bodies, answers, outcomes of pipelines and image decodes may hold at once.

Each purpose has its own share, so that none can block another. Bodies and answers are admitted or rejected at once, on
the event loop. Only a caller that may wait, such as a batch, gathers the bytes of its answer as others release theirs.
Decodes wait in their threads.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from staged_pool.runtime.memory.decode_memory import DecodeMemory
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.fair_queue import FairQueue
from staged_pool.stages.scheduling.tuning import TIMES_FREE
from staged_pool.stages.wakeup import Wakeup, wakeup

SHARES: Final = {"bodies": 0.25, "answers": 0.25, "outcomes": 0.2, "decodes": 0.3}
"""Shares of the budget.

Decoding takes up to a hundred times the bytes of an encoded image, so decodes have the largest share. Any division
works that leaves enough for one large request of each kind. Outcomes are apart from answers: a pipeline holds them
while its engines wait for answers, and would wait for itself."""


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
        """Account of rows of the device and of encoded answers, to their last byte."""
        self.outcomes = ByteAccount(int(limit_bytes * SHARES["outcomes"]))
        """Account of the finished items of pipelines, until the answer of their request is sent."""
        self.decodes = DecodeMemory(int(limit_bytes * SHARES["decodes"]))
        """Memory of images while they are decoded and resized."""

    @property
    def held_bytes(self) -> int:
        """Bytes that requests hold now."""
        accounts = (self.bodies, self.answers, self.outcomes, self.decodes)
        return sum(account.held_bytes for account in accounts)

    def resize(self, limit_bytes: int, lent_bytes: int = 0) -> None:
        """Change the limit, in any thread. Bytes above it stay held, and nothing more is admitted until it fits.

        Args:
            limit_bytes: The new limit.
            lent_bytes: Bytes that come back to it, once running loads have ended.
        """
        self.limit_bytes = limit_bytes
        for name in SHARES:
            limit, lent = int(limit_bytes * SHARES[name]), int(lent_bytes * SHARES[name])
            getattr(self, name).resize(limit, lent)

    def serve(self) -> None:
        """Give waiting requests what new limits allow, on the event loop."""
        for account in (self.bodies, self.answers, self.outcomes):
            account.serve()


class ByteAccount:
    """Account of the bytes that each party holds for one purpose. Not thread-safe: for one event loop.

    A party may hold `TIMES_FREE` times the bytes that it leaves free: a dynamic threshold (Choudhury and Hahne, 1998).
    So one party never takes all. Only a single request that needs more may take all, while no other holds any.

    Args:
        limit_bytes: Limit of all parties together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.lent_bytes = 0
        """Bytes that running loads of models have of the limit, until they end."""
        self.held_bytes = 0
        """Bytes that all parties hold."""
        self.rejected = 0
        """Number of rejected requests for bytes."""
        self._parties: dict[Hashable, int] = {}
        self._gathered_bytes = 0
        """Bytes that requests hold which wait, or have waited."""
        self._queue = FairQueue[_Gathering]("memory")
        self._waiting: dict[Hashable, _Gathering] = {}
        """A turn of each party that waits, or has waited."""
        self._gathering: _Gathering | None = None
        """The one that gathers bytes now. The others in the queue hold none, so nobody waits for a waiter."""
        self._served_bytes = limit_bytes
        """The limit when waiting requests were served last."""

    @property
    def most_bytes(self) -> int:
        """The limit while no model is loaded. What needs more never fits."""
        return self.limit_bytes + self.lent_bytes

    def resize(self, limit_bytes: int, lent_bytes: int = 0) -> None:
        """Change the limit, in any thread; see `MemoryBudget.resize`."""
        self.limit_bytes, self.lent_bytes = limit_bytes, lent_bytes

    def serve(self) -> None:
        """Serve waiting requests if the limit has changed."""
        if self._served_bytes != self.limit_bytes:
            self._serve()

    @property
    def waiting(self) -> int:
        """Number of requests that gather bytes, or wait for their turn."""
        return len(self._queue) + (self._gathering is not None)

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

    def room(self, party: Hashable = None) -> int:
        """Return the bytes that a party may take more, with room left for others. Nothing is reserved."""
        free = self.limit_bytes - self.held_bytes
        return max(0, (TIMES_FREE * free - self._parties.get(party, 0)) // (TIMES_FREE + 1))

    def _add(self, count: int, party: Hashable) -> None:
        self.held_bytes += count
        has = self._parties.get(party, 0) + count
        if has:
            self._parties[party] = has
        else:
            self._parties.pop(party, None)
        if count < 0:
            self._serve()

    async def _gather(self, holding: Holding, count: int, priority: Priority) -> None:
        turn = _Gathering(holding, count, priority, holding._party)
        self._queue.add(turn)
        self._waiting[turn.tenant] = turn
        if self._gathering is None:
            self._serve()
        else:  # it has its part of the free bytes, and has left the others
            self._serve_parties_without()
        try:
            await turn.done.wait()
        except BaseException:
            if self._gathering is turn:
                self._gathering = None
            elif not turn.done.is_set():
                self._queue.drop((turn,))
            holding.give_back()
            if self._gathering is None:
                self._serve()
            raise

    def _serve(self) -> None:
        """Give free bytes to the one that gathers, then to others that wait."""
        self._served_bytes = self.limit_bytes
        if (turn := self._gathering) is not None and self._waits_for_load(turn):
            self._gathering = None
            turn.start_tags.clear()
            self._queue.add(turn)
            self._waiting[turn.tenant] = turn
            turn.holding.give_back()
        while (turn := self._gathering or self._next()) is not None and self._fill(turn):
            self._gathering = None
            turn.done.set()
        self._serve_parties_without()

    def _fill(self, turn: _Gathering) -> bool:
        """Give free bytes to a turn. Returns True if it has all that it needs."""
        holding = turn.holding
        missing = turn.count - holding.held_bytes
        free = max(0, self.limit_bytes - self.held_bytes)
        most = _share(self.limit_bytes)
        if turn.count <= most:  # the rest is for requests that do not wait
            free = min(_share(free), max(0, most - self._gathered_bytes))
        if self.held_bytes == holding.held_bytes:
            free = missing  # nobody else will release any
        holding.add(min(missing, free))
        return free >= missing

    def _serve_parties_without(self) -> None:
        """Let the parties that hold nothing take bytes as those that do not wait."""
        without = [party for party in self._waiting if not self._parties.get(party)]
        for turn in sorted(self._firsts(without), key=self._queue.ahead):
            if self.has_room(turn.count, turn.tenant):
                self._take(turn)
                turn.holding._waits = False
                turn.holding.add(turn.count)
                turn.done.set()

    def _next(self) -> _Gathering | None:
        """Take the first turn that may gather out of the queue."""
        turn = self._queue.first(_always)
        if turn is not None and not self._may_gather(turn):
            turn = min(filter(self._may_gather, self._firsts([*self._waiting])), key=self._queue.ahead, default=None)
        if turn is not None:
            self._take(turn)
        self._gathering = turn
        return turn

    def _may_gather(self, turn: _Gathering) -> bool:
        """Return False for one that waits for a load or for others of its party."""
        if self._waits_for_load(turn):
            return False
        return turn.count <= _share(self.limit_bytes) or not self._parties.get(turn.tenant)

    def _waits_for_load(self, turn: _Gathering) -> bool:
        """Return True if only the end of a load gives it enough: it must hold up nobody until then."""
        return self.lent_bytes > 0 and turn.count > self.limit_bytes

    def _firsts(self, parties: Iterable[Hashable]) -> list[_Gathering]:
        """Return the first turn of each party given, and forget parties that wait no more."""
        firsts = []
        for party in parties:
            if (turn := self._queue.first(_always, self._waiting[party])) is None:
                del self._waiting[party]
            else:
                firsts.append(turn)
        return firsts

    def _take(self, turn: _Gathering) -> None:
        self._queue.take(turn)
        self._queue.end_round()


class Holding:
    """Bytes that one request holds for one purpose. They are released at the end of its block."""

    __slots__ = ("_account", "_party", "_waits", "held_bytes")

    def __init__(self, account: ByteAccount, party: Hashable) -> None:
        self._account = account
        self._party = party
        self._waits = False
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

    def take_alone(self, count: int) -> bool:
        """Reserve `count` more bytes, if no other request holds any, and they fit."""
        account = self._account
        if account.held_bytes != self.held_bytes or account.held_bytes + count > account.limit_bytes:
            return False
        self.add(count)
        return True

    async def gather(self, count: int, priority: Priority = Priority.INTERACTIVE) -> None:
        """Wait until the request holds `count` bytes. It holds none before, and none after a cancellation.

        Waiting requests have their turns in fair order. One at a time gathers what others release, and leaves an eighth
        of it to requests that do not wait. So each has its turn if all holdings end, however many new ones come. All
        that have had their turn hold at most seven eighths together, or else the next ones would gather that eighth.

        A party that holds nothing need not wait for its turn: it may take of the rest, as if it did not wait. So no
        party starves behind one whose holdings never end. Only a request that needs more than seven eighths takes all.
        It has its turn when its party holds nothing else. One that needs what a load has waits for the load's end.

        Args:
            count: Bytes; at most `most_bytes` of the account.
            priority: Urgency of the request.
        """
        self._waits = True
        await self._account._gather(self, count, priority)

    def add(self, count: int) -> None:
        """Count bytes that are already in memory, even above the limit. A negative count releases bytes."""
        self.held_bytes += count
        if self._waits:
            self._account._gathered_bytes += count
        self._account._add(count, self._party)

    def set(self, count: int) -> None:
        """Set the number of bytes that the request holds."""
        self.add(count - self.held_bytes)

    def give_back(self) -> None:
        """Release all bytes."""
        self.set(0)


def _always(_: object) -> bool:
    return True


def _share(count: int) -> int:
    """Return the part of some bytes that requests may gather."""
    return count * TIMES_FREE // (TIMES_FREE + 1)


@dataclass(slots=True, eq=False)
class _Gathering:
    """The turn of a request that gathers bytes: an entry of the fair queue, and the claim on it."""

    holding: Holding
    count: int
    priority: Priority
    tenant: Hashable
    done: Wakeup = field(default_factory=wakeup)
    start_tags: dict[Hashable, float] = field(default_factory=dict)

    @property
    def ticket(self) -> _Gathering:
        return self

    @property
    def tokens(self) -> int:
        return max(1, self.count)

    @property
    def batch_key(self) -> Hashable:
        """The party, by which the queue finds its first turn."""
        return self.tenant
