"""Listener for peers that know a token. Until it has said it, a connection is a stranger: one of few, and not for long.

A peer says the token first, so it is known as soon as its first bytes are here. A connection without it can only take
the place of another stranger.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
from anyio.abc import SocketStream, TaskGroup

from staged_pool.api.http.accept_loop import AcceptLoop
from staged_pool.stages.wakeup import Wakeup, wakeup

MOST_STRANGERS: Final = 32
"""Most connections that have not said the token. One more ends the one that has waited longest.

Twice what one iteration of the event loop accepts: none ends before its first bytes are read.
"""

PATIENCE_S: Final = 2.0
"""Longest time that a connection may take to say the token, in seconds."""


class TokenListener:
    """Accepts connections on a socket, and hands those over that begin with the token.

    Args:
        listener: A non-blocking, listening TCP socket; `run` closes it.
        token: The secret.
        take: Takes the connection of a peer, behind its token, and closes it.
    """

    def __init__(
        self, listener: socket.socket, token: bytes, take: Callable[[SocketStream], Awaitable[object]]
    ) -> None:
        self._listener = listener
        self._token = token
        self._take = take
        self._strangers: dict[socket.socket, anyio.CancelScope] = {}
        """Scopes of the tasks of strangers by their connections, oldest first."""
        self._one_ended: Wakeup | None = None
        """Wakes the loop, which waits for the end of a stranger."""

    @property
    def strangers(self) -> int:
        """Number of connections that have not said the token."""
        return len(self._strangers)

    async def run(self) -> None:
        """Accept connections until it is cancelled, which cancels those of all peers, too."""
        with self._listener:
            async with anyio.create_task_group() as tasks:

                def begin(accepted: socket.socket, _: Any) -> None:
                    self._begin(tasks, accepted)

                await AcceptLoop(self._listener, begin, self._make_room).run()

    def _begin(self, tasks: TaskGroup, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        if len(self._strangers) >= MOST_STRANGERS:
            self._end_oldest()
        scope = self._strangers[accepted] = anyio.CancelScope(deadline=anyio.current_time() + PATIENCE_S)
        tasks.start_soon(self._meet, accepted, scope)

    async def _meet(self, accepted: socket.socket, scope: anyio.CancelScope) -> None:
        """Wait for the token; then the connection is that of a peer."""
        stream: SocketStream | None = None
        try:
            with scope:
                if await self._says_token(accepted):
                    scope.deadline = anyio.current_time() + PATIENCE_S  # for what follows here
                    stream = await SocketStream.from_socket(accepted)
        except OSError:  # its other end is gone
            pass
        finally:
            self._strangers.pop(accepted, None)
            if stream is None:
                accepted.close()
            if self._one_ended is not None:
                self._one_ended.set()
        if stream is not None:
            await self._take(stream)

    async def _says_token(self, accepted: socket.socket) -> bool:
        """Return True if the first bytes of a connection are the token."""
        said = b""
        while len(said) < len(self._token):
            try:
                more = accepted.recv(len(self._token) - len(said))
            except BlockingIOError:
                await anyio.wait_readable(accepted)
                continue
            if not more:
                return False
            said += more
        return hmac.compare_digest(said, self._token)

    async def _make_room(self) -> None:
        """End the stranger that has waited longest: it has the descriptor that the next one needs."""
        self._one_ended = wakeup()
        try:
            self._end_oldest()
            await self._one_ended.wait()
        finally:
            self._one_ended = None

    def _end_oldest(self) -> None:
        if (oldest := next(iter(self._strangers), None)) is not None:
            self._strangers.pop(oldest).cancel()
