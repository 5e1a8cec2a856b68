"""Whose item goes next: among priorities, among tenants, and among the requests of a tenant. Pure, as `forming` is.

The rules:

1. Interactive work goes before bulk work. So that bulk work never starves it ages by what the device does: an item of
   bulk work is due as soon as interactive work has had seven times its tokens while both waited.
2. The tenants of a priority share it fairly, by tokens: one with a thousand requests and one with a single one get on
   equally quickly. Each has a turn, as in start-time fair queueing (Goyal, Vin and Cheng, 1996): the virtual time at
   which it came, moved on by the tokens that it has had. Virtual time passes by the tokens of a batch, divided by the
   tenants that wait.
3. The requests of a tenant share in the same way what the tenant gets, in a virtual time of its own.
4. A tenant of which nothing waits is forgotten, and comes back as a new one. Nobody gains by that: whoever waits keeps
   up with virtual time, and so gets its part of all that the device does, whatever others do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Final, Generic, NamedTuple, TypeVar

from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import Item, Priority

P = TypeVar("P")

INTERACTIVE_PER_BULK: Final = 7
"""Tokens of interactive work that go before each of bulk work while both wait: that leaves bulk work an eighth."""


class _Entry(NamedTuple, Generic[P]):
    """One item; compares by its turn, and by its arrival where turns are equal."""

    turn: float
    arrival: int
    item: Item[P]


class Waiting(NamedTuple):
    """How much waits."""

    items: int
    requests: int
    cost: int


class _Tenant(Generic[P]):
    """What waits of one tenant in one priority."""

    __slots__ = ("batch_cost", "batch_requests", "cost", "name", "now", "requests", "turn", "waiting")

    def __init__(self, name: Hashable, turn: float, now: float) -> None:
        self.name = name
        self.turn = turn
        """In the virtual time of its priority."""
        self.now = now
        """Virtual time of its requests, in tokens of one request's share."""
        self.cost = 0
        self.requests: dict[Ticket, int] = {}
        """Items that wait, by request."""
        self.waiting: dict[Hashable, list[_Entry[P]]] = {}
        """By batch key; each a heap, and none empty."""
        self.batch_cost = 0
        """What the batch that is being cut has of it."""
        self.batch_requests = 0
        """Requests that waited when the batch got the first of that."""


