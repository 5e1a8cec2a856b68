"""An HTTP/3 client on any event loop, of which the test decides every step."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, HandshakeCompleted, StreamReset

from tests.servers.on_socket import Served
from tests.support.waiting import until


@dataclass
class Outcome:
    """The outcome of one request."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> int:
        return int(self.headers[b":status"])


class Http3Client:
    def __init__(self, quic: QuicConnection, udp: anyio.abc.ConnectedUDPSocket, address: tuple[str, int]) -> None:
        self.address = address
        self.quic = quic
        self.h3 = H3Connection(quic)
        self.udp = udp
        self.sending = anyio.Lock()
        self.outcomes: dict[int, Outcome] = {}
        self.ready = False
        self.ended: ConnectionTerminated | None = None

    async def flush(self) -> None:
        async with self.sending:
            await self._flush()

    async def _flush(self) -> None:
        for data, _ in self.quic.datagrams_to_send(now=anyio.current_time()):
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
                await self.udp.send(data)

    async def request(self, path: bytes, body: bytes = b"", *, ends: bool = True, **headers: bytes) -> int:
        stream_id = self.quic.get_next_available_stream_id()
        self.outcomes[stream_id] = Outcome()
        method = headers.pop("method", b"POST" if body or not ends else b"GET")
        fields = [(b":method", method), (b":scheme", b"https"), (b":authority", b"localhost"), (b":path", path)]
        fields += [(b"content-type", b"application/json")]
        fields += [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
        self.h3.send_headers(stream_id, fields, end_stream=ends and not body)
        if body:
            self.h3.send_data(stream_id, body, end_stream=ends)
        await self.flush()
        return stream_id

    async def send_raw(self, data: bytes) -> Outcome:
        """Send bytes on a new stream, and return its outcome."""
        stream_id = self.quic.get_next_available_stream_id()
        self.outcomes[stream_id] = Outcome()
        self.quic.send_stream_data(stream_id, data, end_stream=True)
        await self.flush()
        return await self.outcome(stream_id)

    async def outcome(self, stream_id: int) -> Outcome:
        outcome = self.outcomes[stream_id]
        await until(lambda: outcome.ended or outcome.reset is not None or self.ended is not None)
        return outcome

    async def ask(self, path: bytes, body: bytes = b"", **headers: bytes) -> Outcome:
        return await self.outcome(await self.request(path, body, ends=True, **headers))

    async def listen(self) -> None:
        while self.ended is None:
            due = self.quic.get_timer()
            with anyio.CancelScope(deadline=float("inf") if due is None else due) as late:
                self.quic.receive_datagram(await self.udp.receive(), self.address, now=anyio.current_time())
            if late.cancelled_caught:
                self.quic.handle_timer(now=anyio.current_time())
            while (event := self.quic.next_event()) is not None:
                self._handle(event)
            await self.flush()

    def _handle(self, event: Any) -> None:
        if isinstance(event, HandshakeCompleted):
            self.ready = True
        elif isinstance(event, ConnectionTerminated):
            self.ended = event
        elif isinstance(event, StreamReset) and event.stream_id in self.outcomes:
            self.outcomes[event.stream_id].reset = event.error_code
        for part in self.h3.handle_event(event):
            if isinstance(part, HeadersReceived):
                self.outcomes[part.stream_id].headers |= dict(part.headers)
                self.outcomes[part.stream_id].ended = part.stream_ended
            elif isinstance(part, DataReceived):
                self.outcomes[part.stream_id].body += part.data
                self.outcomes[part.stream_id].ended = part.stream_ended


@asynccontextmanager
async def http3_client(
    served: Served, change: Callable[[QuicConfiguration], None] = lambda settings: None
) -> AsyncIterator[Http3Client]:
    settings = QuicConfiguration(alpn_protocols=H3_ALPN, is_client=True, server_name="localhost")
    settings.load_verify_locations(str(served.certificates.roots))
    settings.verify_mode = ssl.CERT_REQUIRED
    change(settings)
    quic = QuicConnection(configuration=settings)
    port = served.quic_port
    async with await anyio.create_connected_udp_socket("127.0.0.1", port) as udp:
        client = Http3Client(quic, udp, ("127.0.0.1", port))
        quic.connect(("127.0.0.1", port), now=anyio.current_time())
        await client.flush()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.listen)
            await until(lambda: client.ready or client.ended is not None)
            yield client
            quic.close()
            await client.flush()
            tasks.cancel_scope.cancel()
