"""Hypercorn's HTTP/1.1 and HTTP/2, made strict where they are lenient, and bounded where a client could hold them.

Both follow one rule: what is wrong with a stream costs that stream, and what is wrong with a connection costs that
connection. `connections.py` makes one of them for a connection that needs it.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Final

import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h11
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol

from staged_pool.api.malformed import problem_of
from staged_pool.api.strict_reader import StrictReader
from staged_pool.api.traffic import Traffic
from staged_pool.stages.log import get_logger

PIECE_BYTES: Final = 2**16
"""What a client must read of its answer within `write_timeout_s`, or else all of it."""

RESETS: Final = 1000
"""Unanswered streams that a client may reset on one connection; more only if it lets as many be answered."""

log = get_logger("staged_pool.api")


def missing_names(http1: Any, http2: Any) -> list[str]:
    """List what this module needs of h11 and h2 connections and their interfaces do not promise, if it is not there."""
    return [
        name
        for name, holder in (
            ("h11.Connection._cstate.keep_alive", getattr(http1, "_cstate", None)),
            ("h11.Connection._reader", http1),
            ("h11.Connection._receive_buffer._data", getattr(http1, "_receive_buffer", None)),
            ("h2.connection.H2Connection.incoming_buffer._data", getattr(http2, "incoming_buffer", None)),
        )
        if not hasattr(holder, name.rpartition(".")[2])
    ]


if _missing := missing_names(h11.Connection(h11.SERVER), h2.connection.H2Connection()):
    raise ImportError(
        f"staged-pool does not know this version of h11 ({version('h11')}) or h2 ({version('h2')}): there is no "
        f"{' and no '.join(_missing)}. Install the versions that its metadata asks for: h11<0.17, h2<5"
    )


class Http1(H11Protocol):  # type: ignore[misc]  # Hypercorn is untyped here
    """HTTP/1.1 with a strict head, and without upgrades, which are ignored as the standard allows.

    There is nothing to speak over a websocket, and Hypercorn leaves the connection of a refused one open for ever. The
    upgrade to HTTP/2 is a way around the rules of a proxy that passes it on; HTTP/2 with prior knowledge remains.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connection = StrictReader(self.config.h11_max_incomplete_size, self.config.limits.body_limit_bytes)
        self._head = b""

    async def _send_h11_event(self, event: Any) -> None:
        """Send the head of an answer together with what follows it: a client that waits is woken once, not twice."""
        if isinstance(event, h11.Response) and self.connection.is_kept:
            event = _keeping(event)
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
        if data and len(data) < PIECE_BYTES:
            head, data = head + data, b""
        for piece in (head, data):
            if piece:
                await self.send(RawData(data=piece))

    async def _send_error_response(self, status_code: int) -> None:
        """Answer what is no request, with a message as any other error has it."""
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
        """Nothing of a request has arrived that is not answered."""
        connection = self.connection
        states = (connection.our_state, connection.their_state)
        return self.stream is None and states == (h11.IDLE, h11.IDLE) and not connection.waiting

    @property
    def is_answering(self) -> bool:
        """A request is here with all its body, and not answered: what comes next is another one's."""
        return self.stream is not None and self.connection.their_state is not h11.SEND_BODY

    @property
    def has_more(self) -> bool:
        """What came behind a request, which has its answer, waits to be read."""
        return self.connection.has_more

    async def go_on(self) -> None:
        """Read on, behind a request that has its answer."""
        self.connection.has_more = False
        await self._handle_events()

    async def farewell(self) -> None:
        """HTTP/1.1 has none."""

    async def _create_stream(self, request: h11.Request) -> None:
        headers = dict(request.headers)
        if b"upgrade" in headers:
            rest = [(name, value) for name, value in request.headers if name != b"upgrade"]
            version = request.http_version
            request = h11.Request(method=request.method, target=request.target, headers=rest, http_version=version)
        length = headers.get(b"content-length", b"0")
        if int(length) > self.config.limits.body_limit_bytes:
            self.connection.client_is_waiting_for_100_continue = False  # or it would be told to send the body
        await super()._create_stream(request)

    async def _check_protocol(self, event: h11.Request) -> None:
        if event.method == b"PRI" and event.target == b"*" and event.http_version == b"2.0":
            raise H2ProtocolAssumedError(b"PRI * HTTP/2.0\r\n\r\n" + self.connection.trailing_data[0])


def _keeping(answer: h11.Response) -> h11.Response:
    """The same answer, which tells a client of HTTP/1.0 that the connection stays; h11 takes that back if it does not.

    Without a length the end of the connection is the end of the answer.
    """
    names = {name for name, _ in answer.headers}
    if b"connection" in names or b"content-length" not in names:
        return answer
    headers = [*answer.headers, (b"connection", b"keep-alive")]
    return h11.Response(status_code=answer.status_code, headers=headers, reason=answer.reason)


