"""HTTP/2 protocol of a connection: its requests, and limits on what a client may cost or hold.

- An error on a stream ends that stream. An error on the connection ends it with a reason (GOAWAY).
- Frames are processed one at a time, and the event loop runs other tasks after every few. Frames that lead to no
  response spend the client's allowance (`allowance.py`). An overspent client waits for its next frame, and a connection
  that has waited for `OWING_S` ends.
- A response waits in its own task, never in a buffer: a frame of it is made when both windows have room.
- Priorities are ignored, as RFC 9113 (section 5.3.2) allows: streams send one frame each in turn.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import anyio
import anyio.lowlevel
import h2.connection
import h2.events
import h2.exceptions
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hypercorn.events import Closed, Event, RawData, Updated

from staged_pool.api.asgi import Headers
from staged_pool.api.http.http2.body_sender import BodySender, Http2Stream
from staged_pool.api.http.http2.connection import STREAMS, StrictConnection
from staged_pool.api.http.http2.frames import EnhanceYourCalm, FrameCutter
from staged_pool.api.http.protocol.hypercorn_protocols import SEND_CHUNK_BYTES
from staged_pool.api.http.protocol.request_head import MalformedMessage, check_trailers, scope_of
from staged_pool.api.limits.allowance import ANSWER_UNITS
from staged_pool.api.limits.server_state import ServerState
from staged_pool.stages.log import get_logger

SLICE_UNITS: Final = 32
"""Units of frames that are processed before the event loop runs other tasks: under a millisecond."""

OWING_S: Final = 2.0
"""Total seconds of waiting for the client's allowance after which a connection ends; a response resets it."""

END_UNITS: Final = 50
"""Units for a connection that ends by its client's error: the client may open the next one at once."""

log = get_logger("staged_pool.api")


