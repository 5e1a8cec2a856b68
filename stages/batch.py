"""Batch: everything that waits becomes batches for one device, which may run several at once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Generic, Protocol, TypeVar

import anyio
from anyio.abc import TaskStatus

from staged_pool.stages.budget import Budget
from staged_pool.stages.channel import Bell, Inlet, Outlet
from staged_pool.stages.company import Company
from staged_pool.stages.door import cause, is_wanted
from staged_pool.stages.errors import StagedPoolError, said_again
from staged_pool.stages.forming import BatchBuilder
from staged_pool.stages.isolate import run_isolated
from staged_pool.stages.log import get_logger
from staged_pool.stages.meter import Histogram
from staged_pool.stages.offload import Offload
from staged_pool.stages.pace import Overlap, Pace
from staged_pool.stages.sharing import Flights, Sharing
from staged_pool.stages.stage import Stage, StageOptions
from staged_pool.stages.supervise import Custody, custody
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.turns import Waiting
from staged_pool.stages.work import Batch, BatchTrigger, Item, Priority

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


@dataclass(slots=True, eq=False)
class _Turn:
    """A batch's time on the device."""

    cost: int
    began_at: float = 0.0
    mark: tuple[float, float] | None = None
    """Of `Overlap`, while the forward runs."""
    forwards: int = 0
    """More than one where items had to be told apart, or the device had no room for all."""


