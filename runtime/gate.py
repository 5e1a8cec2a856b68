"""Who may go into the pipeline, where some tenant, or bulk work, would fill it alone.

Channels, and the workers of the stages in front of the device, are first come, first served: without this a tenant of
one request would wait in a channel until the thousand of another have come to where turns are taken. So each takes of
what the pipeline holds no more than it leaves free: a dynamic threshold, by which switches share their buffers
(Choudhury and Hahne, 1998). What is more waits here, in the order in which it came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import TypeAlias

import anyio

from staged_pool.stages.ticket import Ticket
from staged_pool.stages.work import Priority

_Asker: TypeAlias = tuple[Priority, Hashable]
"""A tenant, in one priority."""


class Gate:
    """Lets requests in. Each tenant may always have one inside in each priority.

    Args:
        tokens: That the pipeline holds, on the device and in front of it.
        requests: That it feeds side by side; a large one counts as an equal part of the tokens, for no more of it is
            inside at once.
    """

    def __init__(self, tokens: int, requests: int) -> None:
        self._free = tokens
        self._request_tokens = max(1, tokens // requests)
        self._inside: dict[Ticket, int] = {}
        self._own: dict[_Asker, int] = {}
        """Tokens inside; only of those who have any."""
        self._waiting: dict[_Asker, deque[tuple[Ticket, int, anyio.Event]]] = {}

    def enter_nowait(self, ticket: Ticket, tokens: float) -> bool:
        """Let a request of so many tokens in, if there is room for it and no other of its tenant waits. False: it is
        to wait in `enter`. However that ends, `leave` is to be called."""
        asker, cost = self._asks(ticket, tokens)
        if asker in self._waiting or not self._has_room(asker, cost):
            return False
        self._take(ticket, cost)
        return True

    async def enter(self, ticket: Ticket, tokens: float) -> None:
        """Wait until a request of so many tokens may go in."""
        if self.enter_nowait(ticket, tokens):
            return
        asker, cost = self._asks(ticket, tokens)
        let_in = anyio.Event()
        self._waiting.setdefault(asker, deque()).append((ticket, cost, let_in))
        await let_in.wait()

    def _asks(self, ticket: Ticket, tokens: float) -> tuple[_Asker, int]:
        return (ticket.priority, ticket.tenant), max(1, min(round(tokens), self._request_tokens))

    def leave(self, ticket: Ticket) -> None:
        """Give back what a request has, if it has anything, and let in whom that makes room for."""
        if (cost := self._inside.pop(ticket, 0)) > 0:
            asker = ticket.priority, ticket.tenant
            self._free += cost
            self._own[asker] -= cost
            if not self._own[asker]:
                del self._own[asker]
        while self._waiting:
            asker = min(self._waiting, key=lambda asker: self._own.get(asker, 0))
            waiting = self._waiting[asker]
            while waiting and waiting[0][0].settled:  # its caller has left
                waiting.popleft()
            if waiting:
                first, cost, let_in = waiting[0]
                if not self._has_room(asker, cost):
                    return
                waiting.popleft()
                self._take(first, cost)
                let_in.set()
            if not waiting:
                del self._waiting[asker]

    def waiting(self, priority: Priority) -> int:
        """Requests of a priority that wait to be let in."""
        return sum(len(waiting) for asker, waiting in self._waiting.items() if asker[0] is priority)

    def _has_room(self, asker: _Asker, cost: int) -> bool:
        own = self._own.get(asker, 0)
        return not own or own + cost <= self._free - cost

    def _take(self, ticket: Ticket, cost: int) -> None:
        asker = ticket.priority, ticket.tenant
        self._inside[ticket] = cost
        self._free -= cost
        self._own[asker] = self._own.get(asker, 0) + cost
