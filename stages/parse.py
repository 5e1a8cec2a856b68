"""The parse stage: it decodes and plans requests, and feeds their inputs to preprocess."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import anyio
from anyio.abc import TaskGroup, TaskStatus

from staged_pool.stages.channel import Receiver
from staged_pool.stages.errors import StagedPoolError, StageFailed
from staged_pool.stages.exception_groups import single_errors
from staged_pool.stages.exhausted import exhausted, is_out_of_memory
from staged_pool.stages.feeding import FeedQueue
from staged_pool.stages.log import get_logger
from staged_pool.stages.offload import Offload
from staged_pool.stages.stage import Stage, StageOptions
from staged_pool.stages.supervise import custody, suppress_crash
from staged_pool.stages.ticket import Decode, Item, Ticket
from staged_pool.stages.ticket_check import should_process
from staged_pool.stages.user_code import run_guarded, user_code
from staged_pool.stages.work import Plan, Request

S = TypeVar("S")

log = get_logger("staged_pool.stages")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that admission has let in, on its way to parse."""

    ticket: Ticket
    body_bytes: int
    sent_at: float


class Completer(Protocol[S]):
    """Completes inputs that lack a part, such as an image given as a URL."""

    limit: int
    """Most inputs that are being completed, or wait to be fed, at once."""

    def is_complete(self, given: S, /) -> bool:
        """Return True if no part is missing."""
        ...

    def completing(self, item: Item[S], /) -> AbstractAsyncContextManager[S | None]:
        """Complete an input for the length of a block, which feeds it. None: its ticket has failed."""
        ...


