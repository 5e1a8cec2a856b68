"""The postprocess stage: it makes the answer of a request from its rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup, TaskStatus

from staged_pool.stages.channel import Receiver
from staged_pool.stages.errors import StagedPoolError, StageFailed
from staged_pool.stages.exhausted import exhausted, is_out_of_memory
from staged_pool.stages.log import get_logger
from staged_pool.stages.offload import Offload
from staged_pool.stages.scheduling.tuning import ANSWERING_S
from staged_pool.stages.stage import Stage, StageOptions
from staged_pool.stages.supervise import custody, suppress_crash
from staged_pool.stages.ticket import Item, Ticket
from staged_pool.stages.ticket_check import cause, drop_settled
from staged_pool.stages.user_code import user_code

R = TypeVar("R")

log = get_logger("staged_pool.stages")


class PostprocessStage(Stage, Generic[R]):
    """Collects the rows of each request. The last row triggers its answer, which settles the ticket.

    A result that must be awaited gets a finisher, a task of this stage, so no worker waits for it.

    Args:
        receiver: Lists of items with their rows, possibly of several requests. Closing its sender ends the stage.
        offload: Makes large answers, off the event loop.
        options: See `StageOptions`.
        numbers: Returns the count of numbers in a row.
        inline_items: Most rows of an answer that is made on the event loop, quicker than a thread hop.
        inline_numbers: Most numbers in the rows of such an answer. Writing a number may take a microsecond.
        workers: Lists of items that are worked on at once.
    """

    def __init__(
        self,
        receiver: Receiver[Sequence[Item[R]]],
        *,
        offload: Offload,
        options: StageOptions,
        numbers: Callable[[R], int],
        inline_items: int = 4,
        inline_numbers: int = 4096,
        workers: int,
    ) -> None:
        super().__init__("postprocess", workers=workers, options=options)
        self._receiver = receiver
        self._offload = offload
        self._numbers = numbers
        self._inline_items = inline_items
        self._inline_numbers = inline_numbers
        self._answering = anyio.Lock(fast_acquire=True)
        """Held by the worker that makes small answers. Several at once would delay other tasks by a multiple."""
        self._finishers: TaskGroup

    async def _serve(self, task_status: TaskStatus[None]) -> None:
        async with anyio.create_task_group() as self._finishers:
            await super()._serve(task_status)

    def close(self) -> None:
        """See `Stage.close`."""
        self._receiver.close()

    async def _work(self) -> None:
        async for items in self._receiver:
            with self.meter.working(), custody("postprocess", (item.ticket for item in items)) as held:
                small: list[tuple[Ticket, float]] = []
                large: list[tuple[Ticket, float]] = []
                for answer in self._deliver(items):
                    if (finish := answer[0].answer_async()) is not None:
                        self._finishers.start_soon(self._run_finisher, *answer, finish)
                    else:
                        (small if self._is_small(answer[0]) else large).append(answer)
                if small:  # batches of large requests rarely complete one: they need not wait for the lock
                    await self._answer_small(small)
                for ticket, sent_at in large:
                    await self._answer(ticket, sent_at, self._offload)
                held.handed_on()
            del items  # their rows may lie in memory of another process, and the next ones may be long in coming

    def _deliver(self, items: Sequence[Item[R]]) -> list[tuple[Ticket, float]]:
        """Give rows to their tickets.

        Returns:
            The tickets that are complete now, smallest first, each with the send time of its last item.
        """
        complete = [
            (item.ticket, item.sent_at)
            for item in drop_settled(items, self.meter, now=self._clock())
            if item.ticket.deliver(item, self._numbers(item.payload))
        ]
        complete.sort(key=lambda pair: pair[0].timeline.items)
        return complete

    def _is_small(self, ticket: Ticket) -> bool:
        return ticket.timeline.items <= self._inline_items and ticket.numbers <= self._inline_numbers

    async def _answer_small(self, answers: Sequence[tuple[Ticket, float]]) -> None:
        """Make small answers, and let other tasks run after every `ANSWERING_S`."""
        async with self._answering:
            pauses_at = self._clock() + ANSWERING_S
            for ticket, sent_at in answers:
                if self._clock() >= pauses_at:
                    await anyio.lowlevel.checkpoint()
                    pauses_at = self._clock() + ANSWERING_S
                await self._answer(ticket, sent_at)

    async def _run_finisher(
        self, ticket: Ticket, sent_at: float, finish: Callable[[], Awaitable[Callable[[], object]]]
    ) -> None:
        """Await the result of one request, and make its answer. It ends early if the request is settled."""
        async with suppress_crash(self.meter):
            with custody("postprocess", (ticket,)) as held, anyio.CancelScope() as scope:
                with ticket.on_settled(scope.cancel):
                    await self._answer(ticket, sent_at, self._offload, finish)
                held.handed_on()

    async def _answer(
        self,
        ticket: Ticket,
        sent_at: float,
        offload: Offload | None = None,
        finish: Callable[[], Awaitable[Callable[[], object]]] | None = None,
    ) -> None:
        started = self._clock()
        if ticket.settled:
            self.meter.dropped[cause(ticket)] += 1
            return
        try:
            make = ticket.answer() if finish is None else await finish()
            if offload is None:
                with user_code():
                    value = make()
            else:
                value = await offload(_call, make)
        except StagedPoolError as error:
            self._fail(ticket, error)
            return
        except Exception as error:  # the boundary to encoders: one answer must not end a worker
            if is_out_of_memory(error):
                self._fail(ticket, exhausted(error, "postprocess"))
                return
            log.error("request.encode_failed", exc_info=error)
            message = "the answer could not be written: a bug of the server"
            self._fail(ticket, StageFailed(message, stage="postprocess"))
            return
        ended = self._clock()
        self.meter.service.observe(ended - started)
        ticket.timeline.postprocess_s = ended - sent_at
        if (trace := ticket.timeline.trace) is not None:
            trace.passed("postprocess", sent_at, ended)
        self.meter.done += ticket.timeline.items
        ticket.resolve(value)

    def _fail(self, ticket: Ticket, error: StagedPoolError) -> None:
        self.meter.dropped["failed"] += 1
        ticket.fail(error)


def _call(make: Callable[[], object]) -> object:
    return make()
