"""HTTP/3, where aioquic is installed: requests that come over QUIC, to the same application as all others.

Hypercorn's own HTTP/3 does not notice that a client leaves, lets one client's mistake end every connection, and cannot
end before its patience does. So aioquic, which does no input and output, is asked here directly. A connection has one
task, which sends for it and keeps its time, and one more for each request.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio
import anyio.abc

from staged_pool.api.allowance import ANSWER_UNITS, Credit
from staged_pool.api.asgi import App, Headers
from staged_pool.api.config import ServerConfig
from staged_pool.api.protocols import PIECE_BYTES
from staged_pool.api.request_head import Malformed, scope_of
from staged_pool.api.streams import RequestStream
from staged_pool.api.traffic import Traffic
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.log import get_logger

if TYPE_CHECKING:
    from aioquic.h3.connection import H3Connection
    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.connection import QuicConnection

Address: TypeAlias = tuple[str, int]

FIRST_DATAGRAM_BYTES: Final = 1200
"""The least that the first datagram of a client has (RFC 9000, section 14.1): an answer cannot be made to be larger
than what asks for it."""

REQUEST_UNITS: Final = 10
"""Price of beginning a request, as over HTTP/2."""

NO_ERROR: Final = 0x100  # RFC 9114, section 8.1
INTERNAL_ERROR: Final = 0x102
EXCESSIVE_LOAD: Final = 0x107
REQUEST_REJECTED: Final = 0x10B
REQUEST_CANCELLED: Final = 0x10C
MESSAGE_ERROR: Final = 0x10E

log = get_logger("staged_pool.api")


def check_installed() -> None:
    """See that HTTP/3 can be served.

    Raises:
        ConfigError: aioquic is not there.
    """
    if importlib.util.find_spec("aioquic") is None:
        raise ConfigError("quic_port: HTTP/3 needs aioquic; install staged-pool[http3]")


class Http3:
    """Serves HTTP/3 on one UDP socket.

    Args:
        app: Of all requests.
        config: Its certificate, and the limits.
        traffic: Where connections are counted.
    """

    def __init__(self, app: App, config: ServerConfig, traffic: Traffic) -> None:
        self.app = app
        self.config = config
        self.traffic = traffic
        self.sending = anyio.Lock(fast_acquire=True)
        """Of the socket, which one task at a time may send on."""
        self._connections: dict[bytes, _Connection] = {}
        self._settings = _settings(config)

    async def run(self, listener: socket.socket) -> None:
        """Serve until cancelled. Once the server ends, connections go as their requests are answered.

        What goes wrong in a connection ends that connection.

        Args:
            listener: A bound UDP socket. Owned by this from here on.
        """
        async with await anyio.abc.UDPSocket.from_socket(listener) as udp, anyio.create_task_group() as tasks:
            while True:
                data, address = await udp.receive()
                if (connection := self._connection(data)) is not None:
                    if not connection.begun:
                        connection.begin(udp, tasks, address[:2])
                    connection.take(data, address)

    def _connection(self, data: bytes) -> _Connection | None:
        """Whose datagram it is; a new one's, if it may begin one."""
        from aioquic._buffer import Buffer
        from aioquic.quic.connection import QuicConnection
        from aioquic.quic.packet import QuicPacketType, pull_quic_header

        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=self._settings.connection_id_length)
        except ValueError:
            return None
        if (known := self._connections.get(header.destination_cid)) is not None:
            return known
        if header.packet_type != QuicPacketType.INITIAL or len(data) < FIRST_DATAGRAM_BYTES:
            return None
        if header.version not in self._settings.supported_versions or self.traffic.leaving:
            return None
        if self.traffic.connections >= self.config.max_connections:
            self.traffic.connections_refused += 1
            return None
        quic = QuicConnection(configuration=self._settings, original_destination_connection_id=header.destination_cid)
        connection = _Connection(self, quic)
        self.name(connection, header.destination_cid)
        self.name(connection, quic.host_cid)
        return connection

    def name(self, connection: _Connection, name: bytes) -> None:
        """What datagrams of this connection may call it."""
        self._connections[name] = connection

    def forget(self, name: bytes) -> None:
        self._connections.pop(name, None)


