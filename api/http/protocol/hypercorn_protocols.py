"""Hypercorn's HTTP/1.1 protocol, made strict, for requests on the general path."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Final

import h2.connection
import h11
from hypercorn.events import RawData
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol

from staged_pool.api.http.protocol.malformed import problem_of
from staged_pool.api.http.protocol.strict_reader import StrictReader

SEND_CHUNK_BYTES: Final = 2**16
"""Bytes of a response that a client must read within `write_timeout_s`."""


def missing_names(http1: Any, http2: Any) -> list[str]:
    """Return the missing ones among the private names of h11 and h2 in use here."""
    return [
        name
        for name, holder in (
            ("h11.Connection._cstate.keep_alive", getattr(http1, "_cstate", None)),
            ("h11.Connection._reader", http1),
            ("h11.Connection._receive_buffer._data", getattr(http1, "_receive_buffer", None)),
            ("h2.connection.H2Connection._receive_frame", http2),
        )
        if not hasattr(holder, name.rpartition(".")[2])
    ]


if _missing := missing_names(h11.Connection(h11.SERVER), h2.connection.H2Connection()):
    raise ImportError(
        f"staged-pool does not support this version of h11 ({version('h11')}) or h2 ({version('h2')}), without "
        f"{' and '.join(_missing)}. Install the versions that its metadata requires: h11<0.17, h2<5"
    )


class Http1(H11Protocol):  # type: ignore[misc]  # Hypercorn is untyped here
    """HTTP/1.1 with strict heads. It ignores upgrades, as the standard allows.

    The server has no use for websockets, and Hypercorn leaves the connection of a rejected one open forever. An upgrade
    to HTTP/2 would bypass the rules of a proxy that passes it on; HTTP/2 with prior knowledge works.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connection = StrictReader(self.config.h11_max_incomplete_size, self.config.limits.body_limit_bytes)
        self._head = b""

    async def _send_h11_event(self, event: Any) -> None:
        """Send the head of a response together with its first bytes: the client wakes once."""
        if isinstance(event, h11.Response) and self.connection.is_kept:
            event = _with_keep_alive(event)
        try:
            data = self.connection.send(event)
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
            return
        if isinstance(event, h11.Response):
            self._head = data
            return
        head, self._head = self._head, b""
        if data and len(data) < SEND_CHUNK_BYTES:
            head, data = head + data, b""
        for piece in (head, data):
            if piece:
                await self.send(RawData(data=piece))

    async def _send_error_response(self, status_code: int) -> None:
        """Answer a malformed request, with a body like that of any other error."""
        status, body = (self.connection.problem or problem_of(status_code)).answer()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers += [(b"connection", b"close"), *self.config.response_headers("h11")]
        await self._send_h11_event(h11.Response(status_code=status, headers=headers))
        if not self.connection.asks_head_only:
            await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())

    @property
    def in_head(self) -> bool:
        """The head of a request has begun to arrive."""
        return self.stream is None and bool(self.connection.waiting)

    @property
    def between_requests(self) -> bool:
        """All received requests are answered, and none has begun to arrive."""
        connection = self.connection
        states = (connection.our_state, connection.their_state)
        return self.stream is None and states == (h11.IDLE, h11.IDLE) and not connection.waiting

    @property
    def is_answering(self) -> bool:
        """A complete request is in progress, and further bytes belong to the next one."""
        return self.stream is not None and self.connection.their_state is not h11.SEND_BODY

    @property
    def has_more(self) -> bool:
        """Bytes behind an answered request are here, and have not been read."""
        return self.connection.has_more

    async def resume(self) -> None:
        """Read on behind an answered request."""
        self.connection.has_more = False
        await self._handle_events()

    async def send_goaway(self) -> None:
        """Do nothing: HTTP/1.1 has no such message."""

    async def _create_stream(self, request: h11.Request) -> None:
        headers = dict(request.headers)
        if b"upgrade" in headers:
            rest = [(name, value) for name, value in request.headers if name != b"upgrade"]
            version = request.http_version
            request = h11.Request(method=request.method, target=request.target, headers=rest, http_version=version)
        length = headers.get(b"content-length", b"0")
        if int(length) > self.config.limits.body_limit_bytes:
            self.connection.client_is_waiting_for_100_continue = False  # the client must not send the body
        await super()._create_stream(request)

    async def _check_protocol(self, event: h11.Request) -> None:
        if event.method == b"PRI" and event.target == b"*" and event.http_version == b"2.0":
            raise H2ProtocolAssumedError(b"PRI * HTTP/2.0\r\n\r\n" + self.connection.trailing_data[0])


def _with_keep_alive(answer: h11.Response) -> h11.Response:
    """Return a response that tells a client of HTTP/1.0 that the connection stays open.

    h11 replaces the header if the connection closes after all. A response without a length ends with its connection.
    """
    names = {name for name, _ in answer.headers}
    if b"connection" in names or b"content-length" not in names:
        return answer
    headers = [*answer.headers, (b"connection", b"keep-alive")]
    return h11.Response(status_code=answer.status_code, headers=headers, reason=answer.reason)
