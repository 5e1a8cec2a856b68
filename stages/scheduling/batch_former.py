"""The batch former: which of the waiting items go to the device together.

1. A batch is cut when the device asks for one, out of everything that waits then; nothing is frozen earlier.
2. The item whose turn it is in the fair queue is in the next batch, whatever else is, so that nothing starves.
3. The rest has its batch key and keeps within the item limit and the token budget. An item alone may exceed the budget:
   it would never go otherwise.
4. Without padding, items follow in the order of the fair queue. With padding a batch costs its longest item times its
   items, so the items of the same priority that are nearest in length go with the first one.
5. Beside batches that run a batch has no more than its part of all that waits and runs. Else the other slots would go
   on with the few items that are left, again and again, for as long as it takes.
6. The budget grows with the queue. A few requests get small batches, so that whoever comes next waits little; where so
   many wait that nobody is quick, batches are large and lose less to everything that goes on beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import ceil
from typing import Generic, TypeVar

from staged_pool.stages.scheduling.entries import Batch, BatchTrigger, Entry, Priority
from staged_pool.stages.scheduling.fair_queue import FairQueue, Waiting
from staged_pool.stages.scheduling.tuning import QUEUE_IN_BATCHES

E = TypeVar("E", bound=Entry)

StillWanted = Callable[[E], bool]


class BatchFormer(Generic[E]):
    """Cuts batches out of the fair queue in front of the device.

    Args:
        max_items: Most items of a batch.
        max_cost: Token budget of a batch.
        least_cost: Token budget of a batch where little waits. None: `max_cost`.
        pads: A batch costs its longest item times its items, rather than the sum of its items.
        slots: Batches that run at once.
        lane: Name of the queue, where there are several.
    """

    def __init__(
        self,
        *,
        max_items: int,
        max_cost: int,
        least_cost: int | None = None,
        pads: bool,
        slots: int = 1,
        lane: Hashable = None,
    ) -> None:
        self.max_items = max_items
        self.max_cost = max_cost
        self._least_cost = max_cost if least_cost is None else min(least_cost, max_cost)
        self.saves_memory = False
        """Batches stay as small as where little waits."""
        self._pads = pads
        self._slots = slots
        self.lane = lane
        self.queue = FairQueue[E](lane)

    @property
    def budget(self) -> int:
        """Most tokens of the next batch: a fixed part of what waits."""
        wanted = 0 if self.saves_memory else self._queued(self.queue.waiting) // QUEUE_IN_BATCHES
        return min(self.max_cost, max(self._least_cost, wanted))

    @property
    def has_full_batch(self) -> bool:
        """More interactive work waits than goes into a batch: a batch that is cut now lacks nobody who comes later."""
        return self._queued(self.queue.waiting_of(Priority.INTERACTIVE)) > self.budget

    def _queued(self, waiting: Waiting) -> int:
        """Tokens that a newcomer finds in front of it.

        Of each request only so many count as a small batch has. Requests take turns, so a single large one makes nobody
        wait behind large batches.
        """
        return min(waiting.cost, waiting.requests * self._least_cost)

    def take(self, still_wanted: StillWanted[E], running: int = 0) -> Batch[E] | None:
        """Cut the next batch, letting go of items that nobody wants any more; None if nothing is left.

        Args:
            still_wanted: Asked of each item that is looked at; one that is not wanted is let go of.
            running: Tokens of the batches that run.
        """
        batch = None
        if (first := self.queue.first(still_wanted)) is not None:
            budget = limit = self.budget
            if running:
                limit = min(budget, ceil((self.queue.waiting.cost + running) / self._slots))
            chosen, trigger = (self._nearest if self._pads else self._in_turn)(first, still_wanted, limit)
            if trigger is BatchTrigger.COST and limit < budget:
                trigger = BatchTrigger.SHARE
            chosen.sort(key=lambda item: item.cost)  # neighbours of equal length can share a call of the kernel
            costs = [item.cost for item in chosen]
            batch = Batch(chosen, trigger, max(costs) * len(costs) if self._pads else sum(costs))
        self.queue.end_round()
        return batch

    def _in_turn(self, first: E, still_wanted: StillWanted[E], limit: int) -> tuple[list[E], BatchTrigger]:
        queue = self.queue
        chosen, cost = [first], first.cost
        queue.take(first)
        while (item := queue.first(still_wanted, first)) is not None:
            if len(chosen) == self.max_items:
                return chosen, BatchTrigger.SIZE
            cost += item.cost
            if cost > limit:
                return chosen, BatchTrigger.COST
            chosen.append(item)
            queue.take(item)
        return chosen, BatchTrigger.DEMAND

    def _nearest(self, first: E, still_wanted: StillWanted[E], limit: int) -> tuple[list[E], BatchTrigger]:
        waiting = self.queue.all_of(first.batch_key, first.ticket.priority)
        by_cost = sorted(filter(still_wanted, waiting), key=lambda item: item.cost)
        start, end, trigger = self._run_around(by_cost, by_cost.index(first), limit)
        chosen = by_cost[start:end]
        for item in chosen:
            self.queue.take(item)
        return chosen, trigger

    def _run_around(self, by_cost: list[E], start: int, limit: int) -> tuple[int, int, BatchTrigger]:
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
