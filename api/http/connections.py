"""One client's connection: how long it may take over what, and that nothing which goes wrong in it reaches any other.

Hypercorn's own connection classes end the whole server with an unexpected exception of the protocol code, which a few
bytes of any client can bring about, and a client that does not read holds them for ever. So this class stands in their
place, between the bytes of a client and Hypercorn's protocols.
"""

from __future__ import annotations

import math
import socket
import ssl
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import anyio
import anyio.lowlevel
from hypercorn.config import Config as HypercornConfig
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H2ProtocolAssumedError
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from staged_pool.api import status
from staged_pool.api.config import ServerConfig
from staged_pool.api.http.fast_path import FastPath, FastRequest
from staged_pool.api.http.http2.protocol import Http2
from staged_pool.api.http.protocol.hypercorn_protocols import Http1
from staged_pool.api.http.sending import send_all
from staged_pool.api.http.transports import READ_BYTES, Look, Transport
from staged_pool.api.limits.connection_limit import CONNECTION, ConnectionLimit
from staged_pool.api.limits.server_state import ServerState
from staged_pool.stages.exception_groups import first_error
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.api")

AT_ONCE_S: Final = 1.0
"""How long a body may take on the fast path, which has no other limit for slow ones; and"""

AT_ONCE_BYTES_PER_S: Final = 2**20
"""how fast it must come if it is so large that it takes longer."""

AHEAD_BYTES: Final = 2**18
"""What is received behind a request in hand, to notice that its client leaves. Clients that send more wait."""

EVICTION_S: Final = 1.0
"""What a client gets to close a connection that is evicted, before it is reset: it has a file open meanwhile."""


class ConnectionConfig(HypercornConfig):  # type: ignore[misc]  # Hypercorn is untyped here
    """Hypercorn's settings, and what its protocols need of ours."""

    limits: ServerConfig
    server_state: ServerState


@dataclass(frozen=True, slots=True)
class Service:
    """What the connections of one server share."""

    app: Any
    """The application, as Hypercorn's protocols call it."""
    fast_path: FastPath | None
    config: ConnectionConfig
    tls: ssl.SSLContext | None
    open: Callable[[socket.socket, ssl.SSLContext | None, Look], Awaitable[Transport]]
    """Makes the transport of an accepted socket."""
    tasks: Callable[[], Any]
    """Makes what Hypercorn's protocols start tasks in."""
    context: Any
    """Hypercorn's `WorkerContext`."""
    time: Callable[[], float]
    """The event loop's clock, in seconds."""
    limit: ConnectionLimit


