"""The batch stage: it forms batches of all waiting items and runs them on one device."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Generic, Literal, TypeVar

import anyio
from anyio.abc import TaskStatus

from staged_pool.stages.batch_parts import BatchDevice, BatchScheduling, NearbyWork
from staged_pool.stages.batch_results import BatchResults
from staged_pool.stages.channel import Receiver, Sender, WorkerNotifier
from staged_pool.stages.device_slots import DeviceSlots, Execution
from staged_pool.stages.errors import OutOfMemory, StagedPoolError
from staged_pool.stages.isolate import run_isolated
from staged_pool.stages.log import get_logger
from staged_pool.stages.scheduling.batch_delay import BatchDelay
from staged_pool.stages.scheduling.coalescing import Coalescer
from staged_pool.stages.scheduling.entries import Batch, BatchTrigger, Priority
from staged_pool.stages.scheduling.fair_queue import QueuedWork
from staged_pool.stages.scheduling.tuning import CORE_TIMEOUT_S
from staged_pool.stages.stage import Stage, StageOptions
from staged_pool.stages.supervise import Custody, custody
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.ticket_check import should_process

P = TypeVar("P")
R = TypeVar("R")

log = get_logger("staged_pool.stages")


@dataclass(frozen=True, slots=True)
class Hold:
    """The decision to start no batch for now."""

    reason: Literal["busy", "cores", "coming", "empty"]
    """The reason:

    - `busy`: All slots are taken.
    - `cores`: Less than a full batch waits, and no core is free.
    - `coming`: Items that are being prepared are worth a short wait; see `BatchDelay`.
    - `empty`: Nothing waits.
    """
    seconds: float = inf
    """Time after which to decide again even if nothing has changed."""


class BatchStage(Stage, Generic[P, R]):
    """Owns one device and the fair queue in front of it.

    One task moves items from the channel into the queue, which feeding keeps bounded. The other tasks serve the device.
    When a slot is free, a batch is cut out of everything that waits at that moment. Where more than one batch waits,
    the next one is handed over ahead, so that a device thread goes on without an iteration of the event loop.

    A forward that has begun runs to its end. Rows that nobody waits for any more are counted as wasted tokens.

    Args:
        receiver: Lists of items of any requests. Closing its sender ends the stage once the queue is empty.
        sender: Lists of items with their rows. Closed when the stage ends.
        device: The device, and its number of slots.
        scheduling: The queue, the batch limits and the service time.
        nearby: Work outside the stage that decides when a batch starts.
        options: See `StageOptions`.
        name: Name of the stage. A model with two lanes has a stage for each.
    """

    def __init__(
        self,
        receiver: Receiver[Sequence[Item[P]]],
        sender: Sender[Sequence[Item[R]]],
        *,
        device: BatchDevice[P, R],
        scheduling: BatchScheduling[P, R],
        nearby: NearbyWork,
        options: StageOptions,
        name: str = "batch",
    ) -> None:
        super().__init__(name, workers=device.slots, options=options)
        self._receiver = receiver
        self._sender = sender
        self._forward = device.forward
        self._offload = device.offload
        self._slots = DeviceSlots(device.slots, device.ahead, self.meter, self._clock)
        self._tasks = device.slots + device.ahead
        self._former = scheduling.former
        self._queue = scheduling.former.queue
        self._service_time = scheduling.service_time
        self._budget = scheduling.budget
        self._fed_tokens = self._sweep_above = scheduling.fed_tokens
        reuse = scheduling.reuse
        self._coalescer = Coalescer(self._former, coalesce=reuse is not None and reuse.coalesce)
        self._delay = BatchDelay(self._service_time, nearby.ready_s, self._clock)
        self._preparing = nearby.preparing
        self._elsewhere = nearby.elsewhere
        self._core_is_free = nearby.core_is_free
        self._ended = False
        self._work_waits = WorkerNotifier()
        self.results = BatchResults[P, R](self.meter, sender.name, self._former.lane, self._coalescer, reuse)
        """Gives rows to items, and counts tokens."""
        self.triggers: Counter[str] = Counter()
        """Batches by the reason that they were cut for."""
        self.holds: Counter[str] = Counter()
        """Times that a free slot started nothing, by `Hold.reason`."""
        self._hold_s: defaultdict[str, float] = defaultdict(float)
        """Seconds that a free slot started nothing although items waited, by `Hold.reason`."""
        self._held: tuple[str, float] | None = None
        """The present hold: its reason, and the time at which it began."""

    @property
    def waiting(self) -> int:
        """Items in the queue, and those that wait for the row of another."""
        return len(self._queue) + self._coalescer.following

    def waiting_of(self, priority: Priority) -> QueuedWork:
        """Return the amounts that wait in the queue of one priority."""
        return self._queue.waiting_of(priority)

    def save_memory(self, saves: bool) -> None:
        """Keep batches small, or let them grow again."""
        self._former.saves_memory = saves

    @property
    def budget_tokens(self) -> int:
        """Most tokens of a batch at present."""
        return self._former.max_batch_tokens

    @property
    def running(self) -> int:
        """Batches on the device."""
        return self._slots.running

    @property
    def utilization(self) -> float:
        """Mean part of the device's slots that was taken of late, 0 to 1."""
        return self._slots.utilization

    def tickets(self) -> Iterator[Ticket]:
        """Yield the requests with items on the device, once for each item."""
        for execution in self._slots.held:
            if execution.mark is not None:
                yield from (item.ticket for item in execution.items)

    def stall(self) -> str | None:
        """Return the reason if a forward runs far longer than predicted; else None."""
        now, slots = self._clock(), self._slots
        for execution in slots.held:
            limit_s = self._service_time.stall_s(execution.tokens) * slots.slots  # forwards at once share the device
            if (began := execution.forward_at) is not None and now - began > limit_s:
                ran = f"a forward of the {self._former.lane} lane has run for {now - began:.1f} s"
                return f"{ran}, and at most {limit_s:.1f} s were expected"
        return None

    def ahead_s(self, ticket: Ticket) -> float:
        """Return the seconds of device work ahead of the next item of a request."""
        return self._service_time.drain_s(self._queue.ahead(ticket), self._former.max_batch_tokens)

    async def _serve(self, task_status: TaskStatus[None]) -> None:
        await self._work_until_done((self._fill_queue, *[self._work] * self._tasks), task_status)

    def close(self) -> None:
        """See `Stage.close`."""
        self._receiver.close()
        self._sender.close()

    async def _fill_queue(self) -> None:
        async for items in self._receiver:
            with custody(self.meter.name, (item.ticket for item in items)) as held:
                cached_items = self._take_in(items)
                self._sweep()
                self._work_waits.notify()
                if cached_items:
                    await self._hand_on(self._sender, cached_items)
                held.handed_on()
            del items, cached_items  # the next ones may be long in coming
        self._ended = True
        self._work_waits.notify_all()

    def _take_in(self, items: Sequence[Item[P]]) -> list[Item[R]]:
        """Queue items for the device; return those whose rows are cached.

        There is no await between the look at cached rows and the one at rows under way, so no row is computed twice.
        """
        cached_items: list[Item[R]] = []
        now, caches_rows = self._clock(), self.results.caches_rows
        for item in items:
            if caches_rows and (with_row := self.results.take_cached(item, now)) is not None:
                cached_items.append(with_row)
            else:
                self._coalescer.add(item)
        return cached_items

    def _sweep(self) -> None:
        """Drop items of settled tickets if the queue has outgrown its limit.

        This bounds the memory while the device hangs and callers come and leave.
        """
        if self._queue.waiting.tokens > self._sweep_above:
            self._coalescer.sweep(self._should_keep())
            self._sweep_above = max(self._fed_tokens, 2 * self._queue.waiting.tokens)

    async def _work(self) -> None:
        while await self._work_on_next():
            pass

    async def _work_on_next(self) -> bool:
        """Run the next batch; return False if none will come.

        Nothing of it is kept while the worker waits for another: its payloads may lie in memory of another process.
        """
        if (batch := await self._next_batch()) is None:
            return False
        with self._slots.hold(batch.tokens, batch.items) as execution, self._custody(batch) as held:
            results = await self._run(batch, execution)
            if done := self.results.settle(batch, results, execution, held):
                await self._hand_on(self._sender, done)
            held.handed_on()
        return True

    async def _next_batch(self) -> Batch[Item[P]] | None:
        """Wait for the next batch. None: the queue is empty and nothing will come any more."""
        counted = {"busy"}  # no slot is free then, so it is no hold
        while not isinstance(decision := self._decide(), Batch):
            if self._ended and not self._queue:
                return None
            if decision.reason not in counted:
                counted.add(decision.reason)
                self.holds[decision.reason] += 1
            await self._wait(decision.seconds)
        if self._queue:  # another slot may be free
            self._work_waits.notify()
        return decision

    async def _wait(self, seconds: float) -> None:
        """Wait until something has changed, at most for `seconds`."""
        if seconds == inf:
            await self._work_waits.wait()
            return
        with anyio.move_on_after(seconds) as scope:
            await self._work_waits.wait()
        if scope.cancelled_caught:
            self._delay.over()

    def _decide(self) -> Batch[Item[P]] | Hold:
        """Cut the next batch or hold, and count the seconds of such holds."""
        now = 0.0 if self._held is None else self._clock()  # not after the cut, whose items are in nobody's custody
        decision = self._cut()
        reason = decision.reason if isinstance(decision, Hold) and decision.seconds < inf else None
        if self._held is not None and self._held[0] != reason:
            self._hold_s[self._held[0]] += now - self._held[1]
            self._held = None
        if self._held is None and reason is not None:
            self._held = (reason, self._clock())
        return decision

    def hold_seconds(self) -> dict[str, float]:
        """Return the seconds that a free slot started nothing although items waited, by `Hold.reason`."""
        now = {} if self._held is None else {self._held[0]: self._clock() - self._held[1]}
        return {reason: self._hold_s[reason] + now.get(reason, 0.0) for reason in ("cores", "coming")}

    def running_s(self) -> float:
        """Return the seconds for which the oldest forward has run; 0 if none runs."""
        now = self._clock()
        return max((now - at for each in self._slots.held if (at := each.forward_at) is not None), default=0.0)

    def _cut(self) -> Batch[Item[P]] | Hold:
        """Cut the next batch, or decide to hold."""
        if self._slots.free <= 0 and not (self._slots.may_go_ahead and self._former.has_full_batch):
            return Hold("busy")
        waiting = self._queue.waiting
        if 0 < waiting.tokens < self._former.budget and not (self._delay.is_over or self._core_is_free()):
            return Hold("cores", CORE_TIMEOUT_S)  # a call that holds a core adds to the batch when it ends
        if self._slots.free == 1 and (  # with more free slots, the coming items get one of their own
            delay_s := self._delay.delay_s(waiting.items, waiting.tokens, self._preparing())
        ):
            return Hold("coming", delay_s)
        self._delay.started()
        return self._coalescer.take(self._should_keep(), self._slots.tokens) or Hold("empty")

    def _should_keep(self) -> Callable[[Item[P]], bool]:
        now = self._clock()
        return lambda item: should_process(item.ticket, self.meter, now=now)

    @contextmanager
    def _custody(self, batch: Batch[Item[P]]) -> Iterator[Custody]:
        """Hold the items of a batch; after a crash their followers queue up in their place."""
        try:
            with custody(self.meter.name, (item.ticket for item in batch.items)) as held:
                yield held
        except BaseException:
            self._coalescer.requeue_followers(batch.items)
            self._work_waits.notify()
            raise

    async def _run(self, batch: Batch[Item[P]], execution: Execution) -> list[R | StagedPoolError]:
        """Run a batch, or its halves where it fails, and learn from its duration."""
        self.triggers[batch.trigger] += 1
        try:
            results = await run_isolated(
                partial(self._call, execution), [item.payload for item in batch.items], stage=self.meter.name
            )
        finally:
            device_s = self._slots.end(execution, execution.ended_at or self._clock())
            if self._queue:  # the slot is free again
                self._work_waits.notify()
        self.results.count_batch(batch, execution, self._former.max_batch_tokens)
        seconds = execution.ended_at - execution.began_at
        self.meter.service.observe(seconds)
        if execution.forwards == 1:  # the time of several forwards says nothing about one
            self._service_time.observe(batch.tokens, device_s)
            self._budget.observe(batch.tokens, seconds, was_limit=batch.trigger is BatchTrigger.BUDGET)
        elif execution.out_of_memory and not any(isinstance(result, OutOfMemory) for result in results):
            self._budget.out_of_memory(batch.tokens)  # each item fits alone, and all together do not
            log.warning("device.out_of_memory", items=len(batch.items), max_batch_tokens=self._budget.tokens)
        self._former.max_batch_tokens = self._budget.tokens
        return results

    async def _call(self, execution: Execution, payloads: Sequence[P]) -> Sequence[R | StagedPoolError]:
        slots = self._slots
        alone = not (slots.running > 1 or slots.ahead or self._queue or self._preparing() or self._elsewhere())
        return await self._offload(partial(self._run_forward, execution, 1 if alone else slots.slots), payloads)

    def _run_forward(self, execution: Execution, at_once: int, payloads: Sequence[P]) -> Sequence[R | StagedPoolError]:
        """Run one forward in a device thread, and time it there: the event loop may be late."""
        execution.forward_begins(self._clock())
        try:
            return self._forward(payloads, at_once)
        except OutOfMemory:
            execution.out_of_memory = True
            raise
        finally:
            execution.forward_ends(self._clock())
