"""One connection of HTTP/3: its timers, its allowance and its requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio
import anyio.abc

from staged_pool.api.asgi import App, Headers
from staged_pool.api.config import ServerConfig
from staged_pool.api.http.protocol.hypercorn_protocols import SEND_CHUNK_BYTES
from staged_pool.api.http.protocol.request_head import MalformedMessage, scope_of
from staged_pool.api.http.protocol.streams import RequestStream
from staged_pool.api.limits.allowance import Allowance
from staged_pool.api.limits.server_state import ServerState
from staged_pool.stages.log import get_logger

if TYPE_CHECKING:
    from aioquic.quic.connection import QuicConnection

    from staged_pool.api.http.http3.handshakes import Handshakes
    from staged_pool.api.http.http3.strict import StrictHttp3

Address: TypeAlias = tuple[str, int]

DATAGRAM_UNITS: Final = 10
"""Units of a datagram (see `allowance.py`), beside those of its bytes."""

UNIT_BYTES: Final = 128
"""Bytes of a datagram that cost one unit: each byte may be a frame."""

REQUEST_UNITS: Final = 10
"""Units of a new request, as over HTTP/2."""

ANSWER_UNITS: Final = 100
"""Units that a response earns beyond `REQUEST_UNITS`: those of the datagrams it needed."""

SENT_BYTES: Final = 64
"""Bytes of a response that earn one unit. The client sends at most one acknowledgement for each datagram."""

NO_ERROR: Final = 0x100  # RFC 9114, section 8.1
INTERNAL_ERROR: Final = 0x102
REQUEST_REJECTED: Final = 0x10B
REQUEST_CANCELLED: Final = 0x10C
MESSAGE_ERROR: Final = 0x10E

log = get_logger("staged_pool.api")


@dataclass(slots=True)
class Endpoint:
    """State that all HTTP/3 connections of a UDP socket share."""

    app: App
    config: ServerConfig
    server_state: ServerState
    handshakes: Handshakes
    sending: anyio.Lock = field(default_factory=lambda: anyio.Lock(fast_acquire=True))
    """Held while sending: only one task at a time may send on the socket."""
    connections: dict[bytes, Http3Connection] = field(default_factory=dict)
    """Each connection under all of its connection ids."""


class Http3Connection:
    """One connection of a client."""

    def __init__(self, endpoint: Endpoint, quic: QuicConnection, names: set[bytes]) -> None:
        self.endpoint = endpoint
        self.begun = False
        self.moved = anyio.Event()
        """Set when datagrams were sent or acknowledged."""
        self._quic = quic
        self._h3: StrictHttp3 | None = None
        self._streams: dict[int, RequestStream] = {}
        self._names = names
        self._client: Address = ("", 0)
        self._wake = anyio.Event()
        self._ended = False
        self._shakes_hands = True
        self.deadline = math.inf
        """Time by which the client must send a request, on the event loop's clock."""
        self._tasks: anyio.abc.TaskGroup
        self._allowance: Allowance

    def begin(self, udp: anyio.abc.UDPSocket, tasks: anyio.abc.TaskGroup, client: Address) -> None:
        """Count the connection, and start its task."""
        self.begun = True
        self._client = self._first_client = client
        self._allowance = self.endpoint.server_state.allowances.of(client)
        self._tasks = tasks
        self.endpoint.server_state.enter(self._leave)
        self.endpoint.server_state.quic_connections += 1
        self.endpoint.handshakes.begin(client)
        self._rest_until(self.endpoint.config.head_timeout_s)
        tasks.start_soon(self._run, udp)

    async def _run(self, udp: anyio.abc.UDPSocket) -> None:
        """Send datagrams when they are due, until the connection has ended."""
        try:
            while not self._ended:
                for data, address in self._quic.datagrams_to_send(now=anyio.current_time()):
                    async with self.endpoint.sending:
                        with suppress(OSError):  # the same as a lost datagram, which QUIC repeats
                            await udp.sendto(data, *address[:2])
                self.moved.set()
                self.moved = anyio.Event()
                await self._rest()
        except Exception as error:  # noqa: BLE001  # see `_guarded`
            _log_failure(error)
        finally:
            self._ended = True
            self._finish_handshake()
            self.endpoint.server_state.quic_connections -= 1
            self.endpoint.server_state.exit(self._leave)
            for name in self._names:
                self.endpoint.connections.pop(name, None)
            for stream in self._streams.values():
                stream.leave()

    async def _rest(self) -> None:
        due = self._quic.get_timer()
        deadline = min(math.inf if due is None else due, self.deadline)
        with anyio.CancelScope(deadline=deadline) as timeout:
            await self._wake.wait()
        self._wake = anyio.Event()
        if not timeout.cancelled_caught:
            return
        now = anyio.current_time()
        if now >= self.deadline:
            self.deadline = math.inf
            self._quic.close(error_code=NO_ERROR)
        if due is not None and now >= due:
            self._guarded(lambda: self._quic.handle_timer(now=now))

    def _rest_until(self, seconds: float) -> None:
        """Give the client `seconds` for its next request."""
        self.deadline = anyio.current_time() + seconds

    def _finish_handshake(self) -> None:
        if self._shakes_hands:
            self._shakes_hands = False
            self.endpoint.handshakes.end(self._first_client)

    def wake(self) -> None:
        self._wake.set()

    def take(self, data: bytes, address: Address) -> None:
        """Process a received datagram."""
        if self._allowance.owed_s:
            return  # the same as a lost datagram: the client sends it again, and slows down
        self._client = address
        self._allowance.spend(DATAGRAM_UNITS + len(data) // UNIT_BYTES)
        self._guarded(lambda: self._quic.receive_datagram(data, address, now=anyio.current_time()))
        self.wake()

    async def respond(self, stream_id: int, headers: Headers | None, body: bytes, *, ends: bool) -> None:
        """Send a part of a response, and wait until little of it is unacknowledged."""
        if self._ended or self._h3 is None:
            return
        if headers is not None:
            self._h3.send_headers(stream_id, headers, end_stream=ends and not body)
        if body or (ends and headers is None):
            self._h3.send_data(stream_id, body, end_stream=ends)
        self.wake()
        await self._until_taken(stream_id)
        if ends:
            self._allowance.earn(REQUEST_UNITS + ANSWER_UNITS + len(body) % SEND_CHUNK_BYTES // SENT_BYTES)

    async def _until_taken(self, stream_id: int) -> None:
        """Wait until little of a response is unacknowledged; reset the stream of a client that is too slow."""
        endpoint, stream = self.endpoint, self._streams[stream_id]
        while not stream.left and (unsent := self.unsent(stream_id)) > SEND_CHUNK_BYTES:
            with endpoint.server_state.timeout(endpoint.config.write_timeout_s) as timeout:
                while self.unsent(stream_id) > unsent - SEND_CHUNK_BYTES and not stream.left:
                    await self.moved.wait()
                self._allowance.earn(SEND_CHUNK_BYTES // SENT_BYTES)
            if timeout.cancelled_caught:
                log.info("stream.cut_off", reason="its client does not read the answer")
                self.reset(stream_id, REQUEST_CANCELLED)
                return

    async def consumed(self, stream_id: int, count: int) -> None:
        """Do nothing: aioquic gives flow control back as soon as bytes arrive."""

    async def break_off(self, stream_id: int, *, failed: bool) -> None:
        """Reset a stream that gets no response."""
        self.reset(stream_id, INTERNAL_ERROR if failed else REQUEST_CANCELLED)

    def reset(self, stream_id: int, code: int) -> None:
        if not self._ended:
            self._quic.reset_stream(stream_id, code)
            self.wake()

    def unsent(self, stream_id: int) -> int:
        """Return the bytes of a response that the client has not acknowledged."""
        stream = self._quic._streams.get(stream_id)  # aioquic has no public API for it
        return 0 if stream is None or self._ended else len(stream.sender._buffer)

    async def done(self, stream_id: int) -> None:
        """Forget a stream; during a shutdown the connection may end now."""
        self._streams.pop(stream_id, None)
        if not self._streams:
            self._rest_until(self.endpoint.config.keep_alive_s)
        if self.endpoint.server_state.leaving:
            self._leave()

    @property
    def is_idle(self) -> bool:
        """True if the connection is open and has no request."""
        return not self._streams and not self._shakes_hands and not self._ended

    def close(self) -> None:
        """End the connection."""
        self._quic.close(error_code=NO_ERROR)
        self.wake()

    def _leave(self) -> None:
        """End the connection for a shutdown, unless it has requests."""
        if not self._streams and not self._ended:
            self.close()

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
            while (event := self._quic.next_event()) is not None:
                self._handle(event)
        except Exception as error:  # noqa: BLE001  # any client can cause it, so it ends that client's connection alone
            _log_failure(error)
            self._quic.close(error_code=INTERNAL_ERROR)

    def _handle(self, event: Any) -> None:
        from aioquic.h3.events import DataReceived, HeadersReceived
        from aioquic.quic import events

        from staged_pool.api.http.http3.strict import StrictHttp3

        match event:
            case events.ProtocolNegotiated():
                self._h3 = StrictHttp3(self._quic)
            case events.HandshakeCompleted():
                self._finish_handshake()
                self._rest_until(self.endpoint.config.keep_alive_s)
            case events.ConnectionTerminated():
                self._ended = True
            case events.ConnectionIdIssued():
                self._names.add(event.connection_id)
                self.endpoint.connections[event.connection_id] = self
            case events.ConnectionIdRetired():
                self._names.discard(event.connection_id)
                self.endpoint.connections.pop(event.connection_id, None)
            case events.StreamReset() | events.StopSendingReceived():
                self._abandon(event.stream_id)
        if self._h3 is None:
            return
        parts = self._h3.handle_event(event)
        while self._h3.malformed:
            self._reject(*self._h3.malformed.pop())
        for part in parts:
            if isinstance(part, HeadersReceived):
                self._begin(part.stream_id, part.headers, ended=part.stream_ended)
            elif isinstance(part, DataReceived) and (stream := self._streams.get(part.stream_id)) is not None:
                if part.data:
                    self._allowance.earn(DATAGRAM_UNITS + len(part.data) // UNIT_BYTES)
                stream.feed(part.data, 0, ended=part.stream_ended)

    def _begin(self, stream_id: int, headers: Headers, *, ended: bool) -> None:
        if (trailers := self._streams.get(stream_id)) is not None:
            trailers.feed(b"", 0, ended=ended)
            return
        if self.endpoint.server_state.leaving:
            self.reset(stream_id, REQUEST_REJECTED)
            return
        self._allowance.spend(REQUEST_UNITS)
        try:
            scope = scope_of(headers, ended=ended, version="3", scheme="https", client=self._client, server=None)
        except MalformedMessage as error:
            log.info("stream.malformed", reason=str(error))
            self._reject(stream_id, MESSAGE_ERROR)
            return
        stream = self._streams[stream_id] = RequestStream(self, stream_id, scope, self.endpoint.app)
        if ended:
            stream.feed(b"", 0, ended=True)
        self.deadline = math.inf
        self._tasks.start_soon(stream.run)

    def _reject(self, stream_id: int, code: int) -> None:
        """Reset a stream whose request is malformed."""
        self._allowance.spend(REQUEST_UNITS)
        self._abandon(stream_id)
        self._quic.stop_stream(stream_id, code)
        self.reset(stream_id, code)

    def _abandon(self, stream_id: int) -> None:
        if (stream := self._streams.get(stream_id)) is not None:
            stream.leave()


def _log_failure(error: Exception) -> None:
    log.warning("connection.failed", error=type(error).__name__, reason=str(error), where="http3")
