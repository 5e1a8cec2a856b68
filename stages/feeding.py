"""Feeding: the fair queue in front of preprocess, and the limit on fed tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio

from staged_pool.stages.channel import ENDED, Sender
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.fair_queue import FairQueue
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.wakeup import Wakeup, wakeup

S = TypeVar("S")


@dataclass(slots=True, eq=False)
class _List(Generic[S]):
    """A list of inputs of one request that waits to be fed."""

    ticket: Ticket
    items: Sequence[Item[S]]
    tokens: int
    """An estimate: preprocess has not counted them."""
    woken: Wakeup
    is_fed: bool = False
    waits: bool = True
    """True while it is in the queue."""
    batch_key: Hashable = None


class FeedQueue(Generic[S]):
    """Feeds inputs into the preprocess channel of one lane.

    Lists of inputs go in the order of a fair queue, as soon as the channel has room and `RequestLoad.may_feed` allows
    it. So a single text goes before the next list of each large request.

    Args:
        lane: Name of the lane.
        sender: Sending end of the channel. Closed by `close`.
        chunk_items: Most items of a list.
        clock: Clock of the stages, in seconds.
    """

    def __init__(
        self,
        lane: Hashable,
        sender: Sender[Sequence[Item[S]]],
        *,
        chunk_items: int,
        clock: Callable[[], float],
    ) -> None:
        self._lane = lane
        self._sender = sender
        self.stage = sender.name
        """Name of the preprocess stage."""
        self._chunk_items = chunk_items
        self._clock = clock
        self._queue = FairQueue[_List[S]](("feeding", lane))
        self._for_room: deque[tuple[Ticket, Wakeup]] = deque()
        self._is_granting = False
        sender.on_room(self.grant)

    def waiting_requests(self, priority: Priority) -> int:
        """Count the requests of a priority that wait here."""
        return self._queue.waiting_of(priority).requests

    def feed_nowait(self, ticket: Ticket, inputs: Sequence[tuple[int, S]]) -> Sequence[tuple[int, S]]:
        """Feed lists while they need not wait. Returns the inputs that are left.

        Raises:
            anyio.BrokenResourceError: Preprocess has ended.
        """
        start = 0
        while start < len(inputs) and not self._queue:
            items = self._items(ticket, inputs[start : start + self._chunk_items])
            if not self._may_pass(ticket, items):
                break
            self._send(ticket, items)
            start += len(items)
        return inputs[start:]

    async def feed(self, ticket: Ticket, inputs: Sequence[tuple[int, S]]) -> None:
        """Feed inputs, list by list in fair order.

        Raises:
            anyio.BrokenResourceError: Preprocess has ended.
        """
        for start in range(0, len(inputs), self._chunk_items):
            items = self._items(ticket, inputs[start : start + self._chunk_items])
            waiting = _List(ticket, items, ticket.load.tokens_of(self._lane, len(items)), wakeup())
            self._queue.add(waiting)
            self.grant()
            try:
                await waiting.woken.wait()
            finally:
                if waiting.waits:  # the request is settled: it may not wait here for a lane that hangs
                    self._queue.drop((waiting,))
            if not waiting.is_fed:
                raise anyio.BrokenResourceError

    async def wait_for_room(self, ticket: Ticket) -> None:
        """Wait until one more input of a request may be fed, before it is fetched."""
        while not (ticket.settled or ticket.load.may_feed(self._lane, 1)):
            woken = wakeup()
            self._for_room.append((ticket, woken))
            await woken.wait()

    def grant(self) -> None:
        """Feed waiting lists in fair order while there is room.

        Called when a list comes, and when room is freed.
        """
        if self._is_granting or not (self._queue or self._for_room):
            return
        self._is_granting = True
        try:
            while (first := self._queue.first(_is_wanted)) is not None and self._may_pass(first.ticket, first.items):
                self._take(first)
                self._queue.end_round()
                first.woken.set()
                self._send(first.ticket, first.items)
                first.is_fed = True
            self._queue.end_round()
        except ENDED:
            while (left := self._queue.first(_is_wanted)) is not None:
                self._take(left)
                left.woken.set()
            self._queue.end_round()
        finally:
            self._is_granting = False
        for _ in range(len(self._for_room)):
            ticket, woken = self._for_room.popleft()
            if ticket.settled or ticket.load.may_feed(self._lane, 1):
                woken.set()
            else:
                self._for_room.append((ticket, woken))

    def _take(self, waiting: _List[S]) -> None:
        self._queue.take(waiting)
        waiting.waits = False

    def close(self) -> None:
        """Close the channel: nothing more will come."""
        self._sender.close()

    def _items(self, ticket: Ticket, inputs: Sequence[tuple[int, S]]) -> list[Item[S]]:
        now = self._clock()
        return [Item(ticket, index, given, now) for index, given in inputs]

    def _may_pass(self, ticket: Ticket, items: Sequence[Item[S]]) -> bool:
        return self._sender.has_room(items) and ticket.load.may_feed(self._lane, len(items))

    def _send(self, ticket: Ticket, items: Sequence[Item[S]]) -> None:
        self._sender.send_nowait(items)
        ticket.load.fed(self._lane, len(items))


def _is_wanted(waiting: _List[S]) -> bool:
    waiting.waits = not waiting.ticket.settled  # the queue drops unwanted lists
    return waiting.waits