class _Queue(Generic[P]):
    """Everything that waits of one priority."""

    def __init__(self, lane: Hashable) -> None:
        self._lane = lane
        self.items = 0
        self.cost = 0
        self.requests = 0
        self.now = 0.0
        """Virtual time of the tenants, in tokens of one tenant's share."""
        self.tenants: dict[Hashable, _Tenant[P]] = {}
        """Those of which something waits, or did before the batch that is being cut."""
        self._turns: dict[Hashable, list[tuple[float, int, _Tenant[P]]]] = {}
        """By batch key: heap of the tenants of which items with it wait, by turns that may have moved on since."""
        self._touched: list[_Tenant[P]] = []
        """Of which something has gone since the last batch was cut."""
        self._pushes = count()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._turns

    def add(self, item: Item[P], arrival: int, origin: float) -> None:
        ticket, key, cost = item.ticket, item.batch_key, item.cost
        if (tenant := self.tenants.get(ticket.tenant)) is None:
            tenant = self.tenants[ticket.tenant] = _Tenant(ticket.tenant, self.now, origin)
        standing = ticket.standing(self._lane)
        turn = max(tenant.now, standing.turn)
        standing.turn = turn + cost
        if (waiting := tenant.waiting.get(key)) is None:
            waiting = tenant.waiting[key] = []
            heappush(self._turns.setdefault(key, []), (tenant.turn, next(self._pushes), tenant))
        heappush(waiting, _Entry(turn, arrival, item))
        if (waits := tenant.requests.get(ticket, 0)) == 0:
            self.requests += 1
        tenant.requests[ticket] = waits + 1
        tenant.cost += cost
        self.cost += cost
        self.items += 1

    def head(self, key: Hashable) -> Item[P]:
        """The item whose turn is first of those with this key."""
        turns = self._turns[key]
        tenant = turns[0][2] if len(turns) == 1 else self._first_tenant(turns)[2]
        return tenant.waiting[key][0].item

    def _first_tenant(self, turns: list[tuple[float, int, _Tenant[P]]]) -> tuple[float, int, _Tenant[P]]:
        while (first := turns[0])[0] < first[2].turn:
            heapreplace(turns, (first[2].turn, next(self._pushes), first[2]))
        return first

    def first(self) -> tuple[Hashable, Item[P]]:
        """The item whose turn is first of all, and its key."""
        tenant = min([self._first_tenant(turns) for turns in self._turns.values()])[2]
        key = min(tenant.waiting, key=lambda k: tenant.waiting[k][0][:2])
        return key, self.head(key)

    def pop(self, key: Hashable, *, taken: bool) -> None:
        """Let go of the first item of a key, which a batch has taken or nobody wants."""
        tenant = self._turns[key][0][2]  # `head` has put it there
        waiting = tenant.waiting[key]
        item = heappop(waiting).item
        if not waiting:
            del tenant.waiting[key]
            heappop(self._turns[key])
            if not self._turns[key]:
                del self._turns[key]
        self._let_go(tenant, item, taken=taken)

    def all_of(self, key: Hashable) -> list[Item[P]]:
        """Those with this key, in no order."""
        return [waits.item for _, _, tenant in self._turns[key] for waits in tenant.waiting[key]]

    def pop_all(self, key: Hashable, *, taken: set[int], kept: set[int]) -> None:
        """Let go of the items with this key but for those that are kept.

        Args:
            taken: Of those that a batch has taken, their identities.
            kept: Of the others that are still wanted.
        """
        for _, _, tenant in self._turns[key]:
            left = [waits for waits in tenant.waiting[key] if id(waits.item) in kept]
            for waits in tenant.waiting[key] if len(left) < len(tenant.waiting[key]) else ():
                if id(waits.item) not in kept:
                    self._let_go(tenant, waits.item, taken=id(waits.item) in taken)
            if left:
                heapify(left)
                tenant.waiting[key] = left
            else:
                del tenant.waiting[key]
        turns = [entry for entry in self._turns[key] if key in entry[2].waiting]
        if turns:
            heapify(turns)
            self._turns[key] = turns
        else:
            del self._turns[key]

    def _let_go(self, tenant: _Tenant[P], item: Item[P], *, taken: bool) -> None:
        cost = item.cost
        if not tenant.batch_requests:
            tenant.batch_requests = len(tenant.requests)
            self._touched.append(tenant)
        if taken:
            tenant.turn += cost
            tenant.batch_cost += cost
        tenant.cost -= cost
        self.cost -= cost
        self.items -= 1
        left = tenant.requests[item.ticket] - 1
        if left:
            tenant.requests[item.ticket] = left
        else:
            del tenant.requests[item.ticket]
            self.requests -= 1

    def end_batch(self) -> int:
        """Let virtual time pass, and forget those of which nothing waits any more.

        Returns:
            Tokens that the batch has of this priority.
        """
        if not self._touched:
            return 0
        cost = sum([tenant.batch_cost for tenant in self._touched])
        self.now += cost / len(self.tenants)
        for tenant in self._touched:
            tenant.now += tenant.batch_cost / tenant.batch_requests
            tenant.batch_cost = tenant.batch_requests = 0
            if not tenant.requests:
                del self.tenants[tenant.name]
        self._touched.clear()
        return cost

    def ahead(self, ticket: Ticket) -> float:
        """Tokens of this priority that go before the next item of a request."""
        if (tenant := self.tenants.get(ticket.tenant)) is None:
            return 0.0
        turn = ticket.standing(self._lane).turn
        own = min(tenant.cost, max(0.0, turn - tenant.now) * len(tenant.requests))
        others = (max(0.0, tenant.turn - self.now) + own) * (len(self.tenants) - 1)
        return own + min(self.cost - tenant.cost, others)


