"""The order in which requests get into the pipeline, where more want to than it holds.

Channels, and the workers of the stages in front of the device, are first come, first served. So no more is let in than
the device and the waiting room in front of it hold, and what waits for that is let in as `stages/turns.py` says: else a
tenant of one request would wait in a channel until the thousand of another are where turns are taken.
"""

from __future__ import annotations

import anyio

from staged_pool.stages.ticket import Ticket
from staged_pool.stages.turns import Turns
from staged_pool.stages.work import Item, Priority


class Gate:
    """Lets requests in as long as what is inside keeps within so many tokens; one alone may exceed that.

    Args:
        tokens: Of all requests inside, at most.
        request_tokens: What a larger request counts as: no more of it is under way at once.
    """

    def __init__(self, tokens: int, request_tokens: int) -> None:
        self._tokens = tokens
        self._request_tokens = request_tokens
        self._taken = 0
        self._inside: dict[Ticket, int] = {}
        self._waiting = Turns[anyio.Event](lane="gate")

    async def enter(self, ticket: Ticket, tokens: float) -> None:
        """Wait until a request of so many tokens may go in. However the wait ends, `leave` is to be called."""
        cost = max(1, min(round(tokens), self._request_tokens))
        let_in = anyio.Event()
        self._waiting.add([Item(ticket, 0, let_in, 0.0, cost)])
        self._let_in()
        if not let_in.is_set():
            await let_in.wait()

    def waiting(self, priority: Priority) -> int:
        """Requests of a priority that wait to be let in."""
        return self._waiting.waiting(priority).requests

    def leave(self, ticket: Ticket) -> None:
        """Give back what a request has; nothing, if it has none."""
        if (cost := self._inside.pop(ticket, 0)) > 0:
            self._taken -= cost
            self._let_in()

    def _let_in(self) -> None:
        waiting = self._waiting
        while (first := waiting.first(_is_open)) is not None:
            key, item = first
            if self._inside and self._taken + item.cost > self._tokens:
                break
            waiting.take(key, item)
            waiting.end_batch()
            self._taken += item.cost
            self._inside[item.ticket] = item.cost
            item.payload.set()
        waiting.end_batch()


def _is_open(item: Item[anyio.Event]) -> bool:
    return not item.ticket.settled
