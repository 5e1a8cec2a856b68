"""One request over HTTP/2 or HTTP/3: the ASGI call for a stream."""

from __future__ import annotations

from typing import Protocol

import anyio

from staged_pool.api.asgi import App, Headers, Message, Scope
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.api")


class Carrier(Protocol):
    """Connection of a stream."""

    async def respond(self, stream_id: int, headers: Headers | None, body: bytes, *, ends: bool) -> None:
        """Send a part of a response, and return when little of it is buffered; the first part has `headers`."""

    async def consumed(self, stream_id: int, count: int) -> None:
        """Give the client flow control back for `count` bytes that the application has read."""

    async def break_off(self, stream_id: int, *, failed: bool) -> None:
        """Reset a stream without a response: its client has left, or the application has failed (`failed`)."""

    async def done(self, stream_id: int) -> None:
        """Forget a stream whose application has returned."""


class RequestStream:
    """One request.

    Args:
        carrier: Connection of the stream.
        stream_id: Id of the stream.
        scope: Scope of the ASGI call.
        app: The application.
    """

    def __init__(self, carrier: Carrier, stream_id: int, scope: Scope, app: App) -> None:
        self._carrier = carrier
        self._id = stream_id
        self._scope = scope
        self._app = app
        self._body = bytearray()
        self._unread = 0
        """Bytes of flow control that are not yet given back to the client."""
        self._ended = self._told_end = False
        """The whole body has arrived, and the application has been told."""
        self._arrived = anyio.Event()
        self._head: Headers | None = None
        self.left = False
        """The client has left, or has reset the stream."""
        self.answered = False

    async def run(self) -> None:
        """Call the application, and make sure that the stream ends."""
        try:
            await self._app(self._scope, self._receive, self._send)
        except Exception as error:  # noqa: BLE001  # an error of the protocol: the application answers its own errors
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
        """Add a piece of the body, which has used `count` bytes of flow control.

        Flow control limits the bytes that are buffered here.
        """
        self._body += data
        self._unread += count
        self._ended = self._ended or ended
        self._arrived.set()

    def leave(self) -> None:
        """Tell the application that the client has left."""
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
