"""Which of the waiting items go to the device next. Pure: no await, no clock, no torch.

The rules:

1. Nothing is frozen early: a batch is cut when a slot of the device asks for one, out of everything that waits then.
2. Nothing is waited for: whatever waits is a batch, however small. Whether a slot asks is for `batch.py` to say.
3. Whose item goes next is for `turns.py` and `tenants.py` to say: interactive work before bulk, tenants share the
   device fairly, and the requests of a tenant what the tenant gets. So one of a thousand documents and one of a single
   text get on equally quickly.
4. The item whose turn is first is in the next batch of all, whatever else is, so that nothing starves.
5. The rest of that batch has its batch key and keeps within the item limit and the token budget. An item alone may
   exceed the budget: it would never go otherwise.
6. Without padding, items follow by their turns, and bulk work fills a batch that interactive work leaves room in. With
   padding a batch costs its longest item times its items, so those of the first one's priority that are nearest to it
   in length go with it.
7. The budget grows with the queue. A few requests get small batches, so that whoever comes next waits little; where so
   many wait that nobody is quick, batches are large and lose less to everything that goes on beside them.
8. Where several slots are free, what waits is shared among them, unless the shares would be too small to be worth it.
9. Beside small batches one has its part of all that waits and runs, and no more. Who waits for an answer sends nothing:
   if one slot took all that waits, the others would go on with the few that are left, again and again, for as long as
   it runs. What is left waits for the slot that is free next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from staged_pool.stages.ticket import Ticket
from staged_pool.stages.turns import Turns
from staged_pool.stages.work import Batch, BatchTrigger, Item, Priority

P = TypeVar("P")

_QUEUE_IN_BATCHES = 8
"""How many batches a queue is at least: the forward that a newcomer finds running is then a small part of its wait."""


_LEAST_PART = 1 / 3
"""What a slot need not leave to the others, in parts of `min_share`. 4 short texts take 1.2 times as much each as 16 do
and 1 takes twice as much; with pictures it is much the same (two cores of a Xeon)."""

_MOST_PART = 2
"""Of `min_share`: where a slot's part would be more, nobody is left with few. In turns, on two cores of a Xeon, with
parts 16 clients of a short text have 5 % more answers, half of them a sixth sooner, and 8 of a picture 3 to 5 % more;
64 of a short text had 4 % fewer."""

_DEPTH_IN_BATCHES = 2
"""How many batches wait at least where one is cut ahead."""


class BatchBuilder(Generic[P]):
    """The waiting room in front of the device.

    Args:
        max_items: Items of a batch at most.
        max_cost: Token budget of a batch at most.
        least_cost: Token budget of a batch where little waits. None: `max_cost`.
        pads: Whether a batch costs its longest item times its items, rather than the sum of its items.
        min_share: Tokens below which a share is not worth a batch of its own.
        slots: Batches that run at once.
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
        slots: int = 1,
        lane: Hashable = None,
    ) -> None:
        self.max_items = max_items
        self.max_cost = max_cost
        self._least_cost = max_cost if least_cost is None else min(least_cost, max_cost)
        self._pads = pads
        self.min_share = min_share
        self._slots = slots
        self.lane = lane
        self.turns = Turns[P](lane)

    def __len__(self) -> int:
        """Items that wait."""
        return self.turns.items

    @property
    def budget(self) -> int:
        """Tokens of the next batch at most: a fixed part of what waits."""
        queue = self._queue(self.turns.cost, self.turns.requests)
        return min(self.max_cost, max(self._least_cost, queue // _QUEUE_IN_BATCHES))

    @property
    def has_depth(self) -> bool:
        """Whether so much waits that a batch may be cut before a slot is free for it: nobody who comes meanwhile would
        have been in it. Before bulk work somebody would, so that it does not count."""
        interactive = self.turns.waiting(Priority.INTERACTIVE)
        queue = self._queue(interactive.cost, interactive.requests)
        return queue >= _DEPTH_IN_BATCHES * self.budget

    def _queue(self, cost: int, requests: int) -> int:
        """Tokens that a newcomer finds in front of it. Of each request only so much counts as a small batch has, for
        requests take turns: a single large one makes nobody wait behind large batches."""
        return min(cost, requests * self._least_cost)

    @property
    def cost(self) -> int:
        """Tokens that wait, padding not counted."""
        return self.turns.cost

    def ahead(self, ticket: Ticket) -> float:
        """See `Turns.ahead`."""
        return self.turns.ahead(ticket)

    def turn(self, ticket: Ticket) -> float:
        """The turn that the next item of a request has among its tenant's if it comes now."""
        return self.turns.turn(ticket)

    def enter(self, item: Item[P], turn: float | None = None) -> float:
        """Have an item wait.

        Args:
            item: Of any request.
            turn: What `turn` or this said of it at some time before. None: it comes now.

        Returns:
            Its turn.
        """
        return self.turns.add(item, turn)

    def withdraw(self, item: Item[P]) -> None:
        """Let go of an item that waits, whenever its turn is. It is not to be added again."""
        self.turns.withdraw(item)

    def take(self, still_wanted: Callable[[Item[P]], bool], *, among: int = 1, running: int = 0) -> Batch[P] | None:
        """Cut the next batch, letting go of items that nobody wants any more; None if nothing is left.

        Args:
            still_wanted: Asked of each item that is looked at; one that is not wanted is let go of.
            among: Slots that are free, and so may share what waits.
            running: Tokens of the batches in the others.
        """
        first = self.turns.first(still_wanted)
        if first is None:
            self.turns.end_batch()
            return None
        key, item = first
        budget = self.budget
        limit = int(min(budget, self._part(among, running)))
        if self._pads:
            chosen, trigger = self._nearest(key, item, still_wanted, limit)
        else:
            chosen, trigger = self._in_turn(key, item, still_wanted, limit)
        self.turns.end_batch()
        if trigger is BatchTrigger.COST and limit < budget:
            trigger = BatchTrigger.SHARE
        chosen.sort(key=lambda item: item.cost)  # neighbours of equal length can share a call of the kernel
        costs = [item.cost for item in chosen]
        return Batch(chosen, trigger, max(costs) * len(costs) if self._pads else sum(costs))

    def _part(self, among: int, running: int) -> float:
        """Tokens of what waits that one slot takes at most; infinite where it leaves nothing to another."""
        waiting, part = self.cost, math.inf
        if (shares := min(among, waiting // self.min_share)) > 1:
            part = math.ceil(waiting / shares)
        if running:
            fair = math.ceil((waiting + running) / self._slots)
            if fair <= _MOST_PART * self.min_share:
                part = min(part, max(fair, int(_LEAST_PART * self.min_share)))
        return part

    def _in_turn(
        self, key: Hashable, first: Item[P], still_wanted: Callable[[Item[P]], bool], limit: int
    ) -> tuple[list[Item[P]], BatchTrigger]:
        turns = self.turns
        chosen, cost = [first], first.cost
        turns.take(key, first)
        while (item := turns.offer(key, still_wanted)) is not None:
            if len(chosen) == self.max_items:
                return chosen, BatchTrigger.SIZE
            cost += item.cost
            if cost > limit:
                return chosen, BatchTrigger.COST
            chosen.append(item)
            turns.take(key, item)
        return chosen, BatchTrigger.DEMAND

    def _nearest(
        self, key: Hashable, first_in_turn: Item[P], still_wanted: Callable[[Item[P]], bool], limit: int
    ) -> tuple[list[Item[P]], BatchTrigger]:
        by_cost = sorted(self.turns.candidates(key, still_wanted), key=lambda item: item.cost)
        first, end, trigger = self._run_around(by_cost, by_cost.index(first_in_turn), limit)
        chosen = by_cost[first:end]
        self.turns.take_of(key, by_cost, chosen)
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