class _Connection:
    """One client."""

    def __init__(self, server: Http3, quic: QuicConnection) -> None:
        self.server = server
        self.begun = False
        self.moved = anyio.Event()
        """Something was sent or acknowledged since it was last looked at."""
        self._quic = quic
        self._h3: H3Connection | None = None
        self._streams: dict[int, RequestStream] = {}
        self._names: set[bytes] = {quic.host_cid, quic.original_destination_connection_id}
        self._client: Address = ("", 0)
        self._wake = anyio.Event()
        self._ended = False
        self._tasks: anyio.abc.TaskGroup
        self._credit: Credit

    def begin(self, udp: anyio.abc.UDPSocket, tasks: anyio.abc.TaskGroup, client: Address) -> None:
        """Count it, and start its task."""
        self.begun = True
        self._credit = self.server.traffic.allowances.of(client)
        self._tasks = tasks
        self.server.traffic.enter(self._leave)
        tasks.start_soon(self._run, udp)

    async def _run(self, udp: anyio.abc.UDPSocket) -> None:
        """Send what there is to send, when it is due, until the connection has ended."""
        try:
            while not self._ended:
                for data, address in self._quic.datagrams_to_send(now=anyio.current_time()):
                    async with self.server.sending:
                        with suppress(OSError):  # as good as lost on the way, which QUIC is made for
                            await udp.sendto(data, *address[:2])
                self.moved.set()
                self.moved = anyio.Event()
                await self._rest()
        except Exception as error:  # noqa: BLE001  # see `_guarded`
            _log_failure(error)
        finally:
            self._ended = True
            self.server.traffic.exit(self._leave)
            for name in self._names:
                self.server.forget(name)
            for stream in self._streams.values():
                stream.leave()

    async def _rest(self) -> None:
        due = self._quic.get_timer()
        with anyio.CancelScope(deadline=float("inf") if due is None else due) as patience:
            await self._wake.wait()
        self._wake = anyio.Event()
        if patience.cancelled_caught:
            self._guarded(lambda: self._quic.handle_timer(now=anyio.current_time()))

    def wake(self) -> None:
        self._wake.set()

    def take(self, data: bytes, address: Any) -> None:
        """A datagram has come."""
        self._client = address[:2]
        self._guarded(lambda: self._quic.receive_datagram(data, address, now=anyio.current_time()))
        self.wake()

    async def respond(self, stream_id: int, headers: Headers | None, body: bytes, *, ends: bool) -> None:
        """Send a part of an answer, and wait until little of it is left here."""
        if self._ended or self._h3 is None:
            return
        if headers is not None:
            self._h3.send_headers(stream_id, headers, end_stream=ends and not body)
        if body or (ends and headers is None):
            self._h3.send_data(stream_id, body, end_stream=ends)
        self.wake()
        await self._until_taken(stream_id)
        if ends:
            self._credit.earn(REQUEST_UNITS + ANSWER_UNITS)

    async def _until_taken(self, stream_id: int) -> None:
        """Wait until little of the answer is left here, as long as the client takes a piece of it in time."""
        server, stream = self.server, self._streams[stream_id]
        while not stream.left and (unsent := self.unsent(stream_id)) > PIECE_BYTES:
            with server.traffic.patience(server.config.write_timeout_s) as patience:
                while self.unsent(stream_id) > unsent - PIECE_BYTES and not stream.left:
                    await self.moved.wait()
            if patience.cancelled_caught:
                log.info("stream.cut_off", reason="its client does not read the answer")
                self.reset(stream_id, REQUEST_CANCELLED)
                return

    async def consumed(self, stream_id: int, count: int) -> None:
        """Do nothing: aioquic gives back what a client has spent as soon as it arrives."""

    async def break_off(self, stream_id: int, *, failed: bool) -> None:
        """Reset a stream without an answer."""
        self.reset(stream_id, INTERNAL_ERROR if failed else REQUEST_CANCELLED)

    def reset(self, stream_id: int, code: int) -> None:
        if not self._ended:
            self._quic.reset_stream(stream_id, code)
            self.wake()

    def unsent(self, stream_id: int) -> int:
        """Bytes of an answer that its client has not taken yet."""
        stream = self._quic._streams.get(stream_id)  # nothing public tells
        return 0 if stream is None or self._ended else len(stream.sender._buffer)

    async def done(self, stream_id: int) -> None:
        """Forget a stream; the connection may end now, if the server does."""
        self._streams.pop(stream_id, None)
        if self.server.traffic.leaving:
            self._leave()

    def _leave(self) -> None:
        """The server ends: once nothing is in hand, so does the connection."""
        if not self._streams and not self._ended:
            self._quic.close(error_code=NO_ERROR)
            self.wake()

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
            while (event := self._quic.next_event()) is not None:
                self._handle(event)
        except Exception as error:  # noqa: BLE001  # any client can bring it about: it ends that client's connection
            _log_failure(error)
            self._quic.close(error_code=INTERNAL_ERROR)

    def _handle(self, event: Any) -> None:
        from aioquic.h3.connection import H3Connection
        from aioquic.h3.events import DataReceived, HeadersReceived
        from aioquic.quic import events

        match event:
            case events.ProtocolNegotiated():
                self._h3 = H3Connection(self._quic)
            case events.ConnectionTerminated():
                self._ended = True
            case events.ConnectionIdIssued():
                self._names.add(event.connection_id)
                self.server.name(self, event.connection_id)
            case events.ConnectionIdRetired():
                self._names.discard(event.connection_id)
                self.server.forget(event.connection_id)
            case events.StreamReset() | events.StopSendingReceived():
                self._abandon(event.stream_id)
        for part in self._h3.handle_event(event) if self._h3 is not None else ():
            if isinstance(part, HeadersReceived):
                self._begin(part.stream_id, part.headers, ended=part.stream_ended)
            elif isinstance(part, DataReceived) and (stream := self._streams.get(part.stream_id)) is not None:
                stream.feed(part.data, 0, ended=part.stream_ended)

    def _begin(self, stream_id: int, headers: Headers, *, ended: bool) -> None:
        if (trailers := self._streams.get(stream_id)) is not None:
            trailers.feed(b"", 0, ended=ended)
            return
        if self.server.traffic.leaving:
            self.reset(stream_id, REQUEST_REJECTED)
            return
        if not self._credit.spend(REQUEST_UNITS):
            log.warning("connection.cut_off", reason="it resets its streams before they are answered")
            self._quic.close(error_code=EXCESSIVE_LOAD)
            return
        try:
            scope = scope_of(headers, ended=ended, version="3", scheme="https", client=self._client, server=None)
        except Malformed as error:
            log.info("stream.malformed", reason=str(error))
            self.reset(stream_id, MESSAGE_ERROR)
            return
        stream = self._streams[stream_id] = RequestStream(self, stream_id, scope, self.server.app)
        if ended:
            stream.feed(b"", 0, ended=True)
        self._tasks.start_soon(stream.run)

    def _abandon(self, stream_id: int) -> None:
        if (stream := self._streams.get(stream_id)) is not None:
            stream.leave()


def _log_failure(error: Exception) -> None:
    log.warning("connection.failed", error=type(error).__name__, reason=str(error), where="http3")


def _settings(config: ServerConfig) -> QuicConfiguration:
    from aioquic.h3.connection import H3_ALPN
    from aioquic.quic.configuration import QuicConfiguration

    settings = QuicConfiguration(alpn_protocols=H3_ALPN, is_client=False, idle_timeout=config.keep_alive_s)
    settings.load_cert_chain(str(config.tls_cert), str(config.tls_key))
    return settings
