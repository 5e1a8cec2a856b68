"""Tickets of the engine process: the claims of fronts on rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from staged_pool.runtime.admission.accounting import Reservation
from staged_pool.runtime.card import Lane
from staged_pool.runtime.remote.limits import require
from staged_pool.stages.errors import Abandoned, EngineStopped, StagedPoolError
from staged_pool.stages.ticket import Item, Ticket
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

    __slots__ = ("_expected", "_inputs", "_taken", "front", "number", "reservation")

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
        self._expected: dict[Lane, int] | None = None
        """Inputs that have not come, by lane. None: they are not counted yet."""
        self._inputs = 0
        self._taken: set[tuple[int, int]] = set()
        """Indices and parts of the items that have come."""

    def count_inputs(self, inputs: Mapping[Lane, int]) -> None:
        """Note the inputs of the request, by lane.

        Raises:
            WireError: They are counted already.
        """
        require(self._expected is None, "inputs", "are counted twice")
        self._expected, self._inputs = dict(inputs), sum(inputs.values())

    def take_item(self, lane: Lane, index: int, part: int) -> None:
        """Note an item: each may come once.

        Args:
            lane: Its lane.
            index: Index of its input.
            part: Its part of the input.

        Raises:
            WireError: It has come already, or is none of the request.
        """
        item = index, part
        require(index < self._inputs and item not in self._taken, "keys", "has no new item of its request")
        self._taken.add(item)
        if self._expected is not None and not part:
            self._expected[lane] = self._expected.get(lane, 0) - 1
            require(self._expected[lane] >= 0, "keys", "has more items of a lane than the request has inputs")

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


def count_tokens(items: Sequence[Item[Any]], lane: Lane) -> None:
    """Count items as fed, with their true number of tokens."""
    tokens: dict[tuple[Ticket, int], int] = {}
    for item in items:
        key = item.ticket, item.index
        tokens[key] = tokens.get(key, 0) + item.tokens
    for (ticket, _), count in tokens.items():
        ticket.load.fed(lane, 1)
        ticket.load.tokenized(lane, count)


def _never_decoded() -> Request:
    raise EngineStopped("requests are decoded in the fronts")


def _never_encoded(_: object) -> object:
    raise EngineStopped("answers are made in the fronts")
