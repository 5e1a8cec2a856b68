"""Parse: what the caller sent becomes a checked request, cut into lists of items."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskStatus

from staged_pool.stages.channel import Inlet, Outlet
from staged_pool.stages.door import is_wanted
from staged_pool.stages.errors import StagedPoolError, StageFailed
from staged_pool.stages.log import get_logger
from staged_pool.stages.offload import Offload
from staged_pool.stages.stage import Stage, StageOptions
from staged_pool.stages.supervise import custody
from staged_pool.stages.ticket import Decode, Ticket
from staged_pool.stages.work import Item, Plan, Request

S = TypeVar("S")

log = get_logger("staged_pool.stages")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that admission has let in."""

    ticket: Ticket
    body_bytes: int
    sent_at: float


class ParseStage(Stage, Generic[S]):
    """Decodes requests, one a worker.

    Its workers are many and cheap: one that waits because the next channel is full holds nothing but its own request,
    and the others' lists go in turns with its own.

    Args:
        inlet: Requests that were admitted. Closing its outlet ends the stage.
        outlets: By lane: lists of items of one request and one lane each; closed when the stage ends. Inputs of a lane
            that has none are left to the request's caller: see `Ticket.errands`.
        lane_of: Which lane an input belongs to.
        accept: Checks a decoded request against the model and the limits, and plans it; raises what is wrong with it.
        offload: For bodies whose decoding would hold up the event loop.
        inline_bytes: Bodies up to this size are decoded on the event loop: shorter than a thread hop takes.
        chunk_items: Items of a list at most.
        workers: Requests in hand at once.
        request_waiting_tokens: A request is fed no further while so many of its tokens wait for the device: the
            channels behind it are first come, first served, and a large request would fill them all.
        waiting_tokens: The requests in hand share half of so many, where that is less: the other half is for whoever
            comes next.
    """

    def __init__(
        self,
        inlet: Inlet[Arrival],
        outlets: Mapping[Hashable, Outlet[Sequence[Item[S]]]],
        *,
        lane_of: Callable[[S], Hashable],
        accept: Callable[[Ticket, Request], Plan[S]],
        offload: Offload,
        options: StageOptions,
        inline_bytes: int = 32_768,
        chunk_items: int,
        workers: int,
        request_waiting_tokens: int,
        waiting_tokens: int,
    ) -> None:
        super().__init__("parse", workers=workers, options=options)
        self._inlet = inlet
        self._outlets = outlets
        self._lane_of = lane_of
        self._accept = accept
        self._offload = offload
        self._inline_bytes = inline_bytes
        self._chunk_items = chunk_items
        self._request_waiting_tokens = request_waiting_tokens
        self._waiting_tokens = waiting_tokens

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Work until the inlet ends. Cancelled, it settles what is in hand."""
        await self._run([self._work] * self.meter.workers, self.close, task_status)

    def close(self) -> None:
        """See `Stage.close`."""
        self._inlet.close()
        for outlet in self._outlets.values():
            outlet.close()

    async def _work(self) -> None:
        async for arrival in self._inlet:
            with self.meter.working(), custody("parse", (arrival.ticket,)) as held:
                if self._seam is not None:
                    await self._at("received")
                await self._parse(arrival)
                held.handed_on()

    async def _parse(self, arrival: Arrival) -> None:
        ticket, meter = arrival.ticket, self.meter
        now = self._clock()
        if not is_wanted(ticket, meter, now=now):
            return
        meter.wait.observe(now - arrival.sent_at)
        try:
            request = await self._decode(ticket.take_decode(), arrival.body_bytes)
            plan = self._accept(ticket, request)
        except StagedPoolError as error:
            self._fail(ticket, error)
            return
        except Exception as error:  # the boundary to a dialect's code; a bad body must not end a worker
            log.error("request.decode_failed", exc_info=error)
            error.__traceback__ = None  # in a thread of anyio's it leads to frames that have the error, and the body
            self._fail(ticket, StageFailed("the request could not be decoded: a bug of the server", stage="parse"))
            return
        ticket.expect(plan)
        done = self._clock()
        meter.service.observe(done - now)
        meter.done += 1
        ticket.timeline.parse_s = done - arrival.sent_at
        lanes: dict[Hashable, list[tuple[int, S]]] = {}
        for index, given in enumerate(plan.inputs):
            lanes.setdefault(self._lane_of(given), []).append((index, given))
        if errands := [pair for lane, inputs in lanes.items() if lane not in self._outlets for pair in inputs]:
            ticket.leave_to_caller([Item(ticket, index, given, done) for index, given in errands])
        for lane, outlet in self._outlets.items():
            await self._feed(ticket, lane, outlet, lanes.get(lane, ()))

    async def _feed(
        self, ticket: Ticket, lane: Hashable, outlet: Outlet[Sequence[Item[S]]], inputs: Sequence[tuple[int, S]]
    ) -> None:
        for start in range(0, len(inputs), self._chunk_items):
            if start:  # of its first list nothing waits yet
                part = self._waiting_tokens // (2 * self.meter.busy)
                await ticket.wait_for_room(lane, max(1, min(self._request_waiting_tokens, part)))
            if ticket.settled:
                return
            sent_at = self._clock()
            chunk = inputs[start : start + self._chunk_items]
            await outlet.send([Item(ticket, index, given, sent_at) for index, given in chunk])

    async def _decode(self, decode: Decode, body_bytes: int) -> Request:
        if body_bytes <= self._inline_bytes:
            return decode()
        return await self._offload(_call, decode)

    def _fail(self, ticket: Ticket, error: StagedPoolError) -> None:
        self.meter.dropped["failed"] += 1
        ticket.fail(error)


def _call(decode: Decode) -> Request:
    return decode()
