"""The loop that accepts connections: each listener of this package runs it."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import anyio
import anyio.lowlevel

from staged_pool.api.http.listener import BACKLOG
from staged_pool.api.rare_lines import RareLines
from staged_pool.stages.log import get_logger

ACCEPTED_AT_ONCE: Final = 16
"""Connections accepted in one iteration of the event loop: thousands may arrive at once."""

FULL_PAUSE_S: Final = 0.1
"""Longest pause after a failed accept, in seconds."""

log = get_logger("staged_pool.api")

Begin: TypeAlias = Callable[[socket.socket, Any], object]
"""Takes a connection and the address of its client, without waiting. It owns the socket, unless it raises `OSError`."""


class AcceptLoop:
    """Accepts connections until it is cancelled.

    An accept fails if the client has gone, or if this process or the machine has no descriptor left. So may the first
    call on the new socket. None of these ends the loop.

    Args:
        listener: A non-blocking, listening socket; its owner closes it.
        begin: See `Begin`.
        make_room: Called after an accept that has found no descriptor. It closes what can be spared, and waits until a
            connection has ended; after `FULL_PAUSE_S` the loop tries again in any case.
    """

    def __init__(self, listener: socket.socket, begin: Begin, make_room: Callable[[], Awaitable[object]]) -> None:
        self._listener = listener
        self._begin = begin
        self._make_room = make_room
        self._not_accepted = RareLines(log.warning, "connection.not_accepted")

    async def run(self, is_allowed: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Accept connections as they come.

        Args:
            is_allowed: Waits until connections may be accepted. Returns True if it did not have to wait: otherwise
                another process may have taken the connection. None: they always may.
        """
        while True:
            await anyio.wait_readable(self._listener)
            if is_allowed is not None and not await is_allowed():
                continue
            if not self.accept_waiting(ACCEPTED_AT_ONCE):
                with anyio.move_on_after(FULL_PAUSE_S):
                    await self._make_room()
            await anyio.lowlevel.checkpoint()

    def accept_waiting(self, most: int = BACKLOG) -> bool:
        """Accept connections that wait, at most `most`. Returns False if this process can have no more."""
        for _ in range(most):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                break
            except OSError as error:
                self._not_accepted.add(reason=str(error))
                return False
            try:
                self._begin(accepted, address)
            except OSError:  # its client has gone again
                accepted.close()
        return True
