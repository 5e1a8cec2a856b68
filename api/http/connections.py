"""One client's connection: receives requests, and gives each to the fast or the general path.

It stands between the bytes of a client and Hypercorn's protocols, in the place of Hypercorn's own connection classes.
In those, an unexpected exception of the protocol code ends the whole server, and a few bytes of any client can cause
one. Also, a client that does not read its response keeps such a connection open forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import anyio
import anyio.lowlevel
from hypercorn.events import Closed, RawData
from hypercorn.protocol.h11 import H2ProtocolAssumedError
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from staged_pool.api import status
from staged_pool.api.http.connection_lifecycle import ConnectionLifecycle, Service
from staged_pool.api.http.fast_path import FastPath, FastRequest
from staged_pool.api.http.http2.protocol import Http2
from staged_pool.api.http.protocol.hypercorn_protocols import Http1
from staged_pool.api.http.transports import READ_BYTES
from staged_pool.api.limits.connection_limit import CONNECTION
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.api")

FAST_BODY_S: Final = 1.0
"""Seconds that a body on the fast path may take, beside its time at `FAST_BODY_BYTES_PER_S`."""

FAST_BODY_BYTES_PER_S: Final = 2**20
"""Bytes per second at which a large body on the fast path must arrive."""

PIPELINED_BYTES: Final = 2**18
"""Maximum bytes received behind a request in progress. Beyond it nothing is read until that request is answered."""


class Connection(ConnectionLifecycle):
    """One connection of a client, over HTTP/1.1 or HTTP/2."""

    def __init__(self, service: Service, address: str | None = None) -> None:
        super().__init__(service, address)
        self._fast_path = service.fast_path
        self._answer_scope: anyio.CancelScope | None = None
        """Scope of the answer on the fast path, once its task runs."""
        self._has_left = False
        """The client has left: nobody reads the answer."""

    async def _receive_requests(self) -> None:
        while True:
            if self._pipelined and not self._has_request:
                data, self._pipelined = self._pipelined, b""
                await anyio.lowlevel.checkpoint()  # quick answers to pipelined requests must not block the event loop
            elif self._protocol is not None and self._protocol.has_more:
                await self._protocol.resume()
                self._watch_head()
                continue
            elif (received := await self._receive_next()) is None:
                continue
            elif self._has_request or self._pipelined:
                data, self._pipelined = received, self._pipelined + received
                if data:
                    continue
            else:
                data = received
            if not data:
                break
            try:
                await self._process(data)
            except MemoryError:
                log.warning("connection.no_memory")
                await self._answer_out_of_memory()
                break
        self._has_left = True
        if self._answer_scope is not None:
            self._answer_scope.cancel()
        await self._notify_closed()

    async def _answer_out_of_memory(self) -> None:
        """Answer an HTTP/1.1 request that could not be read for lack of memory."""
        if isinstance(self._protocol, Http2) or self._has_request:
            return
        code, body = status.problem(MemoryError()).answer()
        lines = b"content-type: application/json\r\ncontent-length: %d\r\nretry-after: 1\r\nconnection: close" % len(
            body
        )
        await self._send_event(RawData(b"HTTP/1.1 %d \r\n%s\r\n\r\n%s" % (code, lines, body)))

    async def _receive_next(self) -> bytes | None:
        """Receive the next bytes; b"" when the client has left or timed out.

        None: the caller looks at its state again, for a request has been answered, or others have arrived.
        """
        if self._service.time() < self._deadline:
            self._receives = True
            try:
                with anyio.CancelScope(deadline=self._deadline) as self._receiving:
                    if len(self._pipelined) >= PIPELINED_BYTES:
                        await anyio.sleep_forever()  # until the request in progress is answered
                    return await self._transport.receive()
            finally:
                self._receives = False
        if self._service.time() < self._deadline or self._has_unread:
            return None
        if not self._took_last_look:
            self._took_last_look = True  # once: a client must not keep the connection by bytes that are no request
            if arrived := await self._transport.arrived():
                return arrived
        if self._protocol is not None:
            await self._protocol.send_goaway()
        return b""

    async def _process(self, data: bytes) -> None:
        """Pass received bytes to the fast path, or else to the general path's protocol."""
        parts: Iterable[bytes] = (data,)
        if self._fast_path is not None and self._between_requests():
            request = self._fast_path.read(data, self._client, self)
            if request is not None and await self._took_fast_path(self._fast_path, request):
                return
            if request is not None:
                parts = request.give_up()
        if self._protocol is None:
            self._make_protocol(Http1)
        for part in parts:
            if part:
                await self._pass_to_protocol(part)
        self._watch_head()

    async def _pass_to_protocol(self, data: bytes) -> None:
        """Pass received bytes to the protocol, or to HTTP/2 after its preface."""
        if not self._idle:
            await self._server_state.wait_for_iteration()
        had_asked = self._has_asked
        try:
            await self._protocol.handle(RawData(data))
        except H2ProtocolAssumedError as preface:
            self._has_asked = had_asked  # Hypercorn took the preface for a request of HTTP/1.1
            self._make_protocol(Http2)
            await self._protocol.initiate()
            await self._protocol.handle(RawData(preface.data))

    def _watch_head(self) -> None:
        """Start the deadline of a request's head once its first bytes are here."""
        if self._idle and self._protocol.in_head and not self._in_head:
            self._in_head = self._has_asked = True
            self._limit.wait(self, idle=False)
            self._deadline = self._service.time() + self._limits.head_timeout_s

    async def _start_protocol(self) -> None:
        self._make_protocol(Http2 if self._transport.alpn == "h2" else Http1)
        await self._protocol.initiate()

    def _make_protocol(self, kind: type[Http1 | Http2]) -> None:
        service, connected = self._service, self._transport.socket
        self._protocol = kind(
            service.app,
            service.config,
            service.context,
            self._tasks,
            ConnectionState({CONNECTION: self}),
            service.tls is not None,
            self._client,
            parse_socket_addr(connected.family, connected.getsockname()),
            self._send_event,
        )

    def _between_requests(self) -> bool:
        """Tell if the next bytes may begin a request of HTTP/1.1: no earlier one is in progress."""
        return self._idle and (self._protocol is None or self._protocol.between_requests)

    @property
    def _has_request(self) -> bool:
        """A complete request is in progress, and further bytes belong to the next one."""
        return self._answering or (self._protocol is not None and self._protocol.is_answering)

    @property
    def _has_unread(self) -> bool:
        return bool(self._pipelined) or (self._protocol is not None and bool(self._protocol.has_more))

    # The fast path

    def _answer_on_arrival(self, data: bytes) -> bool:
        fast_path = self._fast_path
        if (
            fast_path is None
            or not self._receives
            or self._answering
            or self._pipelined
            or self._server_state.leaving
            or not self._between_requests()
            or self._sending.locked()
            or not self._transport.has_sent_all
        ):
            return False
        try:
            request = fast_path.read(data, self._client, self)
            if request is None or request.missing or request.rest:
                return False
            decision = fast_path.admit(request)
            if decision is None:
                decision = fast_path.decide(request)
        except MemoryError:
            return False  # the connection's task runs into it too, and can answer; here it would end the connection
        if decision is None:
            self._start_answer(fast_path, request)
            return True
        if decision is False:
            return False
        self._has_asked = True
        self._limit.work(self)
        self._limit.wait(self, idle=True)
        self._transport.send_nowait(decision)  # immediate responses are short, and nothing is queued before them
        self._deadline = self._service.time() + self._limits.keep_alive_s  # applied once the earlier one has passed
        return True

    async def _took_fast_path(self, fast_path: FastPath, request: FastRequest) -> bool:
        """Answer a request, or start to; False: the general path gets all that has arrived."""
        decision = fast_path.admit(request)
        if decision is None:
            if request.missing and not await self._receive_body(fast_path, request):
                return False
            decision = fast_path.decide(request)
        if decision is False:
            return False
        self._pipelined = request.rest
        if decision is None:
            self._start_answer(fast_path, request)
        else:
            await self._send_event(RawData(decision))
            self._has_asked = True
            self._set_idle(idle=True)
        return True

    async def _receive_body(self, fast_path: FastPath, request: FastRequest) -> bool:
        """Receive the rest of a body; False if it does not arrive in time."""
        self._set_idle(idle=False)
        with fast_path.receiving(request) as add:
            with self._server_state.timeout(FAST_BODY_S + request.length / FAST_BODY_BYTES_PER_S):
                while request.missing:
                    if not (data := await self._transport.receive()):
                        return False
                    add(data)
                    while data and request.missing:  # only for received bytes: no wait for the client holds the lock
                        await self._server_state.wait_for_iteration()
                        add(data := self._transport.read_now(min(request.missing, READ_BYTES)))
            if not request.missing:
                await request.join(self._server_state)
        return not request.missing

    def _start_answer(self, fast_path: FastPath, request: FastRequest) -> None:
        """Answer in a separate task: the connection's task notices if the client leaves."""
        self._set_idle(idle=False)
        self._answering = True
        self.begin_work()
        self._tasks.spawn(self._answer, fast_path, request)

    async def _answer(self, fast_path: FastPath, request: FastRequest) -> None:
        closes = False
        try:
            with anyio.CancelScope() as self._answer_scope:
                if self._has_left:
                    self._answer_scope.cancel()
                closes = await fast_path.answer(request, self._send)
        finally:
            self._answering, self._answer_scope = False, None
            self.end_work()
        self._set_idle(idle=True)
        if closes:
            await self._send_event(Closed())

    async def _send(self, data: bytes) -> None:
        await self._send_event(RawData(data))