class Http2(H2Protocol):  # type: ignore[misc]
    """HTTP/2 in which one bad stream costs that stream, not all those that a proxy sends beside it.

    Hypercorn trips over data for a stream whose answer is complete (it looks the stream up, and it is gone), and over
    requests whose path is missing or not ASCII. When a connection closes, it leaves whoever waits to send on it waiting
    for ever, and it waits as long for a client that never opens its window.
    """

    in_head = False
    """Heads come in frames; an incomplete one does not end the idleness of its connection."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._resets = 0

    between_requests = is_answering = has_more = False
    """A connection of HTTP/2 goes on as one, and its requests wait for no other."""

    async def initiate(self, *args: Any) -> None:
        await super().initiate(*args)
        if self.idle:
            await self.send(Updated(idle=True))

    async def farewell(self) -> None:
        """Tell the client that the connection ends, so that it does not send a request into the end."""
        self.connection.close_connection()
        await self._flush()

    async def handle(self, event: Event) -> None:
        await super().handle(event)
        if isinstance(event, RawData) and self._frame_is_too_long():
            await self._end(h2.errors.ErrorCodes.FRAME_SIZE_ERROR, "it sends a frame that is too long")
        if isinstance(event, Closed):
            for buffer in list(self.stream_buffers.values()):
                await buffer.close()

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        for event in events:
            if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                self._reset(event.stream_id, h2.errors.ErrorCodes.NO_ERROR)  # answered: no need to send on
            elif isinstance(event, h2.events.RequestReceived) and not _is_routable(event.headers):
                self._reset(event.stream_id, h2.errors.ErrorCodes.PROTOCOL_ERROR)
            elif isinstance(event, h2.events.StreamReset):
                if event.stream_id not in self.streams:
                    continue  # answered
                await self._abandon(event.stream_id)
                self._resets += 1
                if self._resets > max(RESETS, self.keep_alive_requests // 2):
                    reason = "it resets its streams before they are answered"
                    await self._end(h2.errors.ErrorCodes.ENHANCE_YOUR_CALM, reason)
                    return
            else:
                await super()._handle_events([event])
        await self._flush()

    async def _end(self, code: h2.errors.ErrorCodes, reason: str) -> None:
        log.warning("connection.cut_off", reason=reason)
        self.connection.close_connection(code)
        await self._flush()
        await self.send(Closed())

    def _frame_is_too_long(self) -> bool:
        """h2 looks at the length of a frame when it has all of it, which may be 16 MiB."""
        begun = self.connection.incoming_buffer._data[:3]
        most: int = self.connection.max_inbound_frame_size
        return len(begun) == 3 and int.from_bytes(begun) > most

    async def stream_send(self, event: StreamEvent) -> None:
        """Send of an answer what the client lets through; a stream that does not move on is reset."""
        traffic: Traffic = self.config.traffic
        timeout_s: float = self.config.limits.write_timeout_s
        if isinstance(event, Body):
            with traffic.patience(timeout_s):  # it is in the buffer before the wait begins
                await super().stream_send(event)
        elif isinstance(event, EndBody):
            buffer = self.stream_buffers.get(event.stream_id)
            while buffer is not None:
                unsent = len(buffer.buffer)
                with traffic.patience(timeout_s):
                    await super().stream_send(event)
                    return
                if unsent - len(buffer.buffer) < PIECE_BYTES:
                    await self._give_up(event.stream_id)
                    return
        else:
            await super().stream_send(event)

    async def _give_up(self, stream_id: int) -> None:
        log.info("stream.cut_off", reason="its client does not read the answer")
        self._reset(stream_id, h2.errors.ErrorCodes.CANCEL)
        await self._flush()
        await self._abandon(stream_id)

    async def _abandon(self, stream_id: int) -> None:
        """End a stream that is over before its answer is. Hypercorn alone keeps what was to be sent, and never again
        takes the connection for idle."""
        if (buffer := self.stream_buffers.get(stream_id)) is not None:
            await buffer.close()
        await self._close_stream(stream_id)
        await self._window_updated(stream_id)  # lets the sending task drop the buffer
        if self.idle:
            await self.send(Updated(idle=True))

    def _reset(self, stream_id: int, code: h2.errors.ErrorCodes) -> None:
        try:
            self.connection.reset_stream(stream_id, code)
        except h2.exceptions.ProtocolError:
            return  # the client has closed it already


def _is_routable(headers: list[tuple[bytes, bytes]]) -> bool:
    fields = dict(headers)
    method, path = fields.get(b":method", b""), fields.get(b":path", b"")
    return method.isascii() and method != b"CONNECT" and path.isascii() and path != b""
