"""The batch stage of a front: it sends items to the engine process, and gives their rows to postprocess."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import anyio
from anyio.abc import TaskStatus

from staged_pool.runtime.card import Lane
from staged_pool.runtime.payloads import ModelRow
from staged_pool.runtime.remote.arrays import PackedPayload
from staged_pool.stages.batch_parts import NearbyWork
from staged_pool.stages.batch_results import BatchCounts
from staged_pool.stages.channel import Receiver, Sender, WorkerNotifier
from staged_pool.stages.credit import CreditChannel
from staged_pool.stages.errors import StagedPoolError
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.fair_queue import QueuedWork
from staged_pool.stages.stage import Stage, StageOptions
from staged_pool.stages.supervise import custody
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.ticket_check import cause, drop_settled
from staged_pool.stages.wire import Bytes


class Packed(NamedTuple):
    """Payloads of items as plain values, with their arrays."""

    payloads: Sequence[PackedPayload]
    parts: Sequence[Bytes]
    stored: bytes | None
    """Block of the line's store that has the arrays. None: they go with the message."""


class Outgoing(NamedTuple):
    """A list of items on its way to the engine process."""

    items: Sequence[Item[Any]]
    packed: Packed | None
    """None: the items are packed when they are sent."""


class RemoteBatchStage(Stage):
    """Stands in a front where the batch stage stands in one process.

    One task sends items, as soon as the engine process has room for them. The other gives their rows to postprocess, so
    that the reader of the line never waits for a stage.

    Args:
        lane: Name of the lane.
        receiver: Lists of items of any requests. Closing its sender ends the stage once all rows have come.
        sender: Lists of items with their rows. Closed when the stage ends.
        pack: Puts the arrays of a list of items into the store of the line. Returns None if it has no store.
        post: Sends a list of items to the engine process, without waiting; see `CreditChannel`.
        absent: Returns the error of items that come while there is no engine process.
        credits: Lists that may be on their way to the fair queue of the engine process.
        nearby: The preprocess stage, for reports to the engine process.
        stall: Returns the reason if the engine process does not get on; else None.
        options: See `StageOptions`.
        name: Name of the stage.
    """

    def __init__(
        self,
        lane: Lane,
        receiver: Receiver[Sequence[Item[Any]]],
        sender: Sender[Sequence[Item[ModelRow]]],
        *,
        pack: Callable[[Sequence[Item[Any]]], Awaitable[Packed | None]],
        post: Callable[[RemoteBatchStage, Outgoing], object],
        absent: Callable[[], StagedPoolError],
        credits: int,
        nearby: NearbyWork,
        stall: Callable[[], str | None],
        options: StageOptions,
        name: str,
    ) -> None:
        super().__init__(name, workers=1, options=options)
        self.lane = lane
        self._receiver = receiver
        self._sender = sender
        self._absent = absent
        self.nearby = nearby
        self.stall = stall
        self._pack = pack
        self.credit = CreditChannel[Outgoing](name, credits, lambda outgoing: post(self, outgoing))
        self._pending: dict[Ticket, dict[tuple[int, int], Item[Any]]] = {}
        """Items in the engine process, by index of the input and part."""
        self.pending_tokens = 0
        """Tokens of these items."""
        self._rows: list[Item[ModelRow]] = []
        """Items with rows that postprocess has not got yet."""
        self._rows_came = WorkerNotifier()
        self._ended = False
        self.results = BatchCounts()
        """Zero: the engine process counts the work of the device."""
        self.triggers: Counter[str] = Counter()
        self.holds: Counter[str] = Counter()
        self.budget_tokens = 0
        self.running = 0
        self.utilization = 0.0

    @property
    def waiting(self) -> int:
        """Items in the engine process."""
        return sum(map(len, self._pending.values()))

    def waiting_of(self, priority: Priority) -> QueuedWork:
        """Return nothing: the engine process counts what waits for the device."""
        return QueuedWork(0, 0, 0)

    def tickets(self) -> Iterator[Ticket]:
        """Yield the requests with items in the engine process."""
        yield from self._pending

    def hold_seconds(self) -> dict[str, float]:
        """Return nothing: the engine process holds batches."""
        return {}

    def running_s(self) -> float:
        """Return 0: forwards run in the engine process."""
        return 0.0

    def save_memory(self, saves: bool) -> None:
        """Do nothing: batches are made in the engine process."""

    def ahead_s(self, ticket: Ticket) -> float:
        """Return 0: admission has predicted the wait, and the engine process drops items that come too late."""
        return 0.0

    async def _work(self) -> None:
        """Send items while they come."""
        async for items in self._receiver:
            with custody(self.meter.name, (item.ticket for item in items)) as held:
                wanted = drop_settled(items, self.meter, now=self._clock())
                try:
                    await self._hand_on(self.credit.sender, Outgoing(wanted, await self._pack(wanted)))
                except anyio.BrokenResourceError:
                    held.settle(self._absent())
                held.handed_on()
            del items, wanted  # their payloads may be large, and the next ones may be long in coming
        self._ended = True
        self._rows_came.notify_all()

    async def _serve(self, task_status: TaskStatus[None]) -> None:
        await self._work_until_done((self._work, self._give_rows), task_status)

    def close(self) -> None:
        """See `Stage.close`."""
        self._receiver.close()
        self._sender.close()
        self._pending.clear()

    def sent(self, items: Sequence[Item[Any]]) -> None:
        """Keep items until their rows come."""
        for item in items:
            self._pending.setdefault(item.ticket, {})[item.index, item.part] = item
            self.pending_tokens += item.tokens

    def take_row(self, ticket: Ticket, index: int, part: int, row_of: Callable[[Any], ModelRow]) -> Item[Any] | None:
        """Give the row of an item to postprocess.

        Args:
            ticket: The request of the item.
            index: Index of its input.
            part: Its part of the input.
            row_of: Makes the row from the payload of the item.

        Returns:
            The item; None if nobody waits for it.
        """
        items = self._pending.get(ticket)
        if items is None or (item := items.pop((index, part), None)) is None:
            return None
        self.pending_tokens -= item.tokens
        if not items:
            del self._pending[ticket]
        now = self._clock()
        ticket.move(1, self.meter.name, self._sender.name, now=now)
        self._rows.append(item.carrying(row_of(item.payload), sent_at=now))
        self._rows_came.notify()
        return item

    def forget(self, ticket: Ticket) -> None:
        """Drop the items of a request that has ended."""
        for item in self._pending.pop(ticket, {}).values():
            self.pending_tokens -= item.tokens
            self.meter.dropped[cause(ticket)] += 1
        self._rows_came.notify()

    async def _give_rows(self) -> None:
        while True:
            if self._rows:
                rows, self._rows = self._rows, []
                with custody(self.meter.name, (item.ticket for item in rows)) as held:
                    await self._hand_on(self._sender, rows)
                    held.handed_on()
                del rows  # the next ones may be long in coming
            elif self._ended and not self._pending:
                return
            else:
                await self._rows_came.wait()
