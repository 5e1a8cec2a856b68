"""The preprocess stage: CPU work on inputs, in threads under a capacity limiter."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Generic, TypeAlias, TypeVar

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

Preprocessed: TypeAlias = Prepared[P] | tuple[Prepared[P], ...] | StagedPoolError
"""Result for one input: its payload, those of the parts that it was cut into, or its error."""

Preprocess: TypeAlias = Callable[[Sequence[S]], Sequence[Preprocessed[P]]]
"""Turns inputs into payloads, with one result for each input. Runs in threads, several calls at once."""


class PreprocessStage(Stage, Generic[S, P]):
    """Prepares lists of inputs. Each worker has one call in a thread at a time.

    A worker takes all lists that already wait, up to `chunk_items`, and never waits for more. So under load many single
    inputs share one call, and without load none is held back.

    Args:
        receiver: Lists of items, each of one request. Closing its sender ends the stage.
        sender: Lists of prepared items, possibly of several requests. An empty list tells the batch stage that the
            items it expects will not come. Closed when the stage ends.
        preprocess: See `Preprocess`.
        offload: Runs `preprocess`. Its limit is the limit of the stage.
        ahead_s: Returns the seconds that the next item of a request will wait for the device. Items that cannot be in
            time are not begun.
        service_time: Learns the seconds of the whole stage for each call. None: preprocess is never the bottleneck.
        options: See `StageOptions`.
        chunk_items: Items after which a worker takes no further list.
        workers: Calls at once.
        lane: Name of the lane.
        name: Name of the stage. A model with two lanes has a stage for each.
    """

    def __init__(
        self,
        receiver: Receiver[Sequence[Item[S]]],
        sender: Sender[Sequence[Item[P]]],
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
        self._receiver = receiver
        self._sender = sender
        self._preprocess = preprocess
        self._offload = offload
        self._ahead_s = ahead_s
        self._service_time = service_time
        self._calls = DeviceShare()
        self._chunk_items = chunk_items
        self._lane = lane
        self._called_at: dict[object, float] = {}
        self.preparing = 0
        """Items in running calls."""
        self.call_s = 0.0
        """Mean duration of recent calls, in seconds."""

    def close(self) -> None:
        """See `Stage.close`."""
        self._receiver.close()
        self._sender.close()

    async def _work(self) -> None:
        async for first in self._receiver:
            with custody(self.meter.name, (item.ticket for item in first)) as held:
                with self.meter.working():
                    items = list(first)
                    while len(items) < self._chunk_items and (more := self._receiver.receive_waiting()) is not None:
                        held.take(item.ticket for item in more)
                        items += more
                    ready = await self._prepare(items)
                await self._hand_on(self._sender, ready)
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
                if timeline.trace is not None:
                    timeline.trace.passed("preprocess", item.sent_at, ended)
                parts = result if isinstance(result, tuple) else (result,)
                if len(parts) > 1:
                    ticket.split(item.index, len(parts))
                ticket.move(1, self.meter.name, self._sender.name, now=ended)
                ticket.move(len(parts) - 1, None, self._sender.name, now=ended)
                ticket.load.tokenized(self._lane, sum(part.tokens for part in parts))
                scope = ticket.sharing_scope
                ready += [
                    Item(
                        ticket,
                        item.index,
                        part.payload,
                        ended,
                        part.tokens,
                        part.batch_key,
                        place,
                        part.identity_in(scope),
                    )
                    for place, part in enumerate(parts)
                ]
        self.meter.done += len(ready)
        return ready

    async def _call(self, tickets: Sequence[Ticket], payloads: Sequence[S]) -> Sequence[Preprocessed[P]]:
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

    def _prepare_for(self, tickets: Sequence[Ticket], payloads: Sequence[S]) -> Sequence[Preprocessed[P]]:
        """Run one call in its thread, unless all callers have left by now.

        The thread may have waited for a core.
        """
        if all(ticket.settled for ticket in tickets):
            return [Abandoned("all callers have left")] * len(payloads)
        return self._preprocess(payloads)

    @property
    def calls(self) -> int:
        """Running calls."""
        return len(self._called_at)

    def overdue(self, than_s: float) -> int:
        """Count the calls that have run for `than_s` seconds or longer. Each holds a worker and a thread."""
        now = self._clock()
        return sum(now - called_at >= than_s for called_at in self._called_at.values())

    def next_overdue_s(self, than_s: float) -> float:
        """Return the seconds until one more call has run for `than_s`; `than_s` if none will."""
        now = self._clock()
        left = (called_at + than_s - now for called_at in self._called_at.values())
        return min((each for each in left if each > 0), default=than_s)

    def is_stuck(self, than_s: float) -> bool:
        """Return True if every worker's call has run for `than_s` seconds or longer."""
        if len(self._called_at) < self.meter.workers:
            return False
        return self._clock() - next(reversed(self._called_at.values())) >= than_s  # the latest call
