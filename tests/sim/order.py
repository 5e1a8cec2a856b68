"""The order in which items go to the device, compared with a scheduler that is slow and simple.

The reference keeps everything that waits in one list and looks through all of it for every item. Where several items
have equal turns either may go first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from staged_pool.stages.forming import BatchBuilder
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import Batch, BatchTrigger, Item, Priority
from tests.doubles import NoLoad

BULK_WAITS_FOR = 7
"""Tokens of interactive work that go before each of bulk work."""

QUEUE_IN_BATCHES = 8
"""The budget of a batch is such a part of what waits."""


@dataclass(slots=True)
class Waiting:
    item: Item[Any]
    turn: float
    arrival: int

    @property
    def of(self) -> tuple[Priority, Any]:
        return self.item.ticket.priority, self.item.ticket.tenant


@dataclass(slots=True)
class Tenant:
    turn: float
    now: float
    had: int = 0
    requests: int = 0


@dataclass
class Reference:
    """Start-time fair queueing of tenants, and of the requests of each, in two priorities."""

    waiting: list[Waiting] = field(default_factory=list)
    tenants: dict[tuple[Priority, Any], Tenant] = field(default_factory=dict)
    now: dict[Priority, float] = field(default_factory=lambda: dict.fromkeys(Priority, 0.0))
    turns: dict[Ticket, float] = field(default_factory=dict)
    given: float = 0.0
    before_bulk: int = 0
    arrivals: int = 0

    def add(self, item: Item[Any]) -> None:
        self.arrivals += 1
        one = Waiting(item, 0.0, self.arrivals)
        tenant = self.tenants.setdefault(one.of, Tenant(self.now[item.ticket.priority], self.given))
        one.turn = max(tenant.now, self.turns.get(item.ticket, 0.0))
        self.turns[item.ticket] = one.turn + item.cost
        self.waiting.append(one)

    def next(self, key: object = None) -> Iterator[Waiting]:
        """What may go next: of all, or of those with a key."""
        of = {priority: list(self._next_of(priority, key)) for priority in Priority}
        interactive, bulk = of[Priority.INTERACTIVE], of[Priority.BULK]
        for one in bulk:
            if not interactive or self.before_bulk >= one.item.cost * BULK_WAITS_FOR:
                yield one
        if not bulk or any(self.before_bulk < one.item.cost * BULK_WAITS_FOR for one in bulk):
            yield from interactive

    def _next_of(self, priority: Priority, key: object) -> Iterator[Waiting]:
        fitting = [w for w in self.waiting if w.of[0] is priority and (key is None or w.item.batch_key == key)]
        least = min((self.tenants[one.of].turn for one in fitting), default=math.inf)
        tied = {one.of for one in fitting if self.tenants[one.of].turn == least}
        firsts = [min((w for w in fitting if w.of == of), key=lambda w: (w.turn, w.arrival)) for of in tied]
        for (
            first
        ) in firsts:  # of two tenants with equal turns, one may decide about the key, and the other about the item
            for of in tied:
                of_key = [w for w in fitting if w.of == of and w.item.batch_key == first.item.batch_key]
                yield from sorted(of_key, key=lambda w: (w.turn, w.arrival))[:1]

    def take(self, one: Waiting) -> None:
        tenant = self.tenants[one.of]
        if not tenant.had:
            tenant.requests = len({w.item.ticket for w in self.waiting if w.of == one.of})
        self.waiting.remove(one)
        tenant.turn += one.item.cost
        tenant.had += one.item.cost
        if len({w.of[0] for w in self.waiting}) < 2:
            self.before_bulk = 0
        else:
            is_bulk = one.of[0] is Priority.BULK
            self.before_bulk += -one.item.cost * BULK_WAITS_FOR if is_bulk else one.item.cost

    def end_batch(self) -> None:
        for priority in Priority:
            own = {of: tenant for of, tenant in self.tenants.items() if of[0] is priority}
            if cost := sum(tenant.had for tenant in own.values()):
                left = [self.tenants[w.of].turn for w in self.waiting if w.of[0] is priority]
                self.now[priority] = later(self.now[priority], cost, len(own), left)
                self.given += cost
        for of, tenant in list(self.tenants.items()):
            if tenant.had:
                turns = [w.turn for w in self.waiting if w.of == of]
                tenant.now = later(tenant.now, tenant.had, tenant.requests, turns)
                tenant.had = 0
            if not any(w.of == of for w in self.waiting):
                del self.tenants[of]


def later(now: float, cost: float, among: int, turns: list[float]) -> float:
    """Virtual time after a batch: it catches up with the least of those who wait, by what the batch had at most."""
    return max(now + cost / among, min(now + cost, min(turns, default=0.0)))


def check(seed: int) -> str | None:
    """Where the scheduler and the reference part, with what a seed says comes and when; None where they do not."""
    rng = random.Random(f"order {seed}")
    least, most, items_at_most = rng.choice((3, 10)), rng.choice((10, 40)), rng.choice((1, 3, 16))
    builder: BatchBuilder[int] = BatchBuilder(max_items=items_at_most, max_cost=most, least_cost=least, pads=False)
    reference = Reference()
    bulk, tenants = rng.choice((0.0, 0.3, 0.7)), rng.choice((1, 2, 4))
    tickets = [
        Ticket(
            lambda: None,  # type: ignore[arg-type,return-value]
            lambda _: None,
            NoLoad(),
            priority=Priority.BULK if rng.random() < bulk else Priority.INTERACTIVE,
            tenant=rng.randrange(tenants) or None,
        )
        for _ in range(rng.randint(1, 8))
    ]
    keys = rng.choice((1, 1, 2))
    for _ in range(rng.randint(4, 20)):
        for number in range(rng.choice((0, 1, 1, 5))):
            item = Item(rng.choice(tickets), 0, number, 0.0, rng.choice((1, 2, 5, 12)), rng.randrange(keys))
            builder.enter(item)
            reference.add(item)
        for ticket in tickets:
            if not 0 <= (ahead := builder.ahead(ticket)) <= builder.cost:
                return f"{ahead} of {builder.cost} tokens are ahead of a request"
        if rng.random() < 0.7 and (wrong := _compare(builder, reference)) is not None:
            return wrong
    while builder:
        if (wrong := _compare(builder, reference)) is not None:
            return wrong
    return None


def _compare(builder: BatchBuilder[int], reference: Reference) -> str | None:
    waiting_cost, requests = builder.cost, len({one.item.ticket for one in reference.waiting})
    depth = [w for w in reference.waiting if w.of[0] is Priority.INTERACTIVE]
    least = builder._least_cost
    queue = min(waiting_cost, requests * least)
    budget = min(builder.max_cost, max(least, queue // QUEUE_IN_BATCHES))
    has_depth = min(sum(w.item.cost for w in depth), len({w.item.ticket for w in depth}) * least) >= 2 * budget
    if builder.has_depth != has_depth:
        return f"so much waits that a batch may be cut ahead: {builder.has_depth}"
    batch = builder.take(lambda _: True)
    if batch is None:
        return "nothing goes, and something waits" if reference.waiting else None
    if not _follows(reference, list(batch.items)):
        return f"of {len(batch.items)} items that go some have their turn later"
    wrong = _compare_end(batch, reference, budget, builder.max_items)
    reference.end_batch()
    return wrong


def _follows(reference: Reference, left: list[Item[int]], key: object = None) -> bool:
    """Take these items in some order in which they may go; False, and nothing taken, if there is none."""
    if not left:
        return True
    for one in reference.next(key):
        if any(one.item is item for item in left):
            was = (
                list(reference.waiting),
                {of: replace(t) for of, t in reference.tenants.items()},
                reference.before_bulk,
            )
            reference.take(one)
            if _follows(reference, [item for item in left if item is not one.item], one.item.batch_key):
                return True
            reference.waiting, reference.tenants, reference.before_bulk = was
    return False


def _compare_end(batch: Batch[int], reference: Reference, budget: int, most_items: int) -> str | None:
    """Whether the batch ends where it should: the reference has taken what is in it."""
    cost = sum(item.cost for item in batch.items)
    key = batch.items[0].batch_key
    if cost > budget and len(batch.items) > 1:
        return f"a batch of {cost} tokens, and {budget} are to be had"
    following = list(reference.next(key))
    fits = len(batch.items) < most_items and any(cost + one.item.cost <= budget for one in following)
    if fits and not any(cost + one.item.cost > budget for one in following):
        return f"a batch of {cost} tokens for a budget of {budget}, and more could have gone"
    if not following and batch.trigger is not BatchTrigger.DEMAND:
        return f"all have gone, and the batch was cut by its {batch.trigger}"
    return None