class Http2:
    """One connection of HTTP/2. Its arguments are those of Hypercorn's protocols."""

    in_head = between_requests = is_answering = has_more = False
    """Constants of the interface that `Http1` shares: over HTTP/2, requests do not wait for each other.

    An incomplete head does not end the idleness of a connection.
    """

    def __init__(  # noqa: PLR0917  # as Hypercorn's protocols are made
        self,
        app: Any,
        config: Any,
        context: object,
        tasks: Any,
        state: Any,
        tls: bool,
        client: tuple[str, int] | None,
        server: tuple[str, int] | None,
        send: Any,
    ) -> None:
        self._app = app.app
        self._config = config
        self._tasks = tasks
        self._scheme = "https" if tls else "http"
        self._state = state
        self._client = client
        self._server = server
        self._send = send
        self._server_state: ServerState = config.server_state
        self._allowance = self._server_state.allowances.of(client)
        self._waited_s = 0.0
        """Seconds waited for the client's allowance since the last response."""
        self._frames = FrameCutter()
        self._connection = StrictConnection()
        self._streams: dict[int, Http2Stream] = {}
        self._bodies = BodySender(self._connection, self._flush, self._allowance)
        self._closed = False

    async def initiate(self) -> None:
        """Send the server's settings."""
        self._connection.initiate_connection()
        await self._flush()
        await self._send(Updated(idle=True))

    async def send_goaway(self) -> None:
        """Tell the client that the connection ends, so that it sends no further request."""
        with suppress(h2.exceptions.ProtocolError):
            self._connection.close_connection()
        await self._flush()

    async def resume(self) -> None:
        """Do nothing: `has_more` is always False."""

    async def handle(self, event: Event) -> None:
        """Process received bytes, or the end of the connection."""
        if isinstance(event, Closed):
            self._closed = True
            for stream in self._streams.values():
                stream.leave()
            self._bodies.close()
        elif isinstance(event, RawData) and not self._closed:
            try:
                await self._process(event.data)
            except h2.exceptions.ProtocolError as error:
                await self._end(error)

    async def _process(self, data: bytes) -> None:
        work = 0
        self._frames.add(data)
        while (frame := self._frames.next()) is not None and not self._closed:
            self._allowance.spend(self._frames.price)
            for event in self._connection.receive_data(frame):
                await self._handle(event)
            while self._connection.malformed:
                self._abandon(self._connection.malformed.pop())
            await self._flush()
            work += self._frames.price
            if work >= SLICE_UNITS:
                work = 0
                await self._server_state.wait_for_iteration()
                await self._wait_for_allowance()

    async def _wait_for_allowance(self) -> None:
        """Wait until the client is within its allowance.

        Raises:
            EnhanceYourCalm: The wait is too long, or the server shuts down: the client floods, or has left.
        """
        while owed_s := self._allowance.owed_s:
            left_s = OWING_S - self._waited_s
            if left_s <= 0 or self._server_state.leaving:
                raise EnhanceYourCalm("too many frames without a response, or too many reset requests")
            began = anyio.current_time()
            with self._server_state.timeout(min(owed_s, left_s)):
                await anyio.sleep_forever()
            self._waited_s += anyio.current_time() - began

    async def _end(self, error: h2.exceptions.ProtocolError) -> None:
        """End the connection with a GOAWAY that has the reason."""
        log.warning("connection.cut_off", reason=str(error))
        self._allowance.spend(END_UNITS)
        with suppress(EnhanceYourCalm):
            await self._wait_for_allowance()
        with suppress(h2.exceptions.ProtocolError):
            if self._connection.state_machine.state is not h2.connection.ConnectionState.CLOSED:  # no GOAWAY yet
                self._connection.close_connection(error.error_code)
        await self._flush()
        await self._send(Closed())

    async def _flush(self) -> None:
        if data := self._connection.data_to_send():
            await self._send(RawData(data))

    # Receiving

    async def _handle(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                await self._begin(event)
            case h2.events.DataReceived():
                await self._feed(event)
            case h2.events.TrailersReceived():
                try:
                    check_trailers(event.headers)
                except MalformedMessage as error:
                    self._reset_malformed(event.stream_id, error)
            case h2.events.StreamEnded():
                if (stream := self._streams.get(event.stream_id)) is not None:
                    stream.feed(b"", 0, ended=True)
            case h2.events.StreamReset():
                self._abandon(event.stream_id)
            case h2.events.WindowUpdated():
                self._open_window(event.stream_id)
            case h2.events.RemoteSettingsChanged():
                if SettingCodes.INITIAL_WINDOW_SIZE in event.changed_settings:
                    for stream_id in self._streams:
                        self._open_window(stream_id)
            case h2.events.ConnectionTerminated():
                await self._send(Closed())

    async def _begin(self, event: h2.events.RequestReceived) -> None:
        stream_id = event.stream_id
        if self._server_state.leaving or sum(not stream.is_sent for stream in self._streams.values()) >= STREAMS:
            self._reset(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        try:
            scope = scope_of(
                event.headers,
                ended=event.stream_ended is not None,
                version="2",
                scheme=self._scheme,
                client=self._client,
                server=self._server,
            )
        except MalformedMessage as error:
            self._reset_malformed(stream_id, error)
            return
        scope["state"] = self._state
        stream = Http2Stream(self, stream_id, scope, self._app, price=self._frames.block_price)
        self._streams[stream_id] = stream
        if len(self._streams) == 1:
            await self._send(Updated(idle=False))
        self._tasks.spawn(stream.run)

    async def _feed(self, event: h2.events.DataReceived) -> None:
        stream, count = self._streams.get(event.stream_id), event.flow_controlled_length
        if event.data:
            self._allowance.earn(self._frames.price)
        if stream is not None and event.data and not stream.answered:
            stream.feed(event.data, count, ended=False)
            return
        self._connection.acknowledge_received_data(count, event.stream_id)
        if stream is None:
            self._reset(event.stream_id, ErrorCodes.NO_ERROR)  # it is answered: the client need not send the rest

    def _open_window(self, stream_id: int) -> None:
        if stream_id == 0:
            self._bodies.notify()
        elif (stream := self._streams.get(stream_id)) is not None:
            stream.opened.set()

    def _abandon(self, stream_id: int) -> None:
        """Stop a stream that has ended before its response."""
        if (stream := self._streams.get(stream_id)) is not None:
            stream.leave()
            self._bodies.notify()

    def _reset_malformed(self, stream_id: int, error: MalformedMessage) -> None:
        log.info("stream.malformed", reason=str(error))
        self._reset(stream_id, ErrorCodes.PROTOCOL_ERROR)
        self._abandon(stream_id)

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        known = self._connection.streams.get(stream_id)
        if known is not None and not known.closed:
            with suppress(h2.exceptions.ProtocolError):  # the connection has ended
                self._connection.reset_stream(stream_id, code)

    # Sending

    async def respond(self, stream_id: int, headers: Headers | None, body: bytes, *, ends: bool) -> None:
        """Send a part of a response; the stream is reset if its client does not read in time."""
        stream = self._streams[stream_id]
        try:
            if headers is not None:
                own = self._config.response_headers("h2")
                stream.is_sent = ends and not body
                self._connection.send_headers(stream_id, [*headers, *own], end_stream=stream.is_sent)
            if body or (ends and headers is None):
                await self._send_body(stream, stream_id, body, ends=ends)
            else:
                await self._flush()
        except h2.exceptions.ProtocolError:
            stream.leave()  # the stream has ended meanwhile
        if stream.is_sent and not stream.left:
            self._waited_s = 0.0
            self._allowance.earn(stream.price + ANSWER_UNITS)

    async def _send_body(self, stream: Http2Stream, stream_id: int, body: bytes, *, ends: bool) -> None:
        if self._bodies.must_wait(stream_id, len(body)):
            await self._flush()  # the head need not wait for the body
        for first in range(0, max(len(body), 1), SEND_CHUNK_BYTES):
            piece, is_last = body[first : first + SEND_CHUNK_BYTES], first + SEND_CHUNK_BYTES >= len(body)
            with self._server_state.timeout(self._config.limits.write_timeout_s) as timeout:
                await self._bodies.send(stream, stream_id, piece, ends=ends and is_last)
            if timeout.cancelled_caught:
                log.info("stream.cut_off", reason="its client does not read the answer")
                self._reset(stream_id, ErrorCodes.CANCEL)
                stream.leave()
                await self._flush()
            if stream.left or self._closed:
                return

    async def consumed(self, stream_id: int, count: int) -> None:
        """Give the client back the flow control of bytes that were read."""
        with suppress(h2.exceptions.ProtocolError):
            self._connection.acknowledge_received_data(count, stream_id)
        await self._flush()

    async def break_off(self, stream_id: int, *, failed: bool) -> None:
        """Reset a stream that gets no response."""
        self._reset(stream_id, ErrorCodes.INTERNAL_ERROR if failed else ErrorCodes.CANCEL)
        await self._flush()

    async def done(self, stream_id: int) -> None:
        """Forget a stream; without other streams the connection is idle."""
        self._reset(stream_id, ErrorCodes.NO_ERROR)  # unless the client has ended it: it need not send the rest
        del self._streams[stream_id]
        await self._flush()
        if not self._streams and not self._closed:
            await self._send(Updated(idle=True))
