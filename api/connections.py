"""One client's connection: how long it may take over what, and that nothing which goes wrong in it reaches any other.

This stands in the place of Hypercorn's two connection classes, one for asyncio and one for trio. In theirs, an
unexpected exception of the protocol code runs into the task group of the whole server, which a few bytes of any client
can bring about; a client that does not read holds its connection and the server's end for ever; and each request
starts and ends a task that waits for the connection to be idle for too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import traceback
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.lowlevel
import hypercorn.protocol
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from staged_pool.api.accepting import ConnectionConfig
from staged_pool.api.asyncio_transport import AsyncioTransport
from staged_pool.api.config import ServerConfig
from staged_pool.api.express import Arriving, Express, Whole
from staged_pool.api.protocols import PIECE_BYTES, Http1, Http2, Stream
from staged_pool.api.traffic import Traffic
from staged_pool.api.transports import Cancellable, Transport
from staged_pool.api.trio_transport import TrioTransport
from staged_pool.stages.groups import first_error
from staged_pool.stages.log import get_logger

if TYPE_CHECKING:
    import trio

    from staged_pool.api.trio_transport import TrioTls

log = get_logger("staged_pool.api")

AT_ONCE_S: Final = 1.0
"""How long a body may take that goes the short way, which has no other limits for slow ones; and"""

AT_ONCE_BYTES_PER_S: Final = 2**20
"""how fast it must come if it is so large that it takes longer."""


def take_connections(worker: ModuleType) -> None:
    """Make `Connection` serve what the servers of `worker` accept from now on. Idempotent.

    Args:
        worker: `hypercorn.trio.run` or `hypercorn.asyncio.run`: the module that looks its connection class up by name.
    """
    is_trio = worker.__name__ == "hypercorn.trio.run"
    setattr(worker, "TCPServer", _serve_trio if is_trio else _serve_asyncio)  # noqa: B010  # mypy: not declared
    hypercorn.protocol.H11Protocol = Http1
    hypercorn.protocol.H2Protocol = Http2
    hypercorn.protocol.h11.HTTPStream = Stream


async def _serve_asyncio(  # noqa: PLR0917  # as Hypercorn calls it
    app: object,
    loop: object,
    config: ConnectionConfig,
    context: object,
    state: object,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    # A connection that is left when Hypercorn's patience ends is cancelled, which asyncio would report as an error.
    with contextlib.suppress(asyncio.CancelledError):
        await Connection(AsyncioTransport(reader, writer), app, config, context, state).run()


async def _serve_trio(
    app: object, config: ConnectionConfig, context: object, state: object, stream: trio.SocketStream | TrioTls
) -> None:
    await Connection(TrioTransport(stream), app, config, context, state).run()


class Connection:
    """One connection of a client, from its arrival to its end.

    Cancellation passes; any other exception ends this connection and is logged in a line.

    - One more than `max_connections` is closed at once.
    - It may be idle for `keep_alive_s`, the first time too; idle is that no request has begun to arrive.
    - A TLS handshake must end within `head_timeout_s`.
    - The head of a request must arrive within `head_timeout_s` of its first byte. (The body has its time in `Guard`.)
    - Of an answer, a piece of 64 KiB must be read within `write_timeout_s`; else the connection is reset.
    """

    def __init__(
        self, transport: Transport, app: object, config: ConnectionConfig, context: object, state: object
    ) -> None:
        self._transport = transport
        self._app = app
        self._config = config
        self._context = context
        self._state = state
        self._limits: ServerConfig = config.limits
        self._traffic: Traffic = config.traffic
        self._protocol: Any = None
        """Hypercorn's, once there is something for it: to make it is a third of what a new connection takes, and most
        never need it."""
        self._sending = anyio.Lock(fast_acquire=True)
        self._receiving: anyio.CancelScope | None = None
        self._receives = False
        """This connection's task waits for what arrives next."""
        self._express: Express | None = config.express
        self._spawner: Any = None
        self._client: Any = None
        self._answering = False
        """A request goes the short way, and its answer is not out."""
        self._answer_scope: Cancellable | None = None
        """Of its task, once that has begun."""
        self._has_left = False
        """Nobody wants the answer."""
        self._answered = anyio.Event()
        self._idle = True
        self._in_head = False
        self._patient_until = math.inf
        """When it must have received something."""

    async def run(self) -> None:
        """Serve the connection until it ends."""
        if self._traffic.connections >= self._limits.max_connections:
            self._traffic.connections_refused += 1
            self._transport.cut()
            return
        self._traffic.enter(self._leave)
        try:
            await self._serve()
        except* Exception as errors:  # noqa: BLE001  # it is logged
            _log_failure(errors)
        finally:
            self._traffic.exit(self._leave)

    async def _serve(self) -> None:
        try:
            protocol: str | None = None
            self._transport.rest()
            await self._traffic.begin()
            if self._config.tls is not None:
                with self._traffic.patience(self._limits.head_timeout_s) as patience:
                    protocol = await self._transport.handshake()
                if patience.cancelled_caught:
                    return
            async with self._transport.spawner() as spawner:
                socket = self._transport.socket
                self._spawner = spawner
                self._client = parse_socket_addr(socket.family, socket.getpeername())
                if protocol is not None:
                    await self._speak(protocol).initiate()
                self._update(idle=True)
                if self._express is not None:
                    self._transport.show_first(self._taken)
                await self._receive()
        except* OSError:
            pass  # no handshake, or the client left before it could be asked for its address
        finally:
            await self._close()

    def _speak(self, chosen: str | None = None) -> Any:
        """The protocol of this connection, made now if it has none. HTTP/1.1 is then ready; HTTP/2 is to be initiated.

        Args:
            chosen: What TLS has agreed upon, if it has.
        """
        if self._protocol is None:
            socket = self._transport.socket
            self._protocol = ProtocolWrapper(
                self._app,
                self._config,
                self._context,
                self._spawner,
                ConnectionState(self._state),
                self._config.tls is not None,
                self._client,
                parse_socket_addr(socket.family, socket.getsockname()),
                self._handle,
                chosen,
            )
        return self._protocol

    async def _receive(self) -> None:
        while True:
            if self._protocol is not None and self._protocol.protocol.awaits_body:
                if not await self._receive_body():
                    break
                continue
            data = b""
            with anyio.CancelScope(deadline=self._patient_until) as self._receiving:
                self._receives = True
                try:
                    data = await self._transport.receive()
                finally:
                    self._receives = False
            if self._receiving.cancel_called and self._transport.time() < self._patient_until:
                continue  # requests came meanwhile
            if self._receiving.cancel_called:  # out of patience, also with a client that talks on and asks nothing
                if self._protocol is not None:
                    await self._protocol.protocol.farewell()
                break
            if self._answering:
                await self._until_answered(leaves=not data)
            if not data:
                break
            if (left := await self._left_by_the_short_way(data)) is None:
                continue
            await self._speak().handle(RawData(left))
            if self._idle and self._protocol.protocol.in_head and not self._in_head:
                self._in_head = True
                self._patient_until = self._transport.time() + self._limits.head_timeout_s
        await self._tell_closed()

    async def _tell_closed(self) -> None:
        if self._protocol is not None:
            await self._protocol.handle(Closed())

    async def _receive_body(self) -> bool:
        """Receive a part of a body where it is to lie, when it has its turn. False: there is no more."""
        protocol = self._protocol.protocol
        count: int | None = 0
        self._transport.rest()
        try:
            async with self._traffic.turns:
                with protocol.room() as room:
                    count = await self._transport.receive_into(room, self._traffic.turn_s)
                await anyio.lowlevel.checkpoint()  # others on this loop come first
        finally:
            await protocol.received(count or 0)
        return count is not None

    def _taken(self, data: bytes) -> bool:
        """Whether what has arrived is answered, or goes to be answered, here and now: without a turn of the task of
        this connection, which goes on looking out for the client."""
        express = self._express
        if (
            express is None
            or not self._receives
            or self._answering
            or self._traffic.leaving
            or not self._at_a_beginning()
            or self._sending.locked()
            or not self._transport.has_sent_all
        ):
            return False
        if (answer := express.refuse_again(data)) is None:
            request = express.read(data, self._client)
            if not isinstance(request, Whole):
                return False
            answer = express.answer_at_once(request)
            if answer is None:
                if may_enter := express.has_room(len(request.body)):
                    self._begin_to_answer(express, request)
                return may_enter
        self._transport.send_nowait(answer)  # all that is answered at once is short, and nothing waits before it
        self._patient_until = self._transport.time() + self._limits.keep_alive_s  # which is looked at when it is over
        return True

    async def _left_by_the_short_way(self, data: bytes) -> bytes | None:
        """What is left to the protocol of what has arrived, and of the rest of it that has been waited for. None: the
        request is answered, or being answered, without a protocol."""
        express = self._express
        if express is None or not self._at_a_beginning():
            return data
        if (refusal := express.refuse_again(data)) is not None:
            await self._say_at_once(refusal)
            return None
        if (request := express.read(data, self._client)) is None:
            return data
        if has_come := isinstance(request, Arriving):
            if not express.may_arrive(request) or not await self._has_arrived(express, request):
                return request.so_far()
            request = request.whole()
        if (answer := express.answer_at_once(request)) is not None:
            await self._say_at_once(answer)
            return None
        if not has_come and not express.has_room(len(request.body)):
            return data
        self._begin_to_answer(express, request)
        return None

    def _begin_to_answer(self, express: Express, request: Whole) -> None:
        """In a task of its own, while this connection's looks out for the client."""
        self._update(idle=False)
        self._answering = True
        self._spawner.spawn(self._answer, express, request)

    async def _say_at_once(self, answer: bytes) -> None:
        await self._handle(RawData(answer))
        self._update(idle=True)

    async def _has_arrived(self, express: Express, request: Arriving) -> bool:
        """Receive the rest of a body; whether all of it has come, and soon enough."""
        self._update(idle=False)
        self._transport.rest()
        latest = self._transport.time() + AT_ONCE_S + request.length / AT_ONCE_BYTES_PER_S
        with express.holding(request) as came:
            while request.count < request.length:
                if self._traffic.leaving or self._transport.time() > latest:
                    return False
                async with self._traffic.turns:
                    with request.room() as room:
                        count = await self._transport.receive_into(room, self._traffic.turn_s)
                    await anyio.lowlevel.checkpoint()  # others on this loop come first
                if count is None:
                    return False
                came(count)
        return True

    async def _answer(self, express: Express, request: Whole) -> None:
        closes = False
        try:
            # Made here and not where the request arrives: that is in no task, where anyio cannot tell which loop it is
            # on, unless it was anyio that began the loop.
            with self._transport.cancellable() as self._answer_scope:
                if self._has_left:
                    self._answer_scope.cancel()
                closes = await express.answer(request, self._say)
            self._update(idle=True)
            if closes:
                await self._handle(Closed())
        finally:
            self._answering, self._answer_scope = False, None
            self._answered.set()

    async def _say(self, data: bytes) -> None:
        await self._handle(RawData(data))

    async def _until_answered(self, *, leaves: bool) -> None:
        """Wait until the request in hand has its answer, or until its work ends because its client leaves."""
        if leaves:
            self._has_left = True
            if self._answer_scope is not None:
                self._answer_scope.cancel()
        self._answered = anyio.Event()
        await self._answered.wait()

    def _at_a_beginning(self) -> bool:
        """Whether a request of HTTP/1.1 may begin with what arrives next: nothing of an earlier one is in hand."""
        if self._protocol is None or not self._idle:
            return self._idle
        protocol = self._protocol.protocol
        return isinstance(protocol, Http1) and protocol.between_requests

    async def _handle(self, event: Event) -> None:
        """What the protocol has to say to the connection. Cancellation waits until it is done: half a frame that was
        sent, and a compressed head that was not, would spoil the rest of the connection."""
        if isinstance(event, Updated):
            self._update(idle=event.idle)
            return
        if isinstance(event, RawData) and not self._sending.locked() and self._transport.send_nowait(event.data):
            return
        with anyio.CancelScope(shield=True):
            if isinstance(event, Closed):
                await self._close()
                await self._tell_closed()
            elif isinstance(event, RawData):
                async with self._sending:
                    sent = await self._send(event.data)
                if not sent:
                    await self._tell_closed()

    async def _send(self, data: bytes) -> bool:
        """Send, as long as the client reads. False: it does not, or either side has closed."""
        pieces = memoryview(data)
        for first in range(0, len(data), PIECE_BYTES):
            with self._traffic.patience(self._limits.write_timeout_s):
                try:
                    await self._transport.send(pieces[first : first + PIECE_BYTES])
                    continue
                except OSError:
                    return False
            log.info("connection.cut_off", reason="its client does not read the answer")
            self._transport.cut()
            return False
        return True

    async def _close(self) -> None:
        with anyio.CancelScope(shield=True), self._traffic.patience(self._limits.write_timeout_s):
            await self._transport.close()

    def _update(self, *, idle: bool) -> None:
        self._idle = idle
        self._in_head = False
        patience_s = math.inf if not idle else 0.0 if self._traffic.leaving else self._limits.keep_alive_s
        self._patient_until = self._transport.time() + patience_s
        # A time that is later now is looked at when the earlier one is over.
        if self._receiving is not None and self._patient_until < self._receiving.deadline:
            self._receiving.deadline = self._patient_until

    def _leave(self) -> None:
        if self._idle:
            self._update(idle=True)


def _log_failure(errors: BaseExceptionGroup[Any]) -> None:
    # One line without a traceback: any client can provoke it, as often as it likes.
    first = first_error(errors)
    frame = traceback.extract_tb(first.__traceback__)[-1]
    where = f"{frame.name}:{frame.lineno}"
    log.warning("connection.failed", error=type(first).__name__, reason=str(first), where=where)