class Turns(Generic[P]):
    """Everything that waits for one device.

    A batch is cut by `first`, then `offer` and `take` for item after item (or `candidates` and `take_of`, where
    the order is another one), then `end_batch`.

    Args:
        lane: Which waiting room this is, where there are several: a request has a turn in each.
    """

    def __init__(self, lane: Hashable = None) -> None:
        self._interactive, self._bulk = queues = (_Queue[P](lane), _Queue[P](lane))
        self._of = dict(zip((Priority.INTERACTIVE, Priority.BULK), queues, strict=True))
        self._offered = self._interactive
        self._before_bulk = 0
        """Tokens that interactive work has had before the next item of bulk work; below 0 where that had more than its
        part."""
        self._given = 0.0
        """Tokens of all batches so far: no virtual time of a tenant's requests can be later."""
        self._arrivals = count()

    @property
    def items(self) -> int:
        """That wait."""
        return self._interactive.items + self._bulk.items

    @property
    def cost(self) -> int:
        """Tokens that wait, padding not counted."""
        return self._interactive.cost + self._bulk.cost

    @property
    def requests(self) -> int:
        """Of which something waits."""
        return self._interactive.requests + self._bulk.requests

    def waiting(self, priority: Priority) -> Waiting:
        """What waits of a priority."""
        queue = self._of[priority]
        return Waiting(queue.items, queue.requests, queue.cost)

    @property
    def tenants(self) -> int:
        """Of which something waits; one that has both is counted in each priority."""
        return len(self._interactive.tenants) + len(self._bulk.tenants)

    def ahead(self, ticket: Ticket) -> float:
        """Tokens that go before the next item of a request: about what the others get until it has its turn.

        Other tenants count for no more than its own gets meanwhile, bulk work before interactive for no more than is
        due, and interactive work before bulk for no more than leaves bulk its part.
        """
        queue = self._of[ticket.priority]
        ahead = queue.ahead(ticket)
        if queue is self._interactive:
            return ahead + min(self._bulk.cost, ahead / INTERACTIVE_PER_BULK)
        return ahead + min(self._interactive.cost, ahead * INTERACTIVE_PER_BULK)

    def add(self, items: Iterable[Item[P]]) -> None:
        for item in items:
            self._of[item.ticket.priority].add(item, next(self._arrivals), self._given)

    def first(self, still_wanted: Callable[[Item[P]], bool]) -> tuple[Hashable, Item[P]] | None:
        """The batch key of the item whose turn is first of all, and the item; None if nothing is left.

        Args:
            still_wanted: Asked of each item that is looked at; one that is not wanted is let go of.
        """
        while (queue := self._leading()) is not None:
            key, item = queue.first()
            if still_wanted(item):
                self._offered = queue
                return key, item
            queue.pop(key, taken=False)
        return None

    def _leading(self) -> _Queue[P] | None:
        if not self._bulk.requests:
            return self._interactive if self._interactive.requests else None
        if not self._interactive.requests:
            return self._bulk
        return self._bulk if self._is_due(self._bulk.first()[1]) else self._interactive

    def _is_due(self, bulk: Item[P]) -> bool:
        return self._before_bulk >= bulk.cost * INTERACTIVE_PER_BULK

    def offer(self, key: Hashable, still_wanted: Callable[[Item[P]], bool]) -> Item[P] | None:
        """The item whose turn is first of those with a key; None if nothing is left of them."""
        interactive, bulk = self._interactive, self._bulk
        while True:
            queue = interactive
            if bulk.requests and key in bulk and (key not in interactive or self._is_due(bulk.head(key))):
                queue = bulk
            elif key not in interactive:
                return None
            item = queue.head(key)
            if still_wanted(item):
                self._offered = queue
                return item
            queue.pop(key, taken=False)

    def take(self, key: Hashable, item: Item[P]) -> None:
        """Take what `offer` has given."""
        self._offered.pop(key, taken=True)
        if self._bulk.requests or self._before_bulk:
            self._settle(self._offered, item.cost)

    def candidates(self, key: Hashable, still_wanted: Callable[[Item[P]], bool]) -> list[Item[P]]:
        """All items of a key and of the priority of what `first` has given that are wanted."""
        return [item for item in self._offered.all_of(key) if still_wanted(item)]

    def take_of(self, key: Hashable, candidates: Iterable[Item[P]], taken: Collection[Item[P]]) -> None:
        """Take some of the candidates, and let go of all that were none."""
        queue = self._offered
        ids = set(map(id, taken))
        queue.pop_all(key, taken=ids, kept=set(map(id, candidates)) - ids)
        self._settle(queue, sum([item.cost for item in taken]))

    def _settle(self, queue: _Queue[P], cost: int) -> None:
        """Count what a priority has had, while the other one waits."""
        if not (self._bulk.requests and self._interactive.requests):
            self._before_bulk = 0
        elif queue is self._interactive:
            self._before_bulk += cost
        else:
            self._before_bulk -= cost * INTERACTIVE_PER_BULK

    def end_batch(self) -> None:
        """Let virtual time pass by what was taken."""
        self._given += self._interactive.end_batch() + self._bulk.end_batch()
