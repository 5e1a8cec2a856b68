"""Requests in flight: each is followed to its outcome, and its reservation given back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio

from staged_pool.runtime.admission.accounting import Arriving, Reservation
from staged_pool.runtime.engine.engine_stages import EngineStages
from staged_pool.runtime.engine.entrance import Entrance
from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.runtime.remote.model import RemoteModel
from staged_pool.stages.errors import Abandoned, DeadlineExceeded, EngineStopped, Overloaded, ScopeEnds
from staged_pool.stages.meter import Histogram
from staged_pool.stages.offload import Offload
from staged_pool.stages.parse import Arrival
from staged_pool.stages.scheduling.entries import Priority
from staged_pool.stages.scheduling.recent_mean import RecentMean
from staged_pool.stages.ticket import Ticket

A = TypeVar("A")
R = TypeVar("R")


class FollowedRequests:
    """Every admitted request, until its outcome is known and its reservation is given back.

    Args:
        stages: Take the requests.
        entrance: Admits the requests; in a front it asks the engine process.
        clock: Clock of the stages, in seconds.
    """

    def __init__(self, stages: EngineStages, entrance: Entrance | RemoteModel, clock: Callable[[], float]) -> None:
        self._stages = stages
        self._entrance = entrance
        self._clock = clock
        self.tickets: dict[Ticket, Reservation] = {}
        self._scopes: dict[object, anyio.CancelScope] = {}
        """Scopes of callers who have a deadline, or wait for parse or a preprocess thread."""
        self._visits = 0
        """Callers who are between two of their requests."""
        self._empty = anyio.Event()
        self.answered = RecentMean()
        """Requests answered a second, of late."""
        self.durations = Histogram()
        """Seconds of answered requests, from admission to the answer."""
        self.cancelled: Counter[str] = Counter()
        """Requests whose caller left before the answer, by stage."""
        self.expired: Counter[str] = Counter()
        """Requests whose deadline passed or could not be met, by stage."""

    def any(self) -> bool:
        """Return True if a request is in flight, or a caller visits."""
        return bool(self.tickets or self._scopes or self._visits)

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Count as in flight for a block."""
        self._visits += 1
        try:
            yield
        finally:
            self._visits -= 1
            self._note_departure()

    async def submit(
        self,
        arriving: Arriving,
        ticket_of: Callable[[Reservation], Ticket],
        answer: AnswerMemory,
        *,
        waits: bool = False,
    ) -> object:
        """Admit a request, and return its answer.

        Args:
            arriving: The request, as admission sees it.
            ticket_of: Makes the ticket of the admitted request.
            answer: Memory of the answer, which its owner gives back.
            waits: Wait for room; otherwise the request is rejected if there is none.

        Raises:
            ScopeEnds: A stage dropped the work, because the caller's scope ends too soon.
            StagedPoolError: The request was rejected, or its ticket was settled with this error.
        """
        reservation = await self._admit(arriving, waits=waits)
        answer.begin()
        reservation.answer = answer
        ticket = ticket_of(reservation)
        arrival = Arrival(ticket, arriving.body_bytes, self._clock())
        is_later = waits or not self._entrance.is_immediate
        timeout_s = ticket.deadline - arrival.sent_at if is_later else arriving.timeout_s
        return await self._follow(arrival, reservation, timeout_s)

    async def _admit(self, arriving: Arriving, *, waits: bool = False) -> Reservation:
        """Admit a request. One that is let in counts at once, and not only when its caller runs again."""
        if self._entrance.is_immediate and not waits:
            return await self._entrance.admit(arriving)  # without a checkpoint
        with self.visit():
            return await self._entrance.admit(arriving, waits=waits)

    async def wait_for_room(self, answer: AnswerMemory, priority: Priority, late_at: float) -> None:
        """Wait until a rejected request may try again, or its deadline passes.

        Args:
            answer: Memory of the answer.
            priority: Urgency of the request.
            late_at: Time at which its deadline passes, on the clock of the stages.
        """
        with anyio.move_on_after(late_at - self._clock()):
            await (answer.gather(priority) if answer.lacks_room else self._entrance.wait_for_departure())

    async def _follow(self, arrival: Arrival, reservation: Reservation, timeout_s: float) -> object:
        """Send a request to the stages and wait for its answer. However this ends, its reservation is given back.

        Raises:
            ScopeEnds: A stage dropped the work, because the caller's scope ends too soon.
            StagedPoolError: Any other error that the ticket is settled with.
        """
        ticket = arrival.ticket
        self.tickets[ticket] = reservation
        try:
            if timeout_s == math.inf and self._stages.enter_nowait(arrival):
                await ticket.wait_settled()  # no scope is needed: whatever happens, the ticket wakes its caller
            else:
                with anyio.move_on_after(timeout_s) as self._scopes[ticket]:
                    await self._stages.enter(arrival)
                    await ticket.wait_settled()
                if not ticket.settled:
                    # `timeout_s` is what was left of the limit, and may be below 0: it is no number for the caller.
                    late = f"The time limit of the request passed; it was in the {ticket.stage} stage."
                    ticket.fail(DeadlineExceeded(late, stage=ticket.stage))
            return await ticket.wait()
        finally:
            # After a cancellation of any kind the ticket is still open: it is abandoned here.
            if ticket.fail(Abandoned("the caller left")):
                self.cancelled[ticket.stage] += 1
            elif isinstance(ticket.error, DeadlineExceeded | ScopeEnds):
                self.expired[ticket.error.stage] += 1
            del self.tickets[ticket]
            self._scopes.pop(ticket, None)
            error, elsewhere_s = ticket.error, ticket.timeline.fetch_s
            if error is None:
                now = self._clock()
                self.answered.count(now)
                self.durations.observe(now - arrival.sent_at)
            rejected = isinstance(error, Overloaded)
            self._entrance.leave(reservation, answered=error is None, elsewhere_s=elsewhere_s, rejected=rejected)
            self._note_departure()
            ticket.release()

    async def run_call(self, arriving: Arriving, offload: Offload, call: Callable[[A], R], argument: A) -> R:
        """Admit and run a call that needs no stage, such as tokenizing. A drain waits for it, too.

        Raises:
            EngineStopped: The engine was stopped before the call was done.
            StagedPoolError: The call was rejected.
        """
        reservation = await self._admit(arriving)
        try:
            with anyio.CancelScope() as self._scopes[reservation]:
                return await offload(call, argument)
            raise EngineStopped("The engine was stopped before this request was done.")
        finally:
            del self._scopes[reservation]
            self._entrance.leave(reservation)
            self._note_departure()

    async def wait_until_empty(self) -> None:
        """Wait until no request is in flight."""
        while self.any():
            if self._empty.is_set():  # never replaced while a drain waits for it: several drains may wait
                self._empty = anyio.Event()
            await self._empty.wait()

    def fail_all(self, message: str) -> None:
        """Settle every request with `EngineStopped`, also those that wait for room."""
        self._entrance.grant()
        for ticket in list(self.tickets):
            ticket.fail(EngineStopped(message))
        for scope in list(self._scopes.values()):
            scope.cancel()  # the caller may still wait for room in front of parse, or for a thread

    def settle_waiting(self) -> None:
        """Admit or fail the requests that wait for room, as the engine now allows."""
        self._entrance.grant()

    def _note_departure(self) -> None:
        if not self.any():
            self._empty.set()


async def wait_for_scope(ends_at: float) -> None:
    """Wait for the caller's scope to cancel it at `ends_at`; return if its deadline has moved on.

    If the event loop is late, the deadline has passed some iterations before the scope cancels anything.
    """
    # No event tells that a scope has moved its deadline.
    while (deadline := anyio.current_effective_deadline()) <= ends_at:  # noqa: ASYNC110
        await anyio.sleep_until(deadline)
