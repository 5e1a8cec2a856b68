"""Preprocess: CPU work on inputs, in threads under a capacity limiter."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Generic, TypeVar

from staged_pool.stages.channel import Receiver, Sender
from staged_pool.stages.errors import Abandoned, StagedPoolError
from staged_pool.stages.isolate import run_isolated
from staged_pool.stages.offload import Offload
from staged_pool.stages.scheduling.service_time import DeviceShare, ServiceTimeModel
from staged_pool.stages.scheduling.tuning import LEARNING_WEIGHT
from staged_pool.stages.stage import Stage, StageOptions
from staged_pool.stages.supervise import custody
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.ticket_check import cause, drop_settled
from staged_pool.stages.work import Prepared

S = TypeVar("S")
P = TypeVar("P")

Preprocess = Callable[[Sequence[S]], Sequence[Prepared[P] | tuple[Prepared[P], ...] | StagedPoolError]]
"""Turns inputs into payloads, one result for each: several payloads for one that it cuts into parts. Runs in a thread,
several at once."""


class PreprocessStage(Stage, Generic[S, P]):
    """Prepares lists of inputs, one list a worker and a thread.

    A worker takes what already waits, up to a list's length, and never waits for more: under load many single inputs
    share one call, without load none is held back.

    Args:
        inlet: Lists of items of one request each. Closing its outlet ends the stage.
        outlet: Lists of prepared items, possibly of several requests or none: who waits for them learns that these do
            not come. Closed when the stage ends.
        preprocess: See `Preprocess`.
        offload: Runs it; its limit is the stage's limit.
        ahead_s: How long what this stage makes of a request will wait for the device; an item that could not be in
            time is not begun.
        service_time: Told how long the whole stage was busy with the inputs of each call. None: nobody asks.
        chunk_items: A worker that holds this many takes no more.
        workers: Calls at once.
        lane: Which inputs it prepares, where there are several stages of them.
        name: Of the stage, likewise.
    """

    def __init__(
        self,
        inlet: Receiver[Sequence[Item[S]]],
        outlet: Sender[Sequence[Item[P]]],
        *,
        preprocess: Preprocess[S, P],
        offload: Offload,
        ahead_s: Callable[[Ticket], float] | None = None,
        service_time: ServiceTimeModel | None,
        options: StageOptions,
        chunk_items: int,
        workers: int,
        lane: Hashable = None,
        name: str = "preprocess",
    ) -> None:
        super().__init__(name, workers=workers, options=options)
        self._inlet = inlet
        self._outlet = outlet
        self._preprocess = preprocess
        self._offload = offload
        self._ahead_s = ahead_s
        self._service_time = service_time
        self._calls = DeviceShare()
        self._chunk_items = chunk_items
        self._lane = lane
        self._called_at: dict[object, float] = {}
        self.preparing = 0
        """Items in calls that run."""
        self.call_s = 0.0
        """Mean duration of recent calls, in seconds."""

    def close(self) -> None:
        """See `Stage.close`."""
        self._inlet.close()
        self._outlet.close()

    async def _work(self) -> None:
        async for first in self._inlet:
            with self.meter.working(), custody(self.meter.name, (item.ticket for item in first)) as held:
                items = list(first)
                while len(items) < self._chunk_items and (more := self._inlet.receive_waiting()) is not None:
                    held.take(item.ticket for item in more)
                    items += more
                ready = await self._prepare(items)
                await self._outlet.send(ready)
                held.handed_on()

    async def _prepare(self, items: Sequence[Item[S]]) -> list[Item[P]]:
        started = self._clock()
        items = drop_settled(items, self.meter, now=started, needs_s=self._ahead_s)
        if not items:
            return []
        call = partial(self._call, [item.ticket for item in items])
        results = await run_isolated(call, [item.payload for item in items], stage=self.meter.name)
        ended = self._clock()
        self.meter.service.observe(ended - started, len(items))
        ready: list[Item[P]] = []
        for item, result in zip(items, results, strict=True):
            if isinstance(result, StagedPoolError):
                self.meter.dropped[cause(item.ticket)] += 1
                item.ticket.fail_input(item.index, result)
            else:
                ticket = item.ticket
                timeline = ticket.timeline
                timeline.preprocess_s = max(timeline.preprocess_s, ended - item.sent_at)
                parts = result if isinstance(result, tuple) else (result,)
                if len(parts) > 1:
                    ticket.split(item.index, len(parts))
                ticket.move(1, self.meter.name, self._outlet.name)
                ticket.move(len(parts) - 1, None, self._outlet.name)
                ticket.load.tokenized(self._lane, sum(part.cost for part in parts))
                scope = ticket.sharing_scope
                ready += [
                    Item(
                        ticket,
                        item.index,
                        part.payload,
                        ended,
                        part.cost,
                        part.batch_key,
                        place,
                        part.identity_in(scope),
                    )
                    for place, part in enumerate(parts)
                ]
        self.meter.done += len(ready)
        return ready

    async def _call(
        self, tickets: Sequence[Ticket], payloads: Sequence[S]
    ) -> Sequence[Prepared[P] | tuple[Prepared[P], ...] | StagedPoolError]:
        call = object()
        self._called_at[call] = began = self._clock()
        self.preparing += len(payloads)
        mark = self._calls.begin(began)
        worked = True
        try:
            results = await self._offload(partial(self._prepare_for, tickets), payloads)
            worked = not (results and isinstance(results[0], Abandoned))
            return results
        finally:
            del self._called_at[call]
            self.preparing -= len(payloads)
            ended = self._clock()
            stage_s = self._calls.end(ended, mark)
            if worked:
                self.call_s += (LEARNING_WEIGHT if self.call_s else 1.0) * (ended - began - self.call_s)
                if self._service_time is not None:
                    self._service_time.observe(len(payloads), stage_s)

    def _prepare_for(
        self, tickets: Sequence[Ticket], payloads: Sequence[S]
    ) -> Sequence[Prepared[P] | tuple[Prepared[P], ...] | StagedPoolError]:
        """In a thread, which may have waited for a core: nothing begins for callers who have all left meanwhile."""
        if all(ticket.settled for ticket in tickets):
            return [Abandoned("nobody waits for it any more")] * len(payloads)
        return self._preprocess(payloads)

    @property
    def calls(self) -> int:
        """Calls that run. While inputs wait, a worker that has handed something on is in its next one at once."""
        return len(self._called_at)

    def overdue(self, than_s: float) -> int:
        """Calls that have been running for `than_s` seconds or longer. Each holds a worker and its thread."""
        now = self._clock()
        return sum(now - called_at >= than_s for called_at in self._called_at.values())

    def next_overdue_s(self, than_s: float) -> float:
        """Seconds until one more call has been running for `than_s`; as many where none runs that could."""
        now = self._clock()
        left = (called_at + than_s - now for called_at in self._called_at.values())
        return min((each for each in left if each > 0), default=than_s)

    def is_stuck(self, than_s: float) -> bool:
        """Every worker is in a call that has been running for `than_s` seconds or longer."""
        if len(self._called_at) < self.meter.workers:
            return False
        return self._clock() - next(reversed(self._called_at.values())) >= than_s  # the one that began last