class BatchStage(Stage, Generic[P, R]):
    """Owns one device and the waiting room in front of it.

    One task moves items from the channel into the waiting room while there is room, so that backpressure reaches
    preprocess. The others serve the device's slots: whenever one is free, a batch is cut out of everything that waits
    at that moment, and leaves to each other free slot as much as it takes itself. So no slot is free while more waits
    than is worth a forward of its own, and less waits only where it would do nothing but slow down what runs, or for
    what is there in a moment. Where much waits, one batch more, or as many as `ahead` says, is cut ahead and handed to
    the device, so that a slot goes on at once and not when the event loop gets to it. A forward that has begun runs to
    its end; rows that nobody waits for any more are counted.

    Args:
        inlet: Lists of prepared items. Closing its outlet ends the stage, once the waiting room is empty.
        outlet: Lists of items with their rows; closed when the stage ends.
        forward: See `Forward`.
        device: Runs it, `slots` calls at once, and then those that wait. `DeviceLost` from it ends the stage.
        builder: The waiting room.
        pace: Told how long the whole device was busy with each batch that took one forward.
        budget: Of the builder's batches; told how long each of those took, and what the device had no room for.
        slots: Forwards at once.
        ahead: Batches that are cut before a slot is free for them, at most.
        waiting_tokens: With so many tokens waiting, no further list is taken in.
        preparing: How many calls of the stage before run.
        elsewhere: How many calls of other lanes use what forwards compute on.
        gathers: See `Company`.
        cores: See `Company`.
        sharing: What items that are the same work share. None: each is worked on by itself.
        name: Of the stage, where there are several.
    """

    def __init__(
        self,
        inlet: Inlet[Sequence[Item[P]]],
        outlet: Outlet[Sequence[Item[R]]],
        *,
        forward: Forward[P, R],
        device: Offload,
        builder: BatchBuilder[P],
        pace: Pace,
        budget: Budget,
        options: StageOptions,
        slots: int,
        ahead: int = 1,
        waiting_tokens: int,
        preparing: Callable[[], int],
        elsewhere: Callable[[], int] = lambda: 0,
        gathers: bool = True,
        cores: int | None = None,
        sharing: Sharing[P, R] | None = None,
        name: str = "batch",
    ) -> None:
        super().__init__(name, workers=slots, options=options)
        self._inlet = inlet
        self._outlet = outlet
        self._forward = forward
        self._device = device
        self._builder = builder
        self._sharing = sharing
        self._kept = sharing.kept if sharing is not None else None
        self._flights = Flights(builder, coalesce=sharing is not None and sharing.coalesce)
        self._pace = pace
        self._budget = budget
        self._slots = slots
        self._forwards = Overlap()
        self._max_ahead = ahead
        self._ahead: deque[_Turn] = deque()
        """Of the batches that wait for a slot."""
        self._company = Company(
            builder,
            waiting_tokens=waiting_tokens,
            coming=self._coming,
            gathers=gathers,
            cores=cores,
            clock=self._clock,
        )
        self._waiting_tokens = waiting_tokens
        self._preparing = preparing
        self._elsewhere = elsewhere
        self._patience_s = inf
        """How long the slot that has just asked may sleep without being woken, in seconds."""
        self._ended = False
        self._work_waits = Bell()
        self._room_freed = Bell()
        self.triggers: Counter[str] = Counter()
        self.waits = {priority: Histogram() for priority in Priority}
        """As the meter's, by priority."""
        self.running_tokens = 0
        """Of the batches on the device."""
        self.tokens = 0
        self.padding_tokens = 0
        self.wasted_tokens = 0
        self.coalesced = 0
        """Items that were given a row which another one was given too, not counting that one."""
        self.recalled = 0
        """Items that were given a row that was kept."""

    @property
    def waiting(self) -> int:
        """Items in the waiting room, and those that wait for the row of another."""
        return len(self._builder) + self._flights.following

    def waiting_of(self, priority: Priority) -> Waiting:
        """What of a priority is in the waiting room."""
        return self._builder.turns.waiting(priority)

    @property
    def budget_tokens(self) -> int:
        """Of a batch at most, as things are."""
        return self._builder.max_cost

    @property
    def running(self) -> int:
        """Batches on the device."""
        return self._forwards.running

    @property
    def is_busy(self) -> bool:
        """Whether a forward runs in every slot."""
        return self._forwards.running >= self._slots

    def ahead_s(self, ticket: Ticket) -> float:
        """How long the device needs for what goes before this request's next item."""
        return self._pace.drain_s(self._builder.ahead(ticket), self._builder.max_cost)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Work until the inlet ends. Cancelled, it waits for the forwards that run."""
        workers = (self._fill_waiting_room, *[self._serve_slot] * (self._slots + self._max_ahead))
        await self._run(workers, self.close, task_status)

    def close(self) -> None:
        """See `Stage.close`."""
        self._inlet.close()
        self._outlet.close()

    async def _fill_waiting_room(self) -> None:
        async for items in self._inlet:
            with custody(self.meter.name, (item.ticket for item in items)) as held:
                if self._seam is not None:
                    await self._at("received")
                while self._builder.cost >= self._waiting_tokens:
                    await self._room_freed.wait()
                found = self._take_in(items)
                self._work_waits.ring()
                if found:
                    await self._outlet.send(found)
                held.handed_on()
        self._ended = True
        self._work_waits.ring_for_all()

    def _take_in(self, items: Sequence[Item[P]]) -> list[Item[R]]:
        """Have items wait for the device, or for the row of another; return those whose rows are kept.

        Nothing happens between a look into what is kept and the one at what is on its way: no row is made twice.
        """
        found: list[Item[R]] = []
        now = self._clock()
        for item in items:
            item.ticket.stage = self.meter.name
            row = None
            if self._kept is not None and item.identity is not None:
                row = self._kept.get(item.identity, item.payload)
            if row is None:
                self._flights.add(item)
            else:
                item.ticket.load.recalled(self._builder.lane, item.cost)
                self.meter.wait.observe(now - item.sent_at)
                self.waits[item.ticket.priority].observe(now - item.sent_at)
                found.append(item.carrying(row, sent_at=now))
        self.recalled += len(found)
        self.meter.done += len(found)
        return found

    async def _serve_slot(self) -> None:
        while True:
            batch = self._next_batch()
            if batch is not None:
                if self._builder:  # another slot may be free
                    self._work_waits.ring()
                tickets = (item.ticket for item in batch.items)
                with self._turn(batch) as turn, custody(self.meter.name, tickets) as held:
                    if self._seam is not None:
                        await self._at("formed")
                    if done := await self._compute(batch, turn, held):
                        if self._seam is not None:
                            await self._at("computed")
                        await self._outlet.send(done)
                    held.handed_on()
            elif self._ended:
                return
            else:
                await self._wait_for_work()

    async def _wait_for_work(self) -> None:
        if self._patience_s == inf:  # no scope then: it would be made for every wait
            await self._work_waits.wait()
        else:
            with anyio.move_on_after(self._patience_s):
                await self._work_waits.wait()

    def _next_batch(self) -> Batch[P] | None:
        self._patience_s = inf
        free = self._slots - self.meter.busy
        if free <= 0 and (len(self._ahead) >= self._max_ahead or not self._builder.has_depth):
            return None
        if patience_s := self._company.worth_waiting_s(self._forwards.running):
            self._patience_s = patience_s
            return None
        self._company.has_gone()
        batch = self._flights.take(self._wanted_now(), among=free, running=self.running_tokens)
        self._room_freed.ring()
        return batch

    def _coming(self) -> int:
        """Lists that are being prepared, or are on their way here: they will be waiting in a moment."""
        return self._preparing() + self._inlet.waiting

    def _wanted_now(self) -> Callable[[Item[P]], bool]:
        now = self._clock()
        return lambda item: is_wanted(item.ticket, self.meter, now=now)

    @contextmanager
    def _turn(self, batch: Batch[P]) -> Iterator[_Turn]:
        """Take the slot that is free, or else the place ahead, which becomes a slot when the next one is free."""
        turn = _Turn(batch.cost)
        if self.meter.busy >= self._slots:
            self._ahead.append(turn)
        else:
            self.meter.busy += 1
        try:
            yield turn
        except BaseException:
            self._flights.lose(batch.items, self._wanted_now())
            self._work_waits.ring()
            raise
        finally:
            if turn.mark is not None:  # something crashed
                self._end(turn)
            if turn in self._ahead:
                self._ahead.remove(turn)
            else:
                self.meter.busy -= 1
                if self.meter.busy < self._slots:
                    self._promote()

    def _begin(self, turn: _Turn) -> None:
        turn.began_at = self._clock()
        turn.mark = self._forwards.begin(turn.began_at)
        self.running_tokens += turn.cost
        self._company.begin(turn.cost)

    def _end(self, turn: _Turn) -> tuple[float, float]:
        """Count the end of a forward, and the beginning of the one that was ahead: the device has gone on with it.

        Returns:
            The time now, and how many seconds of the whole device the forward took.
        """
        ended = self._clock()
        if turn in self._ahead:  # told of two ends at once, and of this one first
            self._ahead.remove(turn)
            self._take_slot(turn)
        assert turn.mark is not None
        device_s = self._forwards.end(ended, turn.mark)
        turn.mark = None
        self.running_tokens -= turn.cost
        self._company.end(turn.cost)
        self._promote()
        return ended, device_s

    def _promote(self) -> None:
        """Count the first batch that is ahead, if there is one, as one that has a slot."""
        if self._ahead:
            self._take_slot(self._ahead.popleft())

    def _take_slot(self, turn: _Turn) -> None:
        self.meter.busy += 1
        self._begin(turn)

    async def _compute(self, batch: Batch[P], turn: _Turn, held: Custody) -> list[Item[R]]:
        self.triggers[batch.trigger] += 1
        if turn not in self._ahead and turn.mark is None:
            self._begin(turn)
        try:
            results = await run_isolated(
                partial(self._call, turn),
                [item.payload for item in batch.items],
                stage=self.meter.name,
                on_out_of_memory=partial(self._lower_budget, batch),
            )
        finally:
            ended, device_s = self._end(turn)
            if self._builder:  # what waited for this to end may go now
                self._work_waits.ring()
        started = turn.began_at
        self.meter.service.observe(ended - started)
        if turn.forwards == 1:  # what several took together says nothing of one
            self._pace.observe(batch.cost, device_s)
            self._budget.observe(batch.cost, ended - started, was_limit=batch.trigger is BatchTrigger.COST)
        self._builder.max_cost = self._budget.tokens
        for item in batch.items:
            self.meter.wait.observe(started - item.sent_at)
            self.waits[item.ticket.priority].observe(started - item.sent_at)
        tokens = sum(item.cost for item in batch.items)
        self.tokens += tokens
        self.padding_tokens += batch.cost - tokens
        done: list[Item[R]] = []
        for item, result in zip(batch.items, results, strict=True):
            item.ticket.load.computed(self._builder.lane, item.cost)
            alike = (item, *self._flights.land(item))
            if item.ticket.settled and all(one.ticket.settled for one in alike):
                self.wasted_tokens += item.cost
            if len(alike) > 1:
                held.take(one.ticket for one in alike)
            if not isinstance(result, StagedPoolError):
                self._share(item, result, len(alike))
            before = len(done)
            for one in alike:
                ticket = one.ticket
                timeline = ticket.timeline
                begun = max(started, one.sent_at)  # those that follow may have come while it ran
                timeline.queue_s = max(timeline.queue_s, begun - one.sent_at)
                timeline.device_s = max(timeline.device_s, ended - begun)
                if ticket.settled:
                    self.meter.dropped[cause(ticket)] += 1
                elif isinstance(result, StagedPoolError):
                    self.meter.dropped["failed"] += 1
                    ticket.fail_input(one.index, result if one is item else said_again(result))
                else:
                    done.append(one.carrying(result, sent_at=ended))
            self.coalesced += max(0, len(done) - before - 1)
        self.meter.done += len(done)
        return done

    def _share(self, item: Item[P], row: R, among: int) -> None:
        if self._kept is not None and item.identity is not None:
            self._kept.keep(item.identity, row)
        if among > 1 and self._sharing is not None:
            self._sharing.freeze(row)

    async def _call(self, turn: _Turn, payloads: Sequence[P]) -> Sequence[R | StagedPoolError]:
        turn.forwards += 1
        alone = not (self._forwards.running > 1 or self._ahead or self._builder or self._coming() or self._elsewhere())
        return await self._device(partial(self._run_forward, 1 if alone else self._slots), payloads)

    def _run_forward(self, at_once: int, payloads: Sequence[P]) -> Sequence[R | StagedPoolError]:
        return self._forward(payloads, at_once)

    def _lower_budget(self, batch: Batch[P], items: int) -> None:
        """The device had no room for so many items of a batch: plan smaller ones from now on."""
        builder = self._builder
        builder.max_items = max(1, min(builder.max_items, items // 2))
        if items == len(batch.items) > 1:  # of its halves, one that is too large by itself would be all that counts
            self._budget.out_of_memory(batch.cost)
            builder.max_cost = self._budget.tokens
        log.warning(
            "device.out_of_memory",
            items=items,
            max_batch_items=builder.max_items,
            max_batch_tokens=self._budget.tokens,
        )