class Connection:
    """One connection of a client, from its arrival to its end.

    Cancellation passes; any other exception ends this connection and is logged in a line.

    - It may be idle for `keep_alive_s`; idle is that no request has begun to arrive. The first one must begin within
      `head_timeout_s`.
    - While it waits for its client it may be evicted, to make room for another.
    - A TLS handshake must end within `head_timeout_s`.
    - The head of a request must arrive within `head_timeout_s` of its first byte. (`GeneralPath` times the body.)
    - Of an answer, a piece of 64 KiB must be read within `write_timeout_s`; else the connection is reset.
    - Whatever has arrived when its time is over is looked at first: a request that is here is answered.
    """

    def __init__(self, service: Service, address: str | None = None) -> None:
        self._service = service
        self.address = address
        """The client's, for the limit of connections."""
        self._limit = service.limit
        self._scope = anyio.CancelScope()
        """All of it; cancelled by an eviction."""
        self._is_evicted = False
        self._working = 0
        """Requests that are worked on, and wait for nobody here."""
        self._has_asked = False
        """A request has come, if not a whole one."""
        self._limits = service.config.limits
        self._server_state = service.config.server_state
        self._fast_path = service.fast_path
        self._transport: Transport
        self._tasks: Any = None
        self._client: tuple[str, int] | None = None
        self._protocol: Any = None
        """Hypercorn's, once there is something for it: most connections never need it."""
        self._sending = anyio.Lock(fast_acquire=True)
        self._receiving = anyio.CancelScope()
        """The wait for what arrives next."""
        self._receives = False
        self._ahead = b""
        """Received behind a request in hand."""
        self._answering = False
        """A request is answered on the fast path."""
        self._answer_scope: anyio.CancelScope | None = None
        """The scope of that answer, once its task has begun."""
        self._has_left = False
        """Nobody wants the answer."""
        self._idle = True
        self._in_head = False
        self._deadline = math.inf
        """When it must have received something."""
        self._looked_last = False
        """Its time is over, and what had arrived by then has been taken."""
        self._server_state.enter(self._leave)
        self._limit.enter(self)

    async def run(self, accepted: socket.socket) -> None:
        """Serve the connection until it ends.

        Args:
            accepted: Its socket. Owned by this from here on.
        """
        try:
            with self._scope:
                with self._server_state.timeout(self._limits.head_timeout_s) as timeout:
                    self._transport = await self._service.open(accepted, self._service.tls, self._taken)
                if not timeout.cancelled_caught:
                    await self._serve()
        except* OSError:
            pass  # no handshake, or the client left before it could be asked for its address
        except* Exception as errors:  # noqa: BLE001  # it is logged
            if accepted.fileno() >= 0 or not isinstance(first_error(errors), ValueError):
                _log_failure(errors)  # else the client is gone, and its descriptor negative
        finally:
            accepted.close()
            self._limit.leave(self)
            self._server_state.exit(self._leave)

    async def _serve(self) -> None:
        try:
            async with self._service.tasks() as self._tasks:
                connected = self._transport.socket
                self._client = parse_socket_addr(connected.family, connected.getpeername())
                if self._service.tls is not None:
                    self._speak(Http2 if self._transport.alpn == "h2" else Http1)
                    await self._protocol.initiate()
                self._update(idle=True)
                await self._talk()
        finally:
            if self._is_evicted and not self._idle:
                self._transport.cut()  # what it would wait for is what it was evicted for
            await self._close()

    async def _talk(self) -> None:
        while True:
            if self._ahead and not self._is_engaged:
                data, self._ahead = self._ahead, b""
                await anyio.lowlevel.checkpoint()  # answers that take no time must not come one after the other
            elif self._protocol is not None and self._protocol.has_more:
                await self._protocol.go_on()
                self._watch_head()
                continue
            elif (given := await self._next()) is None:
                continue
            elif self._is_engaged or self._ahead:
                data, self._ahead = given, self._ahead + given
                if data:
                    continue
            else:
                data = given
            if not data:
                break
            try:
                await self._take(data)
            except MemoryError:
                log.warning("connection.no_memory")
                await self._say_no_memory()
                break
        self._has_left = True
        if self._answer_scope is not None:
            self._answer_scope.cancel()
        await self._tell_closed()

    async def _say_no_memory(self) -> None:
        """Answer a request of HTTP/1.1 whose bytes there was no memory for, where nothing else was said to it."""
        if isinstance(self._protocol, Http2) or self._is_engaged:
            return
        code, body = status.problem(MemoryError()).answer()
        lines = b"content-type: application/json\r\ncontent-length: %d\r\nretry-after: 1\r\nconnection: close" % len(
            body
        )
        await self._handle(RawData(b"HTTP/1.1 %d \r\n%s\r\n\r\n%s" % (code, lines, body)))

    async def _next(self) -> bytes | None:
        """What arrives next; nothing at the end, of the client or of patience. None: there is something else to do."""
        if self._service.time() < self._deadline:
            self._receives = True
            try:
                with anyio.CancelScope(deadline=self._deadline) as self._receiving:
                    if len(self._ahead) >= AHEAD_BYTES:
                        await anyio.sleep_forever()  # until the request in hand has its answer
                    return await self._transport.receive()
            finally:
                self._receives = False
        if self._service.time() < self._deadline or self._has_more:
            return None  # requests came meanwhile, or one has its answer
        if not self._looked_last:
            self._looked_last = True  # once: a client that talks on and asks nothing is no reason to stay
            if arrived := await self._transport.arrived():
                return arrived
        if self._protocol is not None:
            await self._protocol.farewell()
        return b""

    async def _take(self, data: bytes) -> None:
        """Do what can be done with what has arrived."""
        parts: Iterable[bytes] = (data,)
        if self._fast_path is not None and self._at_a_beginning():
            request = self._fast_path.read(data, self._client, self)
            if request is not None and await self._taken_fast(self._fast_path, request):
                return
            if request is not None:
                parts = request.give_up()
        if self._protocol is None:
            self._speak(Http1)
        for part in parts:
            if part:
                await self._give(part)
        self._watch_head()

    async def _give(self, data: bytes) -> None:
        """Give the protocol what has arrived; it may turn out to be HTTP/2."""
        if not self._idle:
            await self._server_state.turn()
        had_asked = self._has_asked
        try:
            await self._protocol.handle(RawData(data))
        except H2ProtocolAssumedError as preface:
            self._has_asked = had_asked  # to Hypercorn it was a request of HTTP/1.1 until now
            self._speak(Http2)
            await self._protocol.initiate()
            await self._protocol.handle(RawData(preface.data))

    def _watch_head(self) -> None:
        if self._idle and self._protocol.in_head and not self._in_head:
            self._in_head = self._has_asked = True
            self._limit.wait(self, idle=False)
            self._deadline = self._service.time() + self._limits.head_timeout_s

    def _speak(self, kind: type[Http1 | Http2]) -> None:
        """Make the protocol of this connection."""
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
            self._handle,
        )

    def _at_a_beginning(self) -> bool:
        """A request of HTTP/1.1 may begin with what arrives next: nothing of an earlier one is in hand."""
        return self._idle and (self._protocol is None or self._protocol.between_requests)

    @property
    def _is_engaged(self) -> bool:
        """A request is in hand, and what arrives is behind it."""
        return self._answering or (self._protocol is not None and self._protocol.is_answering)

    @property
    def _has_more(self) -> bool:
        """What came behind a request, which has its answer, is here and not looked at."""
        return bool(self._ahead) or (self._protocol is not None and bool(self._protocol.has_more))

    # The fast path

    def _taken(self, data: bytes) -> bool:
        """Answer, or begin to answer, what has arrived, without a turn of this connection's task; False if it cannot.

        The task goes on looking out for the client.
        """
        fast_path = self._fast_path
        if (
            fast_path is None
            or not self._receives
            or self._answering
            or self._ahead
            or self._server_state.leaving
            or not self._at_a_beginning()
            or self._sending.locked()
            or not self._transport.has_sent_all
        ):
            return False
        try:
            request = fast_path.read(data, self._client, self)
            if request is None or request.missing or request.rest:
                return False
            given = fast_path.admit(request)
            if given is None:
                given = fast_path.decide(request)
        except MemoryError:
            return False  # the task is told so too, and can answer; the event loop would end the connection
        if given is None:
            self._begin_to_answer(fast_path, request)
            return True
        if given is False:
            return False
        self._has_asked = True
        self._limit.work(self)
        self._limit.wait(self, idle=True)
        self._transport.send_nowait(given)  # all that is answered at once is short, and nothing waits before it
        self._deadline = self._service.time() + self._limits.keep_alive_s  # which is looked at when it is over
        return True

    async def _taken_fast(self, fast_path: FastPath, request: FastRequest) -> bool:
        """Answer, or begin to answer, a request; False if it is left to the general path, with all that has arrived."""
        given = fast_path.admit(request)
        if given is None:
            if request.missing and not await self._has_arrived(fast_path, request):
                return False
            given = fast_path.decide(request)
        if given is False:
            return False
        self._ahead = request.rest
        if given is None:
            self._begin_to_answer(fast_path, request)
        else:
            await self._handle(RawData(given))
            self._update(idle=True)
        return True

    async def _has_arrived(self, fast_path: FastPath, request: FastRequest) -> bool:
        """Receive the rest of a body; False if it does not come soon enough, or at all."""
        self._update(idle=False)
        with fast_path.receiving(request) as add:
            with self._server_state.timeout(AT_ONCE_S + request.length / AT_ONCE_BYTES_PER_S):
                while request.missing:
                    if not (data := await self._transport.receive()):
                        return False
                    add(data)
                    while data and request.missing:  # a turn is for what is here: nobody waits in it for a client
                        await self._server_state.turn()
                        add(data := self._transport.read_now(min(request.missing, READ_BYTES)))
            if not request.missing:
                await request.join(self._server_state)
        return not request.missing

    def _begin_to_answer(self, fast_path: FastPath, request: FastRequest) -> None:
        """Answer in a task of its own, while this connection's looks out for the client."""
        self._update(idle=False)
        self._answering = True
        self.begin_work()
        self._tasks.spawn(self._answer, fast_path, request)

    async def _answer(self, fast_path: FastPath, request: FastRequest) -> None:
        closes = False
        try:
            with anyio.CancelScope() as self._answer_scope:
                if self._has_left:
                    self._answer_scope.cancel()
                closes = await fast_path.answer(request, self._say)
        finally:
            self._answering, self._answer_scope = False, None
            self.end_work()
        self._update(idle=True)
        if closes:
            await self._handle(Closed())

    async def _say(self, data: bytes) -> None:
        await self._handle(RawData(data))

    # What goes out

    async def _handle(self, event: Event) -> None:
        """Do what the protocol has to say to the connection. Cancellation waits until it is done: half a frame that
        was sent, and a compressed head that was not, would spoil the rest of the connection."""
        if isinstance(event, Updated):
            self._update(idle=event.idle)
            return
        if self._is_evicted:
            return  # Hypercorn answers 500 for a request that is cancelled
        if isinstance(event, RawData) and not self._sending.locked() and self._transport.send_nowait(event.data):
            return
        with anyio.CancelScope(shield=True):
            if isinstance(event, Closed):
                await self._close()
                await self._tell_closed()
            elif isinstance(event, RawData):
                if self._answering:
                    self.end_work()
                async with self._sending:
                    sent = await send_all(self._transport, event.data, self._server_state, self._limits.write_timeout_s)
                if self._answering:
                    self.begin_work()
                if not sent:
                    await self._tell_closed()

    async def _close(self) -> None:
        timeout_s = EVICTION_S if self._is_evicted else self._limits.write_timeout_s
        with anyio.CancelScope(shield=True), self._server_state.timeout(timeout_s):
            await self._transport.close()

    async def _tell_closed(self) -> None:
        if self._protocol is not None:
            await self._protocol.handle(Closed())

    # How long it may take

    def _update(self, *, idle: bool) -> None:
        self._idle = idle
        self._has_asked = self._has_asked or not idle
        if not self._working:
            self._limit.wait(self, idle=idle)
        self._in_head = self._looked_last = False
        timeout_s = math.inf if not idle else 0.0 if self._server_state.leaving else self._keep_alive_s
        self._deadline = self._service.time() + timeout_s
        if not self._receives:
            return
        if idle and self._has_more:
            self._receiving.cancel()
        elif self._deadline < self._receiving.deadline:  # a later one is looked at when the earlier one is over
            self._receiving.deadline = self._deadline

    @property
    def _keep_alive_s(self) -> float:
        """Seconds that it may be idle: few for a client that has never asked anything, or while memory is short."""
        keep_alive_s = self._limits.keep_alive_s
        if self._has_asked and not self._server_state.keeps_alive:
            return 0.0
        return keep_alive_s if self._has_asked else min(keep_alive_s, self._limits.head_timeout_s)

    # What the limit of connections asks

    def evict(self) -> None:
        self._is_evicted = True
        self._scope.cancel()

    def begin_work(self) -> None:
        self._working += 1
        self._limit.work(self)

    def end_work(self) -> None:
        self._working -= 1
        if not self._working:
            self._limit.wait(self, idle=self._idle)

    def _leave(self) -> None:
        if self._idle and self._tasks is not None:
            self._update(idle=True)


def _log_failure(errors: BaseExceptionGroup[Any]) -> None:
    # One line without a traceback: any client can provoke it, as often as it likes.
    first = first_error(errors)
    frame = traceback.extract_tb(first.__traceback__)[-1]
    where = f"{frame.name}:{frame.lineno}"
    log.warning("connection.failed", error=type(first).__name__, reason=str(first), where=where)
