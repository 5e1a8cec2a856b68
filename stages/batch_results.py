"""Results of batches: each item gets its row or its error, and is counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from math import inf
from typing import Any, Final, Generic, NamedTuple, TypeVar

from staged_pool.stages.device_slots import Execution
from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.meter import RATIO_BOUNDS, Histogram, Sizes, StageMeter
from staged_pool.stages.scheduling.coalescing import Coalescer, RowReuse
from staged_pool.stages.scheduling.entries import Batch, BatchTrigger, Priority
from staged_pool.stages.supervise import Custody
from staged_pool.stages.ticket import Item
from staged_pool.stages.ticket_check import cause
from staged_pool.stages.trace import Trace, TracedBatch

P = TypeVar("P")
R = TypeVar("R")

RECENT_BATCHES: Final = 32
"""Batches of each lane that are kept for the live page: it shows about twenty."""


class BatchRecord(NamedTuple):
    """One batch that has ended."""

    began_at: float
    """Time at which it got its slot, in seconds on the clock of the stages."""
    seconds: float
    """Seconds until the end of its last forward."""
    items: int
    tokens: int
    """Tokens with padding."""
    fill: float
    """Used part of the token budget."""
    trigger: BatchTrigger


class BatchCounts:
    """Counts of the work of a device."""

    def __init__(self) -> None:
        self.waits = {priority: Histogram() for priority in Priority}
        """Waits for the device by priority; `StageMeter.wait` has all of them."""
        self.tokens = 0
        """Tokens of computed items, without padding."""
        self.padding_tokens = 0
        self.wasted_tokens = 0
        """Tokens of computed items whose callers had all left."""
        self.coalesced = 0
        """Items that got the row of another item in flight."""
        self.cached_items = 0
        """Items that got a row of an earlier request."""
        self.batch_items = Sizes()
        """Items of each batch."""
        self.batch_tokens = Sizes()
        """Tokens of each batch, with padding."""
        self.batch_fill = Sizes(RATIO_BOUNDS)
        """Used part of the token budget, for each batch. One item may be larger than the budget."""
        self.recent: deque[BatchRecord] = deque(maxlen=RECENT_BATCHES)
        """The newest batches that have ended, oldest first."""

    def count_batch(self, batch: Batch[Any], execution: Execution, budget_tokens: int) -> None:
        """Count a batch that has ended.

        Args:
            batch: The batch.
            execution: Its time on the device.
            budget_tokens: Token budget by which it was cut.
        """
        fill = batch.tokens / budget_tokens
        self.batch_items.observe(len(batch.items))
        self.batch_tokens.observe(batch.tokens)
        self.batch_fill.observe(fill)
        seconds = execution.ended_at - execution.began_at
        self.recent.append(
            BatchRecord(execution.began_at, seconds, len(batch.items), batch.tokens, fill, batch.trigger)
        )


class BatchResults(BatchCounts, Generic[P, R]):
    """Gives new and cached rows to items, and counts the work of the device.

    Args:
        meter: Of the batch stage.
        to: Name of the stage behind it.
        lane: Name of the lane, for the accounts of requests.
        coalescer: Knows which items share the row of another.
        reuse: See `BatchScheduling.reuse`.
    """

    def __init__(
        self,
        meter: StageMeter,
        to: str,
        lane: Hashable,
        coalescer: Coalescer[Item[P]],
        reuse: RowReuse[P, R] | None,
    ) -> None:
        super().__init__()
        self._meter = meter
        self._to = to
        self._lane = lane
        self._coalescer = coalescer
        self._reuse = reuse
        self._cached = reuse.cached if reuse is not None else None

    @property
    def caches_rows(self) -> bool:
        """True if rows of earlier requests are cached."""
        return self._cached is not None

    def take_cached(self, item: Item[P], now: float) -> Item[R] | None:
        """Return the item with its cached row; None if there is none."""
        if self._cached is None or item.identity is None:
            return None
        if (row := self._cached.get(item.identity, item.payload)) is None:
            return None
        item.ticket.load.cached(self._lane, item.tokens)
        self._observe_wait(item, now)
        self.cached_items += 1
        self._meter.done += 1
        return self._with_row(item, row, now)

    def settle(
        self, batch: Batch[Item[P]], results: Sequence[R | StagedPoolError], execution: Execution, held: Custody
    ) -> list[Item[R]]:
        """Give each item of a batch, and its followers, its row or its error.

        Returns:
            The items with a row that somebody still waits for.
        """
        tokens = sum(item.tokens for item in batch.items)
        self.tokens += tokens
        self.padding_tokens += batch.tokens - tokens
        done: list[Item[R]] = []
        traces: dict[Trace, None] = {}
        for item, result in zip(batch.items, results, strict=True):
            self._observe_wait(item, execution.began_at)
            item.ticket.load.computed(self._lane, item.tokens)
            group = (item, *self._coalescer.end_group(item))
            if all(member.ticket.settled for member in group):
                self.wasted_tokens += item.tokens
            held.take(member.ticket for member in group)
            for member in group:
                if (trace := member.ticket.timeline.trace) is not None:
                    traces[trace] = None
            if isinstance(result, StagedPoolError):
                self._fail(group, result)
                continue
            self._share(item, result, len(group))
            rows = [self._with_row(member, result, execution.ended_at, execution.began_at) for member in group]
            wanted = [row for row in rows if not row.ticket.settled]
            for row in rows:
                if row.ticket.settled:
                    self._meter.dropped[cause(row.ticket)] += 1
            self.coalesced += max(0, len(wanted) - 1)
            done += wanted
        self._meter.done += len(done)
        if traces:
            self._tell(batch, execution, [*traces])
        return done

    def _fail(self, group: Sequence[Item[P]], error: StagedPoolError) -> None:
        for member in group:
            self._meter.dropped[cause(member.ticket) if member.ticket.settled else "failed"] += 1
            member.ticket.fail_input(member.index, error)

    def _with_row(self, item: Item[P], row: R, now: float, began_at: float = inf) -> Item[R]:
        """Return an item on its way to postprocess. `began_at` infinite: it was not on the device."""
        ticket, timeline = item.ticket, item.ticket.timeline
        begun = min(now, max(began_at, item.sent_at))  # a follower may have come while its leader ran
        timeline.queue_s = max(timeline.queue_s, begun - item.sent_at)
        timeline.device_s = max(timeline.device_s, now - begun)
        if (trace := timeline.trace) is not None:
            trace.passed("queue", item.sent_at, begun)
            if began_at != inf:
                trace.passed("device", begun, now)
        ticket.move(1, self._meter.name, self._to, now=now)
        return item.carrying(row, sent_at=now)

    def _tell(self, batch: Batch[Item[P]], execution: Execution, traces: Sequence[Trace]) -> None:
        """Tell each tracer once of a batch with requests that it follows."""
        told = TracedBatch(
            str(self._lane),
            execution.began_at,
            execution.ended_at,
            len(batch.items),
            batch.tokens,
            str(batch.trigger),
            traces,
        )
        for on_batch in dict.fromkeys(trace.on_batch for trace in traces):
            on_batch(told)

    def _observe_wait(self, item: Item[P], until: float) -> None:
        self._meter.wait.observe(until - item.sent_at)
        self.waits[item.ticket.priority].observe(until - item.sent_at)

    def _share(self, item: Item[P], row: R, among: int) -> None:
        """Cache a row for later requests, and freeze one that several items get."""
        if self._cached is not None and item.identity is not None:
            self._cached.keep(item.identity, row)
        if among > 1 and self._reuse is not None:
            self._reuse.freeze(row)
