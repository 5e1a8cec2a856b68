"""The batch former: it cuts batches out of the queue in front of the device.

1. A batch is cut when the device is ready for one, out of everything that waits at that moment.
2. The first item of the fair queue is always in the next batch, so nothing starves.
3. The other items have its batch key, and fit in the item limit and the token budget. An item above the budget goes
   alone.
4. Without padding, items follow in the order of the fair queue. With padding, a batch has the tokens of its longest
   item times its number of items, so items of the same priority and of similar length go together.
5. While other batches run, a batch takes at most its share of all tokens that wait and run. Otherwise the other slots
   would get very small batches. perf/NOTES.md ("Texts") has the gain with 16 clients, and
   `python -m perf throughput` measures it.
6. The budget grows with the queue. With few requests batches are small, so that the next request waits little. With
   many, batches are large, because throughput then decides how long they wait.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import ceil
from typing import Generic, TypeVar

from staged_pool.stages.scheduling.batch_budget import queue_budget
from staged_pool.stages.scheduling.entries import Batch, BatchTrigger, Entry, Priority
from staged_pool.stages.scheduling.fair_queue import FairQueue

E = TypeVar("E", bound=Entry)

KeepEntry = Callable[[E], bool]


class BatchFormer(Generic[E]):
    """Cuts batches out of the fair queue in front of the device.

    Args:
        max_items: Most items of a batch.
        max_batch_tokens: Largest token budget of a batch, padding included.
        min_batch_tokens: Token budget while the queue is short. None: `max_batch_tokens`.
        pads: True if a batch has the tokens of its longest item times its number of items, not their sum.
        slots: Batches that run at once.
        lane: Name of the queue.
    """

    def __init__(
        self,
        *,
        max_items: int,
        max_batch_tokens: int,
        min_batch_tokens: int | None = None,
        pads: bool,
        slots: int = 1,
        lane: Hashable = None,
    ) -> None:
        self.max_items = max_items
        self.max_batch_tokens = max_batch_tokens
        self._min_batch_tokens = (
            max_batch_tokens if min_batch_tokens is None else min(min_batch_tokens, max_batch_tokens)
        )
        self.saves_memory = False
        """Keep batches as small as with a short queue."""
        self._pads = pads
        self._slots = slots
        self.lane = lane
        self.queue = FairQueue[E](lane)

    @property
    def budget(self) -> int:
        """Token budget of the next batch: a fixed part of the tokens that wait."""
        least, waiting = self._min_batch_tokens, self.queue.waiting
        requests = 0 if self.saves_memory else waiting.requests
        return queue_budget(waiting.tokens, requests, least=least, most=self.max_batch_tokens)

    @property
    def has_full_batch(self) -> bool:
        """True if more interactive work waits than fits in a batch: waiting for more would add nothing to it."""
        waiting = self.queue.waiting_of(Priority.INTERACTIVE)
        return min(waiting.tokens, waiting.requests * self._min_batch_tokens) > self.budget

    def take(self, should_keep: KeepEntry[E], running: int = 0) -> Batch[E] | None:
        """Cut the next batch, and drop items that nobody waits for any more.

        Args:
            should_keep: Returns False for an item to drop. Called for each item that is looked at.
            running: Tokens of the batches that run.

        Returns:
            The batch; None if nothing waits.
        """
        batch = None
        if (first := self.queue.first(should_keep)) is not None:
            budget = limit = self.budget
            if running:
                limit = min(budget, ceil((self.queue.waiting.tokens + running) / self._slots))
            chosen, trigger = (self._nearest if self._pads else self._in_queue_order)(first, should_keep, limit)
            if trigger is BatchTrigger.BUDGET and limit < budget:
                trigger = BatchTrigger.SHARE
            chosen.sort(key=lambda item: item.tokens)  # adjacent items of equal length can share a kernel call
            token_counts = [item.tokens for item in chosen]
            batch = Batch(chosen, trigger, max(token_counts) * len(token_counts) if self._pads else sum(token_counts))
        self.queue.end_round()
        return batch

    def _in_queue_order(self, first: E, should_keep: KeepEntry[E], limit: int) -> tuple[list[E], BatchTrigger]:
        queue = self.queue
        chosen, tokens = [first], first.tokens
        queue.take(first)
        while (item := queue.first(should_keep, first)) is not None:
            if len(chosen) == self.max_items:
                return chosen, BatchTrigger.SIZE
            tokens += item.tokens
            if tokens > limit:
                return chosen, BatchTrigger.BUDGET
            chosen.append(item)
            queue.take(item)
        return chosen, BatchTrigger.DEMAND

    def _nearest(self, first: E, should_keep: KeepEntry[E], limit: int) -> tuple[list[E], BatchTrigger]:
        waiting = self.queue.all_of(first.batch_key, first.ticket.priority)
        by_length = sorted(filter(should_keep, waiting), key=lambda item: item.tokens)
        start, end, trigger = self._run_around(by_length, by_length.index(first), limit)
        chosen = by_length[start:end]
        for item in chosen:
            self.queue.take(item)
        return chosen, trigger

    def _run_around(self, by_length: list[E], start: int, limit: int) -> tuple[int, int, BatchTrigger]:
        """Grow a run of items around one, each time on the side that pads less."""
        first, end = start, start + 1
        while end - first < len(by_length):
            count = end - first
            if count == self.max_items:
                return first, end, BatchTrigger.SIZE
            longest = by_length[end - 1].tokens
            padding: dict[str, int] = {}
            if first > 0 and longest * (count + 1) <= limit:
                padding["shorter"] = longest - by_length[first - 1].tokens
            if end < len(by_length) and by_length[end].tokens * (count + 1) <= limit:
                padding["longer"] = (by_length[end].tokens - longest) * count
            if not padding:
                return first, end, BatchTrigger.BUDGET
            if min(padding, key=padding.__getitem__) == "shorter":
                first -= 1
            else:
                end += 1
        return first, end, BatchTrigger.DEMAND
