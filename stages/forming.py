"""Which of the waiting items go to the device next. Pure: no await, no clock, no torch.

The rules:

1. Nothing is frozen early: a batch is cut when a slot of the device asks for one, out of everything that waits then.
2. Nothing is waited for: whatever waits is a batch, however small.
3. The oldest item is in the next batch of all, so that nothing starves.
4. The rest of that batch has the oldest item's batch key and keeps within the item limit and the token budget. The
   oldest item alone may exceed the budget: it would never go otherwise.
5. Without padding, items follow in order of arrival. With padding a batch costs its longest item times its items, so
   those that are nearest in length to the oldest go with it.
6. Where several slots are free, what waits is shared among them, unless the shares would be too small to be worth it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from staged_pool.stages.work import Batch, BatchTrigger, Item

P = TypeVar("P")


class BatchBuilder(Generic[P]):
    """The waiting room in front of the device.

    Args:
        max_items: Items of a batch at most.
        max_cost: Token budget of a batch.
        pads: Whether a batch costs its longest item times its items, rather than the sum of its items.
        min_share: Tokens below which a share is not worth a batch of its own.
    """

    def __init__(self, *, max_items: int, max_cost: int, pads: bool, min_share: int = 1) -> None:
        self.max_items = max_items
        self.max_cost = max_cost
        self._pads = pads
        self._min_share = min_share
        self._waiting: dict[Hashable, deque[Item[P]]] = {}
        self._cost = 0
        self._items = 0

    def __len__(self) -> int:
        """Items that wait."""
        return self._items

    @property
    def cost(self) -> int:
        """Tokens that wait, padding not counted."""
        return self._cost

    def add(self, items: Iterable[Item[P]]) -> None:
        for item in items:
            self._waiting.setdefault(item.batch_key, deque()).append(item)
            self._items += 1
            self._cost += item.cost

    def take(self, still_wanted: Callable[[Item[P]], bool], *, among: int = 1) -> Batch[P] | None:
        """Cut the next batch, letting go of items that nobody wants any more; None if nothing is left.

        Args:
            still_wanted: Asked of each item that is looked at; one that is not wanted is let go of.
            among: Slots that are free, and so may share what waits.
        """
        self._drop_unwanted_heads(still_wanted)
        if not self._waiting:
            return None
        key = min(self._waiting, key=lambda k: self._waiting[k][0].sent_at)
        waiting = self._waiting[key]
        parts = max(1, min(among, self._cost // self._min_share))
        limit = min(self.max_cost, math.ceil(self._cost / parts)) if parts > 1 else self.max_cost
        chosen, trigger = (self._nearest if self._pads else self._in_order)(waiting, still_wanted, limit)
        if trigger is BatchTrigger.COST and limit < self.max_cost:
            trigger = BatchTrigger.SHARE
        if not waiting:
            del self._waiting[key]
        chosen.sort(key=lambda item: item.cost)  # neighbours of equal length can share a call of the kernel
        costs = [item.cost for item in chosen]
        return Batch(chosen, trigger, max(costs) * len(costs) if self._pads else sum(costs))

    def _drop_unwanted_heads(self, still_wanted: Callable[[Item[P]], bool]) -> None:
        for key, waiting in list(self._waiting.items()):
            while waiting and not still_wanted(waiting[0]):
                self._let_go(waiting.popleft())
            if not waiting:
                del self._waiting[key]

    def _let_go(self, item: Item[P]) -> None:
        self._items -= 1
        self._cost -= item.cost

    def _in_order(
        self, waiting: deque[Item[P]], still_wanted: Callable[[Item[P]], bool], limit: int
    ) -> tuple[list[Item[P]], BatchTrigger]:
        chosen: list[Item[P]] = []
        cost = 0
        while waiting:
            item = waiting[0]
            if still_wanted(item):
                if len(chosen) == self.max_items:
                    return chosen, BatchTrigger.SIZE
                if chosen and cost + item.cost > limit:
                    return chosen, BatchTrigger.COST
                chosen.append(item)
                cost += item.cost
            waiting.popleft()
            self._let_go(item)
        return chosen, BatchTrigger.DEMAND

    def _nearest(
        self, waiting: deque[Item[P]], still_wanted: Callable[[Item[P]], bool], limit: int
    ) -> tuple[list[Item[P]], BatchTrigger]:
        oldest = waiting[0]
        by_cost = sorted((item for item in waiting if still_wanted(item)), key=lambda item: item.cost)
        first, end, trigger = self._run_around(by_cost, by_cost.index(oldest), limit)
        chosen = by_cost[first:end]
        kept = {id(item) for item in by_cost[:first] + by_cost[end:]}
        for item in waiting:
            if id(item) not in kept:
                self._let_go(item)
        left = [item for item in waiting if id(item) in kept]
        waiting.clear()
        waiting.extend(left)
        return chosen, trigger

    def _run_around(self, by_cost: list[Item[P]], oldest: int, limit: int) -> tuple[int, int, BatchTrigger]:
        """Grow a run of neighbours in length around the oldest item, always on the side that pads less."""
        first, end = oldest, oldest + 1
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