class ParseStage(Stage, Generic[S]):
    """Decodes and plans requests, and feeds their inputs to preprocess.

    No worker waits for a later stage. Inputs that must wait get a feeder, a task of this stage. It ends when all inputs
    of its request have gone to preprocess, or when the request is settled.

    Args:
        receiver: Admitted requests. Closing its sender ends the stage.
        feeds: The feed queue of each lane. Closed when the stage ends.
        lane_of: Returns the lane of an input.
        accept: Checks a decoded request against the model and the limits, and plans it. Raises the error for its
            caller.
        completer: Completes inputs that lack a part.
        offload: Decodes large bodies, which would block the event loop.
        options: See `StageOptions`.
        inline_bytes: Largest body to decode on the event loop, where it takes less time than a thread hop.
        workers: Requests that are decoded at once.
    """

    def __init__(
        self,
        receiver: Receiver[Arrival],
        feeds: Mapping[Hashable, FeedQueue[S]],
        *,
        lane_of: Callable[[S], Hashable],
        accept: Callable[[Ticket, Request], Plan[S]],
        completer: Completer[S],
        offload: Offload,
        options: StageOptions,
        inline_bytes: int = 32_768,
        workers: int,
    ) -> None:
        super().__init__("parse", workers=workers, options=options)
        self._receiver = receiver
        self._feeds = feeds
        self._lane_of = lane_of
        self._accept = accept
        self._completer = completer
        self._offload = offload
        self._inline_bytes = inline_bytes
        self._feeders: TaskGroup

    async def _serve(self, task_status: TaskStatus[None]) -> None:
        async with anyio.create_task_group() as self._feeders:
            await super()._serve(task_status)

    def close(self) -> None:
        """See `Stage.close`."""
        self._receiver.close()
        for feed in self._feeds.values():
            feed.close()

    async def _work(self) -> None:
        async for arrival in self._receiver:
            with self.meter.working(), custody("parse", (arrival.ticket,)) as held:
                await self._parse(arrival)
                held.handed_on()

    async def _parse(self, arrival: Arrival) -> None:
        ticket, meter = arrival.ticket, self.meter
        now = self._clock()
        if not should_process(ticket, meter, now=now):
            return
        ticket.moved_to("parse", now=now)
        meter.wait.observe(now - arrival.sent_at)
        try:
            request = await self._decode(ticket.take_decode(), arrival.body_bytes)
            plan = self._accept(ticket, request)
        except StagedPoolError as error:
            self._fail(ticket, error)
            return
        except Exception as error:  # the boundary to decoders: a bad body must not end a worker
            if is_out_of_memory(error):
                error.__traceback__ = None
                self._fail(ticket, exhausted(error, "parse"))
                return
            log.error("request.decode_failed", exc_info=error)
            error.__traceback__ = None  # frames of anyio's thread would keep the body alive
            self._fail(ticket, StageFailed("the request could not be decoded: a bug of the server", stage="parse"))
            return
        ticket.expect(plan)
        done = self._clock()
        meter.service.observe(done - now)
        meter.done += 1
        ticket.timeline.parse_s = done - arrival.sent_at
        if (trace := ticket.timeline.trace) is not None:
            trace.passed("parse", arrival.sent_at, done)
        self._feed(ticket, plan.inputs, done)

    def _feed(self, ticket: Ticket, inputs: Sequence[S], now: float) -> None:
        """Feed inputs to their lanes; a feeder takes those that must wait."""
        lanes: dict[Hashable, list[tuple[int, S]]] = {}
        elsewhere: list[tuple[int, S]] = []
        for index, given in enumerate(inputs):
            if self._completer.is_complete(given):
                lanes.setdefault(self._lane_of(given), []).append((index, given))
            else:
                elsewhere.append((index, given))
        ticket.moved_to("parse", 0, now=now)
        if elsewhere:
            ticket.move(len(elsewhere), None, "fetch", now=now)
        left: dict[Hashable, Sequence[tuple[int, S]]] = {}
        for lane, at_hand in lanes.items():
            ticket.move(len(at_hand), None, self._feeds[lane].stage, now=now)
            if rest := self._feeds[lane].feed_nowait(ticket, at_hand):
                left[lane] = rest
        if left or elsewhere:
            self._feeders.start_soon(self._run_feeder, ticket, left, elsewhere)

    async def _run_feeder(
        self,
        ticket: Ticket,
        lanes: Mapping[Hashable, Sequence[tuple[int, S]]],
        elsewhere: Sequence[tuple[int, S]],
    ) -> None:
        """Feed the remaining inputs of one request, until all are fed or it is settled."""
        async with suppress_crash(self.meter):
            with custody("parse", (ticket,)) as held, anyio.CancelScope() as scope:
                with single_errors(), ticket.on_settled(scope.cancel):
                    async with anyio.create_task_group() as feeders:
                        left = iter(elsewhere)
                        for _ in range(min(len(elsewhere), self._completer.limit)):
                            feeders.start_soon(run_guarded, self._complete, ticket, left)
                        for lane, inputs in lanes.items():
                            feeders.start_soon(run_guarded, self._feeds[lane].feed, ticket, inputs)
                held.handed_on()

    async def _complete(self, ticket: Ticket, left: Iterator[tuple[int, S]]) -> None:
        """Complete and feed inputs one by one. Several of these tasks share an iterator."""
        for index, given in left:
            feed = self._feeds[self._lane_of(given)]
            await feed.wait_for_room(ticket)
            asked_at = self._clock()
            async with self._completer.completing(Item(ticket, index, given, asked_at)) as whole:
                if whole is None:
                    return
                now = self._clock()
                ticket.timeline.fetch_s = max(ticket.timeline.fetch_s, now - asked_at)
                if (trace := ticket.timeline.trace) is not None:
                    trace.passed("fetch", asked_at, now)
                ticket.move(1, "fetch", feed.stage, now=now)
                await feed.feed(ticket, ((index, whole),))

    async def _decode(self, decode: Decode, body_bytes: int) -> Request:
        if body_bytes <= self._inline_bytes:
            with user_code():
                return decode()
        return await self._offload(_call, decode)

    def _fail(self, ticket: Ticket, error: StagedPoolError) -> None:
        self.meter.dropped["failed"] += 1
        ticket.fail(error)


def _call(decode: Decode) -> Request:
    return decode()
