"""The postprocess stage: it makes the answer of a request from its rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer to make: that of a request whose rows are complete."""

    ticket: Ticket
    make: Callable[[], object]
    sent_at: float
    """Time at which the last row was sent, in seconds."""


@dataclass(frozen=True, slots=True)
class _Made:
    """An answer that was made, or the error of its encoder."""

    outcome: object
    """The answer, or an `Exception`. None: the request was settled before."""
    began: float
    ended: float


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
                small: list[_Answer] = []
                large: list[_Answer] = []
                for ticket, sent_at in self._deliver(items):
                    if (finish := ticket.answer_async()) is not None:
                        self._finishers.start_soon(self._run_finisher, ticket, sent_at, finish)
                    else:
                        (small if self._is_small(ticket) else large).append(_Answer(ticket, ticket.answer(), sent_at))
                if small:  # batches of large requests rarely complete one: they need not wait for the lock
                    async with self._answering:
                        await self._answer(small)
                await self._answer(large, self._offload)
                held.handed_on()
            del items, small, large  # rows may lie in memory of another process, and the next may be long in coming

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

    async def _run_finisher(
        self, ticket: Ticket, sent_at: float, finish: Callable[[], Awaitable[Callable[[], object]]]
    ) -> None:
        """Await the result of one request, and make its answer. It ends early if the request is settled."""
        async with suppress_crash(self.meter):
            with custody("postprocess", (ticket,)) as held, anyio.CancelScope() as scope:
                with ticket.on_settled(scope.cancel):
                    began = self._clock()
                    try:
                        make = await finish()
                    except Exception as error:  # noqa: BLE001  # the boundary to plugins
                        self._settle(ticket, _Made(error, began, began), sent_at)
                    else:
                        await self._answer([_Answer(ticket, make, sent_at)], self._offload)
                held.handed_on()

    async def _answer(self, answers: Sequence[_Answer], offload: Offload | None = None) -> None:
        """Make answers and settle their tickets, with a pause after every `ANSWERING_S`.

        Args:
            answers: In this order, by one task or thread: each waits for those before it.
            offload: Makes them off the event loop. None: on it, where other tasks run in the pauses.
        """
        while answers:
            made = self._make(answers) if offload is None else await offload(self._make, answers)
            for answer, each in zip(answers, made, strict=False):
                self._settle(answer.ticket, each, answer.sent_at)
            answers = answers[len(made) :]
            if answers and offload is None:
                await anyio.lowlevel.checkpoint()

    def _make(self, answers: Sequence[_Answer]) -> list[_Made]:
        """Make the first answers, for about `ANSWERING_S`: a hand-over between threads takes a tenth of that."""
        made: list[_Made] = []
        pauses_at = self._clock() + ANSWERING_S
        for answer in answers:
            began = self._clock()
            if made and began >= pauses_at:
                break
            outcome = None if answer.ticket.settled else _outcome_of(answer.make)
            made.append(_Made(outcome, began, self._clock()))
        return made

    def _settle(self, ticket: Ticket, made: _Made, sent_at: float) -> None:
        """Settle a ticket with its answer, or with the error of the encoder."""
        if ticket.settled:
            self.meter.dropped[cause(ticket)] += 1
        elif isinstance(error := made.outcome, Exception):
            self.meter.dropped["failed"] += 1
            ticket.fail(_failure(error))
            error.__traceback__ = None  # its frames lead back to it, and to the rows
        else:
            self.meter.service.observe(made.ended - made.began)
            ticket.timeline.postprocess_s = made.ended - sent_at
            if (trace := ticket.timeline.trace) is not None:
                trace.passed("postprocess", sent_at, made.ended)
            self.meter.done += ticket.timeline.items
            ticket.resolve(made.outcome)


def _outcome_of(make: Callable[[], object]) -> object:
    """Return an answer, or the error of its encoder: one answer must end neither the worker nor the others."""
    try:
        with user_code():
            return make()
    except Exception as error:  # noqa: BLE001
        return error


def _failure(error: Exception) -> StagedPoolError:
    """Return the error for the caller of an answer that could not be made."""
    if isinstance(error, StagedPoolError):
        return error
    if is_out_of_memory(error):
        return exhausted(error, "postprocess")
    log.error("request.encode_failed", exc_info=error)
    return StageFailed("the answer could not be written: a bug of the server", stage="postprocess")
