"""HTTP/3, where aioquic is installed: requests that come over QUIC, to the same application as all others.

Hypercorn's own HTTP/3 does not notice that a client leaves, lets one client's mistake end every connection, and cannot
end before its patience does. So aioquic, which does no input and output, is asked here directly. A connection has one
task, which sends for it and keeps its time, and one more for each request.
"""

from __future__ import annotations

import importlib.util
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote

import anyio
import anyio.abc

from staged_pool.api.asgi import App, Message, Scope
from staged_pool.api.config import ServerConfig
from staged_pool.api.protocols import PIECE_BYTES, RESETS
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
                        connection.begin(udp, tasks)
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
        self._streams: dict[int, _Stream] = {}
        self._names: set[bytes] = {quic.host_cid, quic.original_destination_connection_id}
        self._client: Address = ("", 0)
        self._wake = anyio.Event()
        self._ended = False
        self._resets = 0
        self._tasks: anyio.abc.TaskGroup

    def begin(self, udp: anyio.abc.UDPSocket, tasks: anyio.abc.TaskGroup) -> None:
        """Count it, and start its task."""
        self.begun = True
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

    def send(self, stream_id: int, headers: list[tuple[bytes, bytes]] | None, body: bytes, *, ends: bool) -> None:
        if self._ended or self._h3 is None:
            return
        if headers is not None:
            self._h3.send_headers(stream_id, headers, end_stream=ends and not body)
        if body or (ends and headers is None):
            self._h3.send_data(stream_id, body, end_stream=ends)
        self.wake()

    def reset(self, stream_id: int, code: int) -> None:
        if not self._ended:
            self._quic.reset_stream(stream_id, code)
            self.wake()

    def unsent(self, stream_id: int) -> int:
        """Bytes of an answer that its client has not taken yet."""
        stream = self._quic._streams.get(stream_id)  # nothing public tells
        return 0 if stream is None or self._ended else len(stream.sender._buffer)

    def done(self, stream_id: int) -> None:
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
                stream.feed(part.data, ended=part.stream_ended)

    def _begin(self, stream_id: int, headers: list[tuple[bytes, bytes]], *, ended: bool) -> None:
        if (trailers := self._streams.get(stream_id)) is not None:
            trailers.feed(b"", ended=ended)
            return
        if self.server.traffic.leaving:
            self.reset(stream_id, REQUEST_REJECTED)
            return
        if (scope := _scope(headers, self._client)) is None:
            self.reset(stream_id, MESSAGE_ERROR)
            return
        stream = self._streams[stream_id] = _Stream(self, stream_id, scope)
        if ended:
            stream.feed(b"", ended=True)
        self._tasks.start_soon(stream.run)

    def _abandon(self, stream_id: int) -> None:
        if (stream := self._streams.get(stream_id)) is None:
            return
        stream.leave()
        self._resets += 1
        if self._resets > RESETS:
            log.warning("connection.cut_off", reason="it resets its streams before they are answered")
            self._quic.close(error_code=EXCESSIVE_LOAD)


class _Stream:
    """One request."""

    def __init__(self, connection: _Connection, stream_id: int, scope: Scope) -> None:
        self._connection = connection
        self._id = stream_id
        self._scope = scope
        self._incoming: deque[Message] = deque()
        self._arrived = anyio.Event()
        self._head: list[tuple[bytes, bytes]] | None = None
        self._left = self._answered = False

    async def run(self) -> None:
        try:
            await self._connection.server.app(self._scope, self._receive, self._send)
        except Exception as error:  # noqa: BLE001  # the application answers for its own; this one is of the protocol
            _log_failure(error)
        finally:
            if not self._answered:
                self._connection.reset(self._id, REQUEST_CANCELLED if self._left else INTERNAL_ERROR)
            self._connection.done(self._id)

    def feed(self, data: bytes, *, ended: bool) -> None:
        """A piece of the body. The guard reads all of it, and keeps what it may."""
        self._incoming.append({"type": "http.request", "body": data, "more_body": not ended})
        self._arrived.set()

    def leave(self) -> None:
        """The client wants no answer any more."""
        self._left = True
        self._arrived.set()

    async def _receive(self) -> Message:
        while not self._incoming and not self._left:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return {"type": "http.disconnect"} if self._left else self._incoming.popleft()

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            status = (b":status", str(message["status"]).encode())
            self._head = [status, *(header for header in message["headers"] if header[0] != b"connection")]
            return
        body = b"" if self._scope["method"] == "HEAD" else message.get("body", b"")
        ends = not message.get("more_body", False)
        self._answered = self._answered or ends
        head, self._head = self._head, None
        self._connection.send(self._id, head, body, ends=ends)
        await self._until_taken()

    async def _until_taken(self) -> None:
        """Wait until little of the answer is left here, as long as the client takes a piece of it in time."""
        server, connection = self._connection.server, self._connection
        while not self._left and (unsent := connection.unsent(self._id)) > PIECE_BYTES:
            with server.traffic.patience(server.config.write_timeout_s) as patience:
                while connection.unsent(self._id) > unsent - PIECE_BYTES and not self._left:
                    await connection.moved.wait()
            if patience.cancelled_caught:
                log.info("stream.cut_off", reason="its client does not read the answer")
                connection.reset(self._id, REQUEST_CANCELLED)
                return


def _log_failure(error: Exception) -> None:
    log.warning("connection.failed", error=type(error).__name__, reason=str(error), where="http3")


def _scope(headers: list[tuple[bytes, bytes]], client: Address) -> Scope | None:
    """What the application sees of the head of a request; None where it is malformed (RFC 9114, section 4.3.1)."""
    pseudo = {name: value for name, value in headers if name.startswith(b":")}
    method, target = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    if not method.isascii() or method in (b"", b"CONNECT") or not target.isascii() or not target.startswith(b"/"):
        return None
    path, _, query = target.partition(b"?")
    fields = [(name, value) for name, value in headers if not name.startswith(b":")]
    if b":authority" in pseudo and not any(name == b"host" for name, _ in fields):
        fields.insert(0, (b"host", pseudo[b":authority"]))
    return {
        "type": "http",
        "http_version": "3",
        "asgi": {"spec_version": "2.1", "version": "3.0"},
        "method": method.decode(),
        "scheme": "https",
        "path": unquote(path.decode()),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": fields,
        "client": client,
        "server": None,
        "extensions": {},
    }


def _settings(config: ServerConfig) -> QuicConfiguration:
    from aioquic.h3.connection import H3_ALPN
    from aioquic.quic.configuration import QuicConfiguration

    settings = QuicConfiguration(alpn_protocols=H3_ALPN, is_client=False, idle_timeout=config.keep_alive_s)
    settings.load_cert_chain(str(config.tls_cert), str(config.tls_key))
    return settings
