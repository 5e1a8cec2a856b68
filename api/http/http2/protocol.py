"""HTTP/2 on h2, for the connections of `connections.py`: bounded in what a client may cost, hold and leave unread.

- What is wrong with a stream costs that stream; what is wrong with the connection ends it with a reason (GOAWAY).
- Frames are taken one at a time. After a few the event loop has a turn. All that bring nothing are paid for from one
  account of the client (`allowance.py`). One that owes waits for its next frame, and a connection that waits for long
  ends.
- An answer waits in its own task, never in a buffer: a frame of it is made when both windows let it through.
- Priorities are ignored, as RFC 9113 (section 5.3.2) allows: streams send a frame each in turn.
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
from staged_pool.api.http.http2.connection import STREAMS, StrictConnection
from staged_pool.api.http.http2.frames import FRAME_BYTES, FrameCutter, TooMuch
from staged_pool.api.http.protocol.hypercorn_protocols import PIECE_BYTES
from staged_pool.api.http.protocol.request_head import Malformed, check_trailers, scope_of
from staged_pool.api.http.protocol.streams import RequestStream
from staged_pool.api.limits.allowance import ANSWER_UNITS
from staged_pool.api.limits.server_state import ServerState
from staged_pool.stages.log import get_logger

SLICE_UNITS: Final = 32
"""Price of the frames that are taken before the event loop has a turn: under a millisecond."""

DATA_UNITS: Final = 4
"""What a frame of an answer pays back: a client may open two windows for each, and change its mind."""

OWING_S: Final = 2.0
"""Seconds that a connection without an answer waits for its client to pay, in all, before it ends."""

END_UNITS: Final = 50
"""Price of a connection that ends by a mistake of its client, who may open the next one at once."""

LEAST_BYTES: Final = 2**10
"""A frame of an answer that is shorter pays nothing back if it was the window that cut it short."""

log = get_logger("staged_pool.api")


class _Stream(RequestStream):
    """A request on a stream, and what its answer waits for."""

    def __init__(self, *args: Any, price: int) -> None:
        super().__init__(*args)
        self.price = price
        self.is_sent = False
        """All of the answer is, and the client may count it as over."""
        self.opened = anyio.Event()
        """The window of the stream has changed, or nobody wants the answer."""

    def leave(self) -> None:
        super().leave()
        self.opened.set()


class Http2:
    """One connection of HTTP/2. Its arguments are those of Hypercorn's protocols."""

    in_head = between_requests = is_answering = has_more = False
    """A connection of HTTP/2 goes on as one, its requests wait for no other, and a head that is not complete does not
    end its idleness."""

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
        """Since its last answer, for its client to pay."""
        self._frames = FrameCutter()
        self._connection = StrictConnection()
        self._streams: dict[int, _Stream] = {}
        self._sending = anyio.Lock(fast_acquire=True)
        """Of the task that makes the next frame of an answer, and waits for the window of the connection if it must."""
        self._opened = anyio.Event()
        """The window of the connection has changed, or a stream has ended."""
        self._closed = False

    async def initiate(self) -> None:
        """Say what is agreed to, as HTTP/2 begins."""
        self._connection.initiate_connection()
        await self._flush()
        await self._send(Updated(idle=True))

    async def send_goaway(self) -> None:
        """Tell the client that the connection ends, so that it does not send a request into the end."""
        with suppress(h2.exceptions.ProtocolError):
            self._connection.close_connection()
        await self._flush()

    async def resume(self) -> None:
        """Do nothing: see `has_more`."""

    async def handle(self, event: Event) -> None:
        """Take what has arrived, or that the connection is closed."""
        if isinstance(event, Closed):
            self._closed = True
            for stream in self._streams.values():
                stream.leave()
            self._opened.set()
        elif isinstance(event, RawData) and not self._closed:
            try:
                await self._take(event.data)
            except h2.exceptions.ProtocolError as error:
                await self._end(error)

    async def _take(self, data: bytes) -> None:
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
                await self._server_state.turn()
                await self._pay()

    async def _pay(self) -> None:
        """Wait until the client owes nothing.

        Raises:
            TooMuch: That takes too long, or the server ends. What comes next is a flood, or its client has left.
        """
        while owed_s := self._allowance.owed_s:
            left_s = OWING_S - self._waited_s
            if left_s <= 0 or self._server_state.leaving:
                raise TooMuch("its frames bring nothing, or it resets what it has asked")
            began = anyio.current_time()
            with self._server_state.timeout(min(owed_s, left_s)):
                await anyio.sleep_forever()
            self._waited_s += anyio.current_time() - began

    async def _end(self, error: h2.exceptions.ProtocolError) -> None:
        """End the connection, and say why."""
        log.warning("connection.cut_off", reason=str(error))
        self._allowance.spend(END_UNITS)
        with suppress(TooMuch):
            await self._pay()
        with suppress(h2.exceptions.ProtocolError):
            if self._connection.state_machine.state is not h2.connection.ConnectionState.CLOSED:  # h2 has said it
                self._connection.close_connection(error.error_code)
        await self._flush()
        await self._send(Closed())

    async def _flush(self) -> None:
        if data := self._connection.data_to_send():
            await self._send(RawData(data))

    # What comes in

    async def _handle(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                await self._begin(event)
            case h2.events.DataReceived():
                await self._feed(event)
            case h2.events.TrailersReceived():
                try:
                    check_trailers(event.headers)
                except Malformed as error:
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
        except Malformed as error:
            self._reset_malformed(stream_id, error)
            return
        scope["state"] = self._state
        stream = _Stream(self, stream_id, scope, self._app, price=self._frames.block_price)
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
            self._reset(event.stream_id, ErrorCodes.NO_ERROR)  # answered: no need to send on

    def _open_window(self, stream_id: int) -> None:
        if stream_id == 0:
            self._opened.set()
        elif (stream := self._streams.get(stream_id)) is not None:
            stream.opened.set()

    def _abandon(self, stream_id: int) -> None:
        """Let go of a stream that is over before its answer is."""
        if (stream := self._streams.get(stream_id)) is not None:
            stream.leave()
            self._opened.set()

    def _reset_malformed(self, stream_id: int, error: Malformed) -> None:
        log.info("stream.malformed", reason=str(error))
        self._reset(stream_id, ErrorCodes.PROTOCOL_ERROR)
        self._abandon(stream_id)

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        known = self._connection.streams.get(stream_id)
        if known is not None and not known.closed:
            with suppress(h2.exceptions.ProtocolError):  # the connection is over
                self._connection.reset_stream(stream_id, code)

    # What goes out

    async def respond(self, stream_id: int, headers: Headers | None, body: bytes, *, ends: bool) -> None:
        """Send a part of an answer, as its client lets it through; a stream that does not move on is reset."""
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
            stream.leave()  # it has ended meanwhile
        if stream.is_sent and not stream.left:
            self._waited_s = 0.0
            self._allowance.earn(stream.price + ANSWER_UNITS)

    async def _send_body(self, stream: _Stream, stream_id: int, body: bytes, *, ends: bool) -> None:
        if self._sending.locked() or len(body) > self._room(stream_id):
            await self._flush()  # the head need not wait for it
        for first in range(0, max(len(body), 1), PIECE_BYTES):
            piece, is_last = body[first : first + PIECE_BYTES], first + PIECE_BYTES >= len(body)
            with self._server_state.timeout(self._config.limits.write_timeout_s) as timeout:
                await self._pass_on(stream, stream_id, piece, ends=ends and is_last)
            if timeout.cancelled_caught:
                log.info("stream.cut_off", reason="its client does not read the answer")
                self._reset(stream_id, ErrorCodes.CANCEL)
                stream.leave()
                await self._flush()
            if stream.left or self._closed:
                return

    async def _pass_on(self, stream: _Stream, stream_id: int, piece: bytes, *, ends: bool) -> None:
        """Send a piece in as many frames as it takes, each when it is this stream's turn and there is room for it."""
        while True:
            async with self._sending:
                while not (over := stream.left or self._closed) and piece and not self._has_window:
                    self._opened = anyio.Event()
                    await self._opened.wait()  # with the turn: no other stream could send either
                if over:
                    return
                room = self._room(stream_id)
                if not piece or room > 0:
                    part, piece = piece[:room], piece[room:]
                    stream.is_sent = ends and not piece
                    self._connection.send_data(stream_id, part, end_stream=stream.is_sent)
                    if not piece or len(part) >= LEAST_BYTES:
                        self._allowance.earn(DATA_UNITS)
                    await self._flush()
                    if not piece:
                        return
                    await anyio.lowlevel.checkpoint()
                    continue
                stream.opened = anyio.Event()
            await stream.opened.wait()

    @property
    def _has_window(self) -> bool:
        return self._connection.outbound_flow_control_window > 0

    def _room(self, stream_id: int) -> int:
        """Bytes that one frame of an answer may have now. The client may allow longer ones; this is enough."""
        return max(0, min(self._connection.local_flow_control_window(stream_id), FRAME_BYTES))

    async def consumed(self, stream_id: int, count: int) -> None:
        """Let the client send on."""
        with suppress(h2.exceptions.ProtocolError):
            self._connection.acknowledge_received_data(count, stream_id)
        await self._flush()

    async def break_off(self, stream_id: int, *, failed: bool) -> None:
        """Reset a stream without an answer."""
        self._reset(stream_id, ErrorCodes.INTERNAL_ERROR if failed else ErrorCodes.CANCEL)
        await self._flush()

    async def done(self, stream_id: int) -> None:
        """Forget a stream; the connection may be idle now."""
        self._reset(stream_id, ErrorCodes.NO_ERROR)  # unless its client has ended it too: no need to send on
        del self._streams[stream_id]
        await self._flush()
        if not self._streams and not self._closed:
            await self._send(Updated(idle=True))
