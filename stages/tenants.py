"""Whose item goes next: among tenants, and among the requests of a tenant. Pure, as `forming` is.

The rules:

1. Tenants share the device fairly, by tokens: one with a thousand requests and one with a single one get on equally
   quickly. Each has a turn, as in start-time fair queueing (Goyal, Vin and Cheng, 1996): the virtual time at which it
   came, moved on by the tokens that it has had. Virtual time passes by the tokens of a batch, divided by the tenants
   that waited; and if all that still wait are ahead of it then, it catches up with the least of them, as in WF2Q+
   (Bennett and Zhang, 1997). For a visitor that leaves room in a batch has had less than its part: without that,
   whoever used the room would owe it to the next one that comes.
2. The requests of a tenant share in the same way what the tenant gets, in a virtual time of its own.
3. A tenant of which nothing waits is forgotten, and comes back as a new one. Nobody gains by that: whoever waits keeps
   up with virtual time, and so gets its part of all that the device does, whatever others do.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import Item

P = TypeVar("P")


class _Entry(NamedTuple, Generic[P]):
    """One item; compares by its turn, and by its arrival where turns are equal."""

    turn: float
    arrival: int
    item: Item[P]


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


class TenantQueue(Generic[P]):
    """Everything that waits of one priority.

    Args:
        lane: Which waiting room this is, where there are several: a request has a turn in each.
    """

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
        self._withdrawn: set[Item[P]] = set()
        """Items that lie in a heap, and wait no more; never as its first."""

    def __contains__(self, key: Hashable) -> bool:
        return key in self._turns

    def turn(self, ticket: Ticket, origin: float) -> float:
        """The turn that the next item of a request has among its tenant's, if it comes now."""
        tenant = self.tenants.get(ticket.tenant)
        return max(origin if tenant is None else tenant.now, ticket.standing(self._lane).turn)

    def add(self, item: Item[P], arrival: int, origin: float, turn: float | None = None) -> float:
        """Have an item wait.

        Args:
            item: Of any tenant.
            arrival: Decides where turns are equal.
            origin: Virtual time of its tenant's requests, if nothing of that waits.
            turn: What `turn` or this said of it at some time before. None: it comes now.

        Returns:
            Its turn.
        """
        ticket, key, cost = item.ticket, item.batch_key, item.cost
        if (tenant := self.tenants.get(ticket.tenant)) is None:
            tenant = self.tenants[ticket.tenant] = _Tenant(ticket.tenant, self.now, origin)
        standing = ticket.standing(self._lane)
        if turn is None:
            turn = max(tenant.now, standing.turn)
        standing.turn = max(standing.turn, turn) + cost
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
        return turn

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
        item = heappop(tenant.waiting[key]).item
        self._tidy(tenant, key)
        self._let_go(tenant, item, taken=taken)

    def withdraw(self, item: Item[P]) -> None:
        """Let go of an item that waits, between two batches. It is not to be added again."""
        tenant, key = self.tenants[item.ticket.tenant], item.batch_key
        self._withdrawn.add(item)
        self._tidy(tenant, key)
        self._let_go(tenant, item, taken=False)
        self.end_batch()

    def _tidy(self, tenant: _Tenant[P], key: Hashable) -> None:
        """After a change: no withdrawn item is the first of a heap, and no heap is empty."""
        waiting = tenant.waiting[key]
        if self._withdrawn:
            while waiting and waiting[0].item in self._withdrawn:
                self._withdrawn.remove(heappop(waiting).item)
        if waiting:
            return
        del tenant.waiting[key]
        turns = self._turns[key]
        if turns[0][2] is tenant:
            heappop(turns)
        else:
            turns[:] = [entry for entry in turns if entry[2] is not tenant]
            heapify(turns)
        if not turns:
            del self._turns[key]

    def all_of(self, key: Hashable) -> list[Item[P]]:
        """Those with this key, in no order."""
        waiting = [waits.item for _, _, tenant in self._turns[key] for waits in tenant.waiting[key]]
        return [item for item in waiting if item not in self._withdrawn] if self._withdrawn else waiting

    def pop_all(self, key: Hashable, *, taken: set[int], kept: set[int]) -> None:
        """Let go of the items with this key but for those that are kept.

        Args:
            taken: Of those that a batch has taken, their identities.
            kept: Of the others that are still wanted.
        """
        for _, _, tenant in self._turns[key]:
            left = [waits for waits in tenant.waiting[key] if id(waits.item) in kept]
            for waits in tenant.waiting[key] if len(left) < len(tenant.waiting[key]) else ():
                if waits.item in self._withdrawn:
                    self._withdrawn.remove(waits.item)
                elif id(waits.item) not in kept:
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
        else:
            item.ticket.standing(self._lane).turn -= cost
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
        turns = [self._first_tenant(turns)[0] for turns in self._turns.values()]
        self.now = _later(self.now, cost, len(self.tenants), turns)
        for tenant in self._touched:
            turns = [waiting[0].turn for waiting in tenant.waiting.values()]
            tenant.now = _later(tenant.now, tenant.batch_cost, tenant.batch_requests, turns)
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


def _later(now: float, cost: int, among: int, turns: Collection[float]) -> float:
    """Virtual time after a batch.

    Args:
        now: Before it.
        cost: Tokens of it.
        among: Those who waited before it.
        turns: Of those who still wait.
    """
    return max(now + cost / among, min(now + cost, min(turns, default=0.0)))
