"""One request of HTTP/2 or HTTP/3: an ASGI call between the stream of a connection and the application."""

from __future__ import annotations

from typing import Protocol

import anyio

from staged_pool.api.asgi import App, Headers, Message, Scope
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.api")


class Carrier(Protocol):
    """The connection of a stream."""

    async def respond(self, stream_id: int, headers: Headers | None, body: bytes, *, ends: bool) -> None:
        """Send a part of an answer, and return when little of it waits here; `headers` come with the first part."""

    async def consumed(self, stream_id: int, count: int) -> None:
        """Let the client send as many bytes more, for the application has taken so many."""

    async def break_off(self, stream_id: int, *, failed: bool) -> None:
        """Reset a stream that gets no answer: its client has left, or (`failed`) the application has failed."""

    async def done(self, stream_id: int) -> None:
        """Forget a stream whose application has returned."""


class RequestStream:
    """One request.

    Args:
        carrier: Its connection.
        stream_id: Its number there.
        scope: Of the ASGI call.
        app: What is called.
    """

    def __init__(self, carrier: Carrier, stream_id: int, scope: Scope, app: App) -> None:
        self._carrier = carrier
        self._id = stream_id
        self._scope = scope
        self._app = app
        self._body = bytearray()
        self._unread = 0
        """Bytes of flow control that the client has spent on it, and that it has not back."""
        self._ended = self._told_end = False
        """All of the body is here; and the application knows."""
        self._arrived = anyio.Event()
        self._head: Headers | None = None
        self.left = False
        """Nobody wants the answer."""
        self.answered = False

    async def run(self) -> None:
        """Call the application, and see that the stream ends."""
        try:
            await self._app(self._scope, self._receive, self._send)
        except Exception as error:  # noqa: BLE001  # the application answers for its own; this one is of the protocol
            log.warning("connection.failed", error=type(error).__name__, reason=str(error), where="stream")
        finally:
            try:
                if not self.answered:
                    await self._carrier.break_off(self._id, failed=not self.left)
                if self._unread:
                    await self._take_all()
            finally:
                await self._carrier.done(self._id)

    def feed(self, data: bytes, count: int, *, ended: bool) -> None:
        """Take a piece of the body, for which the client has spent `count` bytes of flow control.

        What waits here is never more than flow control lets through.
        """
        self._body += data
        self._unread += count
        self._ended = self._ended or ended
        self._arrived.set()

    def leave(self) -> None:
        """Tell the application that the client wants no answer any more."""
        self.left = True
        self._arrived.set()

    async def _take_all(self) -> bytes:
        body, self._body = bytes(self._body), bytearray()
        count, self._unread = self._unread, 0
        if count:
            await self._carrier.consumed(self._id, count)
        return body

    async def _receive(self) -> Message:
        while not self.left and not self._body and (self._told_end or not self._ended):
            self._arrived = anyio.Event()
            await self._arrived.wait()
        if self.left:
            return {"type": "http.disconnect"}
        ended = self._told_end = self._ended
        return {"type": "http.request", "body": await self._take_all(), "more_body": not ended}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            status = (b":status", b"%d" % message["status"])
            self._head = [status, *(header for header in message["headers"] if header[0] != b"connection")]
            return
        body = b"" if self._scope["method"] == "HEAD" else bytes(message.get("body", b""))
        ends = not message.get("more_body", False)
        self.answered = self.answered or ends
        head, self._head = self._head, None
        if not self.left:
            await self._carrier.respond(self._id, head, body, ends=ends)
