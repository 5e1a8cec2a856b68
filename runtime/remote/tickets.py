"""Tickets of the engine process: the claims of fronts on rows."""

from __future__ import annotations

import math
from typing import Protocol

from staged_pool.runtime.admission.accounting import Reservation
from staged_pool.stages.errors import Abandoned, EngineStopped, StagedPoolError
from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import Request


class Front(Protocol):
    """The front of a request, as the engine process sees it."""

    def failed(self, ticket: FrontTicket, error: StagedPoolError, index: int | None) -> None:
        """Tell it the error of a request.

        Args:
            ticket: The request.
            error: The error.
            index: Index of the input that has caused it. None: none has.
        """


class FrontTicket(Ticket):
    """The claim of a front on the rows of one request.

    Its front has the ticket of the caller, and makes the answer. An error of the batch stage goes there.

    Args:
        number: Number of the request.
        reservation: Account of the request.
        left_s: Seconds from its arrival until its deadline.
        arrived_at: Time of its arrival on the clock of the stages, in seconds.
        front: The front that waits for the rows.
    """

    __slots__ = ("front", "number", "reservation")

    def __init__(
        self,
        number: int,
        reservation: Reservation,
        left_s: float | None,
        arrived_at: float,
        front: Front,
    ) -> None:
        request_class = reservation.request_class
        super().__init__(
            _never_decoded,
            _never_encoded,
            reservation,
            deadline=math.inf if left_s is None else arrived_at + left_s,
            priority=request_class.priority,
            tenant=request_class.tenant,
        )
        self.number = number
        self.reservation = reservation
        self.front = front

    def fail(self, error: StagedPoolError) -> bool:
        """See `Ticket.fail`; the front is told."""
        return self._fail(error, None)

    def fail_input(self, index: int, error: StagedPoolError) -> bool:
        """See `Ticket.fail_input`; the front finds the caller's name for the input."""
        return self._fail(error, index)

    def leave(self) -> None:
        """Settle the ticket of a request whose front waits for nothing more."""
        super().fail(Abandoned("the front has left"))

    def _fail(self, error: StagedPoolError, index: int | None) -> bool:
        if not super().fail(error):
            return False
        self.front.failed(self, error, index)
        return True


def _never_decoded() -> Request:
    raise EngineStopped("requests are decoded in the fronts")


def _never_encoded(_: object) -> object:
    raise EngineStopped("answers are made in the fronts")
