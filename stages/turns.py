"""Whose item goes next: interactive work before bulk work, and in each what `tenants` says. Pure, as `forming` is.

So that bulk work never starves it ages by what the device does: an item of bulk work is due as soon as interactive work
has had seven times its tokens while both waited.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from itertools import count
from typing import Final, Generic, NamedTuple, TypeVar

from staged_pool.stages.tenants import TenantQueue
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import Item, Priority

P = TypeVar("P")

INTERACTIVE_PER_BULK: Final = 7
"""Tokens of interactive work that go before each of bulk work while both wait: that leaves bulk work an eighth."""


class Waiting(NamedTuple):
    """How much waits."""

    items: int
    requests: int
    cost: int


class Turns(Generic[P]):
    """Everything that waits for one device.

    A batch is cut by `first` and `take`, then `offer` and `take` for item after item (or `first`, `candidates` and
    `take_of`, where the order is another one), then `end_batch`.

    Args:
        lane: Which waiting room this is, where there are several: a request has a turn in each.
    """

    def __init__(self, lane: Hashable = None) -> None:
        self._interactive, self._bulk = queues = (TenantQueue[P](lane), TenantQueue[P](lane))
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

    def turn(self, ticket: Ticket) -> float:
        """The turn that the next item of a request has if it comes now: among those of its tenant and priority."""
        return self._of[ticket.priority].turn(ticket, self._given)

    def add(self, item: Item[P], turn: float | None = None) -> float:
        """Have an item wait, with a turn that it had before; None: it comes now. Returns its turn."""
        return self._of[item.ticket.priority].add(item, next(self._arrivals), self._given, turn)

    def withdraw(self, item: Item[P]) -> None:
        """Let go of an item that waits, between two batches. It is not to be added again."""
        self._of[item.ticket.priority].withdraw(item)

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

    def _leading(self) -> TenantQueue[P] | None:
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
        """Take what `first` or `offer` has given."""
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

    def _settle(self, queue: TenantQueue[P], cost: int) -> None:
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
