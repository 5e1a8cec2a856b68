"""Which of the waiting items go to the device next. Pure: no await, no clock, no torch.

The rules:

1. Nothing is frozen early: a batch is cut when a slot of the device asks for one, out of everything that waits then.
2. Nothing is waited for: whatever waits is a batch, however small.
3. Requests share the device fairly, by tokens: one of a thousand documents and one of a single text get on equally
   quickly. Each item has a turn, as in start-time fair queueing (Goyal, Vin and Cheng, 1996): the virtual time at which
   it came, or that at which its request's items before it would be done, whichever is later. Virtual time passes by the
   tokens of a batch, divided by the requests that wait. A request with a smaller share waits longer for its next item.
4. The item whose turn is first is in the next batch of all, so that nothing starves.
5. The rest of that batch has its batch key and keeps within the item limit and the token budget. An item alone may
   exceed the budget: it would never go otherwise.
6. Without padding, items follow by their turns. With padding a batch costs its longest item times its items, so those
   that are nearest in length to the first go with it.
7. The budget grows with the queue. A few requests get small batches, so that whoever comes next waits little; where so
   many wait that nobody is quick, batches are large and lose less to everything that goes on beside them.
8. Where several slots are free, what waits is shared among them, unless the shares would be too small to be worth it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import Batch, BatchTrigger, Item

P = TypeVar("P")

_QUEUE_IN_BATCHES = 8
"""How many batches a queue is at least: the forward that a newcomer finds running is then a small part of its wait."""


_DEPTH_IN_BATCHES = 2
"""How many batches wait at least where one is cut ahead."""


class _Waiting(NamedTuple, Generic[P]):
    """One item in the waiting room; compares by its turn, and by its arrival where turns are equal."""

    turn: float
    arrival: int
    item: Item[P]


class BatchBuilder(Generic[P]):
    """The waiting room in front of the device.

    Args:
        max_items: Items of a batch at most.
        max_cost: Token budget of a batch at most.
        least_cost: Token budget of a batch where little waits. None: `max_cost`.
        pads: Whether a batch costs its longest item times its items, rather than the sum of its items.
        min_share: Tokens below which a share is not worth a batch of its own.
        lane: Which waiting room this is, where there are several: a request has a turn in each.
    """

    def __init__(
        self,
        *,
        max_items: int,
        max_cost: int,
        least_cost: int | None = None,
        pads: bool,
        min_share: int = 1,
        lane: Hashable = None,
    ) -> None:
        self.max_items = max_items
        self.max_cost = max_cost
        self._least_cost = max_cost if least_cost is None else min(least_cost, max_cost)
        self._pads = pads
        self.min_share = min_share
        self.lane = lane
        self._waiting: dict[Hashable, list[_Waiting[P]]] = {}
        """By batch key; each a heap."""
        self._requests: Counter[Ticket] = Counter()
        """Items that wait, by request."""
        self._withdrawn: set[Item[P]] = set()
        """Items that lie in a heap, and wait no more."""
        self._cost = 0
        self._items = 0
        self._now = 0.0
        """Virtual time, in tokens of one request's share."""
        self._arrivals = count()

    def __len__(self) -> int:
        """Items that wait."""
        return self._items

    @property
    def budget(self) -> int:
        """Tokens of the next batch at most: a fixed part of what waits."""
        return min(self.max_cost, max(self._least_cost, self._queue // _QUEUE_IN_BATCHES))

    @property
    def has_depth(self) -> bool:
        """Whether so much waits that a batch may be cut before a slot is free for it: nobody who comes meanwhile would
        have been in it."""
        return self._queue >= _DEPTH_IN_BATCHES * self.budget

    @property
    def _queue(self) -> int:
        """Tokens that a newcomer finds in front of it. Of each request only so much counts as a small batch has, for
        requests take turns: a single large one makes nobody wait behind large batches."""
        return min(self._cost, len(self._requests) * self._least_cost)

    @property
    def cost(self) -> int:
        """Tokens that wait, padding not counted."""
        return self._cost

    def ahead(self, ticket: Ticket) -> float:
        """Tokens that go before the next item of a request: about what the others get until it has its turn."""
        return min(self._cost, max(0.0, ticket.standing(self.lane).turn - self._now) * len(self._requests))

    def turn(self, ticket: Ticket) -> float:
        """The turn that the next item of a request has if it comes now."""
        return max(self._now, ticket.standing(self.lane).turn)

    def add(self, items: Iterable[Item[P]], turn: float | None = None) -> None:
        """Have items wait.

        Args:
            items: Of any requests.
            turn: What `turn` said of them at some time before. None: they come now.
        """
        came = turn
        for item in items:
            ticket = item.ticket
            standing = ticket.standing(self.lane)
            turn = max(self._now, standing.turn) if came is None else came
            standing.turn = max(standing.turn, turn) + item.cost / ticket.share
            heappush(self._waiting.setdefault(item.batch_key, []), _Waiting(turn, next(self._arrivals), item))
            self._requests[ticket] += 1
            self._items += 1
            self._cost += item.cost

    def withdraw(self, item: Item[P]) -> None:
        """Let go of an item that waits, whenever its turn is. It is not to be added again."""
        item.ticket.standing(self.lane).turn -= item.cost / item.ticket.share
        self._let_go(item)
        self._withdrawn.add(item)

    def take(self, still_wanted: Callable[[Item[P]], bool], *, among: int = 1) -> Batch[P] | None:
        """Cut the next batch, letting go of items that nobody wants any more; None if nothing is left.

        Args:
            still_wanted: Asked of each item that is looked at; one that is not wanted is let go of.
            among: Slots that are free, and so may share what waits.
        """
        if self._withdrawn:
            still_wanted = partial(self._is_wanted, still_wanted)
        self._drop_unwanted_heads(still_wanted)
        if not self._waiting:
            return None
        key = min(self._waiting, key=lambda k: self._waiting[k][0][:2])
        waiting = self._waiting[key]
        requests = len(self._requests)
        parts = max(1, min(among, self._cost // self.min_share))
        budget = self.budget
        limit = min(budget, math.ceil(self._cost / parts)) if parts > 1 else budget
        chosen, trigger = (self._nearest if self._pads else self._in_turn)(waiting, still_wanted, limit)
        if trigger is BatchTrigger.COST and limit < budget:
            trigger = BatchTrigger.SHARE
        if not waiting:
            del self._waiting[key]
        chosen.sort(key=lambda item: item.cost)  # neighbours of equal length can share a call of the kernel
        costs = [item.cost for item in chosen]
        self._now += sum(costs) / requests
        return Batch(chosen, trigger, max(costs) * len(costs) if self._pads else sum(costs))

    def _drop_unwanted_heads(self, still_wanted: Callable[[Item[P]], bool]) -> None:
        for key, waiting in list(self._waiting.items()):
            while waiting and not still_wanted(waiting[0].item):
                self._let_go(heappop(waiting).item)
            if not waiting:
                del self._waiting[key]

    def _is_wanted(self, still_wanted: Callable[[Item[P]], bool], item: Item[P]) -> bool:
        return item not in self._withdrawn and still_wanted(item)

    def _let_go(self, item: Item[P]) -> None:
        if item in self._withdrawn:  # it counts no more
            self._withdrawn.remove(item)
            return
        self._items -= 1
        self._cost -= item.cost
        self._requests[item.ticket] -= 1
        if not self._requests[item.ticket]:
            del self._requests[item.ticket]

    def _in_turn(
        self, waiting: list[_Waiting[P]], still_wanted: Callable[[Item[P]], bool], limit: int
    ) -> tuple[list[Item[P]], BatchTrigger]:
        chosen: list[Item[P]] = []
        cost = 0
        while waiting:
            item = waiting[0].item
            if still_wanted(item):
                if len(chosen) == self.max_items:
                    return chosen, BatchTrigger.SIZE
                if chosen and cost + item.cost > limit:
                    return chosen, BatchTrigger.COST
                chosen.append(item)
                cost += item.cost
            heappop(waiting)
            self._let_go(item)
        return chosen, BatchTrigger.DEMAND

    def _nearest(
        self, waiting: list[_Waiting[P]], still_wanted: Callable[[Item[P]], bool], limit: int
    ) -> tuple[list[Item[P]], BatchTrigger]:
        first_in_turn = waiting[0].item
        by_cost = sorted((w.item for w in waiting if still_wanted(w.item)), key=lambda item: item.cost)
        first, end, trigger = self._run_around(by_cost, by_cost.index(first_in_turn), limit)
        chosen = by_cost[first:end]
        kept = {id(item) for item in by_cost[:first] + by_cost[end:]}
        for waits in waiting:
            if id(waits.item) not in kept:
                self._let_go(waits.item)
        waiting[:] = [waits for waits in waiting if id(waits.item) in kept]
        heapify(waiting)
        return chosen, trigger

    def _run_around(self, by_cost: list[Item[P]], start: int, limit: int) -> tuple[int, int, BatchTrigger]:
        """Grow a run of neighbours in length around an item, always on the side that pads less."""
        first, end = start, start + 1
        while end - first < len(by_cost):
            count = end - first
            if count == self.max_items:
                return first, end, BatchTrigger.SIZE
            longest = by_cost[end - 1].cost
            padding: dict[str, int] = {}
            if first > 0 and longest * (count + 1) <= limit:
                padding["shorter"] = longest - by_cost[first - 1].cost
            if end < len(by_cost) and by_cost[end].cost * (count + 1) <= limit:
                padding["longer"] = (by_cost[end].cost - longest) * count
            if not padding:
                return first, end, BatchTrigger.COST
            if min(padding, key=padding.__getitem__) == "shorter":
                first -= 1
            else:
                end += 1
        return first, end, BatchTrigger.DEMAND
