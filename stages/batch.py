"""Batch: everything that waits becomes batches for one device, which may run several at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Generic, Literal, Protocol, TypeVar

import anyio
from anyio.abc import TaskStatus

from staged_pool.stages.channel import Receiver, Sender, WorkerNotifier
from staged_pool.stages.device_slots import DeviceSlots, Execution
from staged_pool.stages.errors import OutOfMemory, StagedPoolError
from staged_pool.stages.isolate import run_isolated
from staged_pool.stages.log import get_logger
from staged_pool.stages.meter import Histogram
from staged_pool.stages.offload import Offload
from staged_pool.stages.scheduling.batch_budget import Budget
from staged_pool.stages.scheduling.batch_delay import BatchDelay
from staged_pool.stages.scheduling.batch_former import BatchFormer
from staged_pool.stages.scheduling.coalescing import Coalescer, Sharing
from staged_pool.stages.scheduling.entries import Batch, BatchTrigger, Priority
from staged_pool.stages.scheduling.fair_queue import Waiting
from staged_pool.stages.scheduling.service_time import ServiceTimeModel
from staged_pool.stages.scheduling.tuning import CORE_PATIENCE_S
from staged_pool.stages.stage import Stage, StageOptions
from staged_pool.stages.supervise import Custody, custody
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.ticket_check import cause, should_process

P = TypeVar("P")
R = TypeVar("R")
P_contra = TypeVar("P_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)

log = get_logger("staged_pool.stages")


class Forward(Protocol[P_contra, R_co]):
    """Runs payloads through the model, one result for each. Called on one of the device's threads.

    Args:
        payloads: At least one.
        at_once: How many forwards are to share the device: 1 if this one has it to itself.
    """

    def __call__(self, payloads: Sequence[P_contra], at_once: int, /) -> Sequence[R_co | StagedPoolError]: ...


@dataclass(frozen=True, slots=True)
class Hold:
    """No batch is started for now."""

    reason: Literal["busy", "cores", "coming", "empty"]
    """All slots are taken; less than a full batch waits, and no core is free; more is worth waiting for, see
    `BatchDelay`; nothing waits."""
    seconds: float = inf
    """Longest wait for a notice, in seconds."""


class BatchStage(Stage, Generic[P, R]):
    """Owns one device, and the fair queue in front of it.

    One task moves items from the channel into the queue, which holds no more than feeding lets in. The others serve the
    device: whenever a slot is free, a batch is cut out of everything that waits at that moment. Where more than a batch
    waits, one more is cut and handed to the device ahead, whose thread goes on with it without a word from the event
    loop. A forward that has begun runs to its end; rows that nobody waits for any more are counted.

    Args:
        inlet: Lists of items of any requests. Closing its outlet ends the stage, once the queue is empty.
        outlet: Lists of items with their rows; closed when the stage ends.
        forward: See `Forward`.
        device: Runs it, `slots` calls at once, and then those that wait. `DeviceLost` from it ends the stage.
        former: The queue, and how batches are cut out of it.
        service_time: Told how long the whole device was busy with each batch that took one forward.
        budget: Of the former's batches.
        fed_tokens: Most tokens that are let in, by estimate. Where more wait, items that nobody wants are dropped.
        slots: Forwards at once.
        ahead: Most batches that are handed over before a slot is free.
        preparing: Items that the stage before works on.
        ready_s: Seconds that it takes for that, as measured lately.
        elsewhere: Calls of other lanes that use what forwards compute on.
        core_is_free: Whether one more forward would take a core from none of this lane's calls.
        sharing: What items that are the same work share. None: each is worked on by itself.
        name: Of the stage, where there are several.
    """

    def __init__(
        self,
        inlet: Receiver[Sequence[Item[P]]],
        outlet: Sender[Sequence[Item[R]]],
        *,
        forward: Forward[P, R],
        device: Offload,
        former: BatchFormer[Item[P]],
        service_time: ServiceTimeModel,
        budget: Budget,
        fed_tokens: int,
        options: StageOptions,
        slots: int,
        ahead: int = 1,
        preparing: Callable[[], int],
        ready_s: Callable[[], float],
        elsewhere: Callable[[], int] = lambda: 0,
        core_is_free: Callable[[], bool] = lambda: True,
        sharing: Sharing[P, R] | None = None,
        name: str = "batch",
    ) -> None:
        super().__init__(name, workers=slots, options=options)
        self._inlet = inlet
        self._outlet = outlet
        self._forward = forward
        self._device = device
        self._former = former
        self._queue = former.queue
        self._sharing = sharing
        self._kept = sharing.kept if sharing is not None else None
        self._coalescer = Coalescer(former, coalesce=sharing is not None and sharing.coalesce)
        self._service_time = service_time
        self._budget = budget
        self._fed_tokens = self._sweep_above = fed_tokens
        self._slots = DeviceSlots(slots, ahead, self.meter, self._clock)
        self._tasks = slots + ahead
        self._delay = BatchDelay(service_time, ready_s, self._clock)
        self._preparing = preparing
        self._elsewhere = elsewhere
        self._core_is_free = core_is_free
        self._ended = False
        self._work_waits = WorkerNotifier()
        self.triggers: Counter[str] = Counter()
        self.holds: Counter[str] = Counter()
        """Times that a slot was free and nothing was started, by reason."""
        self.waits = {priority: Histogram() for priority in Priority}
        """Waits for the device, as in the meter, by priority."""
        self.tokens = 0
        self.padding_tokens = 0
        self.wasted_tokens = 0
        self.coalesced = 0
        """Items that were given a row which another one was given too, not counting that one."""
        self.recalled = 0
        """Items that were given a row that was kept."""

    @property
    def waiting(self) -> int:
        """Items in the queue, and those that wait for the row of another."""
        return len(self._queue) + self._coalescer.following

    def waiting_of(self, priority: Priority) -> Waiting:
        """Contents of the queue of one priority."""
        return self._queue.waiting_of(priority)

    def save_memory(self, saves: bool) -> None:
        """Keep batches small, or let them grow again."""
        self._former.saves_memory = saves

    @property
    def budget_tokens(self) -> int:
        """Most tokens of a batch, as things are."""
        return self._former.max_cost

    @property
    def running(self) -> int:
        """Batches on the device."""
        return self._slots.running

    def ahead_s(self, ticket: Ticket) -> float:
        """Seconds that the device needs for what goes before this request's next item."""
        return self._service_time.drain_s(self._queue.ahead(ticket), self._former.max_cost)

    async def _serve(self, task_status: TaskStatus[None]) -> None:
        await self._work_until_done((self._fill_queue, *[self._work] * self._tasks), task_status)

    def close(self) -> None:
        """See `Stage.close`."""
        self._inlet.close()
        self._outlet.close()

    async def _fill_queue(self) -> None:
        async for items in self._inlet:
            with custody(self.meter.name, (item.ticket for item in items)) as held:
                found = self._take_in(items)
                self._sweep()
                self._work_waits.notify()
                if found:
                    await self._outlet.send(found)
                held.handed_on()
        self._ended = True
        self._work_waits.notify_all()

    def _sweep(self) -> None:
        """Bound the memory of items that nobody wants: while the device hangs, callers come and leave."""
        if self._queue.waiting.cost > self._sweep_above:
            self._coalescer.sweep(self._is_wanted())
            self._sweep_above = max(self._fed_tokens, 2 * self._queue.waiting.cost)

    def _take_in(self, items: Sequence[Item[P]]) -> list[Item[R]]:
        """Have items wait for the device, or for the row of another; return those whose rows are kept.

        Nothing happens between a look into what is kept and the one at what is on its way: no row is made twice.
        """
        found: list[Item[R]] = []
        now = self._clock()
        for item in items:
            row = None
            if self._kept is not None and item.identity is not None:
                row = self._kept.get(item.identity, item.payload)
            if row is None:
                self._coalescer.add(item)
            else:
                item.ticket.load.cached(self._former.lane, item.cost)
                self._observe_wait(item, now)
                found.append(self._with_row(item, row, now))
        self.recalled += len(found)
        self.meter.done += len(found)
        return found

    async def _work(self) -> None:
        while (batch := await self._next_batch()) is not None:
            with self._slots.hold(batch.cost) as execution, self._custody(batch) as held:
                results = await self._run(batch, execution)
                if done := self._settle(batch, results, execution, held):
                    await self._outlet.send(done)
                held.handed_on()

    async def _next_batch(self) -> Batch[Item[P]] | None:
        """Wait for the next batch. None: nothing will come any more."""
        held_for = {"busy"}  # that is no reason for a slot to be free
        while not isinstance(next_one := self._cut(), Batch):
            if self._ended and not self._queue:
                return None
            if next_one.reason not in held_for:
                held_for.add(next_one.reason)
                self.holds[next_one.reason] += 1
            await self._wait(next_one.seconds)
        if self._queue:  # another slot may be free
            self._work_waits.notify()
        return next_one

    async def _wait(self, seconds: float) -> None:
        """Wait until something has changed, or for so long."""
        if seconds == inf:
            await self._work_waits.wait()
            return
        with anyio.move_on_after(seconds) as scope:
            await self._work_waits.wait()
        if scope.cancelled_caught:
            self._delay.over()

    def _cut(self) -> Batch[Item[P]] | Hold:
        """The next batch, or why there is none for now."""
        if self._slots.free <= 0 and not (self._slots.may_go_ahead and self._former.has_full_batch):
            return Hold("busy")
        waiting = self._queue.waiting
        if 0 < waiting.cost < self._former.budget and not (self._delay.is_over or self._core_is_free()):
            return Hold("cores", CORE_PATIENCE_S)  # whoever has a core adds to the batch, or ends
        if self._slots.free == 1 and (  # with more, what is coming has a slot of its own
            delay_s := self._delay.delay_s(waiting.items, waiting.cost, self._preparing())
        ):
            return Hold("coming", delay_s)
        self._delay.started()
        return self._coalescer.take(self._is_wanted(), self._slots.tokens) or Hold("empty")

    def _is_wanted(self) -> Callable[[Item[P]], bool]:
        now = self._clock()
        return lambda item: should_process(item.ticket, self.meter, now=now)

    @contextmanager
    def _custody(self, batch: Batch[Item[P]]) -> Iterator[Custody]:
        """Answer for the items of a batch; after a crash those that follow them go in their stead."""
        try:
            with custody(self.meter.name, (item.ticket for item in batch.items)) as held:
                yield held
        except BaseException:
            self._coalescer.lose(batch.items)
            self._work_waits.notify()
            raise

    async def _run(self, batch: Batch[Item[P]], execution: Execution) -> list[R | StagedPoolError]:
        """Run a batch, or its halves where it fails. When that has ended, its time on the device is over."""
        self.triggers[batch.trigger] += 1
        try:
            results = await run_isolated(
                partial(self._call, execution), [item.payload for item in batch.items], stage=self.meter.name
            )
        finally:
            device_s = self._slots.end(execution, execution.ended_at or self._clock())
            if self._queue:  # what waited for this to end may go now
                self._work_waits.notify()
        seconds = execution.ended_at - execution.began_at
        self.meter.service.observe(seconds)
        if execution.forwards == 1:  # what several took together says nothing of one
            self._service_time.observe(batch.cost, device_s)
            self._budget.observe(batch.cost, seconds, was_limit=batch.trigger is BatchTrigger.COST)
        elif execution.out_of_memory and not any(isinstance(result, OutOfMemory) for result in results):
            self._budget.out_of_memory(batch.cost)  # no item is too large by itself: together they are
            log.warning("device.out_of_memory", items=len(batch.items), max_batch_tokens=self._budget.tokens)
        self._former.max_cost = self._budget.tokens
        return results

    async def _call(self, execution: Execution, payloads: Sequence[P]) -> Sequence[R | StagedPoolError]:
        slots = self._slots
        alone = not (slots.running > 1 or slots.ahead or self._queue or self._preparing() or self._elsewhere())
        return await self._device(partial(self._run_forward, execution, 1 if alone else slots.slots), payloads)

    def _run_forward(self, execution: Execution, at_once: int, payloads: Sequence[P]) -> Sequence[R | StagedPoolError]:
        """Run one forward, and take its times: in the thread, for the event loop may be late."""
        execution.forward_begins(self._clock())
        try:
            return self._forward(payloads, at_once)
        except OutOfMemory:
            execution.out_of_memory = True
            raise
        finally:
            execution.ended_at = self._clock()

    def _settle(
        self, batch: Batch[Item[P]], results: Sequence[R | StagedPoolError], execution: Execution, held: Custody
    ) -> list[Item[R]]:
        """Give each item of a batch, and those that follow it, its row or its error; returns those with rows."""
        tokens = sum(item.cost for item in batch.items)
        self.tokens += tokens
        self.padding_tokens += batch.cost - tokens
        done: list[Item[R]] = []
        for item, result in zip(batch.items, results, strict=True):
            self._observe_wait(item, execution.began_at)
            item.ticket.load.computed(self._former.lane, item.cost)
            group = (item, *self._coalescer.land(item))
            if all(one.ticket.settled for one in group):
                self.wasted_tokens += item.cost
            held.take(one.ticket for one in group)
            if isinstance(result, StagedPoolError):
                for one in group:
                    self.meter.dropped[cause(one.ticket) if one.ticket.settled else "failed"] += 1
                    one.ticket.fail_input(one.index, result)
                continue
            self._share(item, result, len(group))
            rows = [self._with_row(one, result, execution.ended_at, execution.began_at) for one in group]
            wanted = [row for row in rows if not row.ticket.settled]
            for row in rows:
                if row.ticket.settled:
                    self.meter.dropped[cause(row.ticket)] += 1
            self.coalesced += max(0, len(wanted) - 1)
            done += wanted
        self.meter.done += len(done)
        return done

    def _with_row(self, item: Item[P], row: R, now: float, began_at: float = inf) -> Item[R]:
        """An item on its way to postprocess. Its time on the device began at `began_at`, or never."""
        ticket, timeline = item.ticket, item.ticket.timeline
        begun = min(now, max(began_at, item.sent_at))  # those that follow may have come while it ran
        timeline.queue_s = max(timeline.queue_s, begun - item.sent_at)
        timeline.device_s = max(timeline.device_s, now - begun)
        ticket.move(1, self.meter.name, self._outlet.name)
        return item.carrying(row, sent_at=now)

    def _observe_wait(self, item: Item[P], until: float) -> None:
        self.meter.wait.observe(until - item.sent_at)
        self.waits[item.ticket.priority].observe(until - item.sent_at)

    def _share(self, item: Item[P], row: R, among: int) -> None:
        if self._kept is not None and item.identity is not None:
            self._kept.keep(item.identity, row)
        if among > 1 and self._sharing is not None:
            self._sharing.freeze(row)
