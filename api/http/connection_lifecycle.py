"""Lifecycle of one client's connection: opening, idleness, sending, eviction and closing."""

from __future__ import annotations

import math
import socket
import ssl
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import anyio
from hypercorn.config import Config as HypercornConfig
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.utils import parse_socket_addr

from staged_pool.api.config import ServerConfig
from staged_pool.api.http.fast_path import FastPath
from staged_pool.api.http.sending import send_all
from staged_pool.api.http.transports import Look, Transport
from staged_pool.api.limits.connection_limit import ConnectionLimit
from staged_pool.api.limits.server_state import GRACE_S, ServerState
from staged_pool.stages.exception_groups import first_error
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.api")

EVICTION_S: Final = 1.0
"""Seconds from an eviction to the reset of the connection; its descriptor stays open meanwhile.

In them a client that reads gets the rest of its answer.
"""


class ConnectionConfig(HypercornConfig):  # type: ignore[misc]  # Hypercorn is untyped here
    """Hypercorn's settings, with those of ours that its protocols need."""

    limits: ServerConfig
    server_state: ServerState


@dataclass(frozen=True, slots=True)
class Service:
    """Parts that all connections of one server share."""

    app: Any
    """The application, as Hypercorn's protocols call it."""
    fast_path: FastPath | None
    config: ConnectionConfig
    tls: ssl.SSLContext | None
    open: Callable[[socket.socket, ssl.SSLContext | None, Look], Awaitable[Transport]]
    """Makes the transport of an accepted socket."""
    tasks: Callable[[], Any]
    """Makes the task group of a connection, of the type that Hypercorn's protocols use."""
    context: Any
    """Hypercorn's `WorkerContext`."""
    time: Callable[[], float]
    """The event loop's clock, in seconds."""
    limit: ConnectionLimit


class ConnectionLifecycle(ABC):
    """One connection from its arrival to its end; a subclass reads the requests.

    Cancellation passes. Any other exception ends this connection, and is logged as one line.

    - It may be idle for `keep_alive_s`: no request has begun to arrive. The first request must begin to arrive within
      `head_timeout_s`.
    - While it waits for its client it may be evicted, to make room for another connection.
    - A TLS handshake must end within `head_timeout_s`.
    - The head of a request must arrive within `head_timeout_s` of its first byte. (`GeneralPath` times the body.)
    - The client must read each 64 KiB of a response within `write_timeout_s`; otherwise the connection is reset.
    - After a timeout, bytes that have arrived by then are still read: a complete request is answered.
    """

    def __init__(self, service: Service, address: str | None = None) -> None:
        self._service = service
        self.address = address
        """Address of the client, for the connection limit."""
        self._limit = service.limit
        self._scope = anyio.CancelScope()
        """Scope of the whole connection; only an eviction cancels it."""
        self._working = 0
        """Requests in progress: the connection does not wait for its client."""
        self._has_asked = False
        """At least part of a request has arrived."""
        self._limits = service.config.limits
        self._server_state = service.config.server_state
        self._transport: Transport
        self._tasks: Any = None
        self._client: tuple[str, int] | None = None
        self._protocol: Any = None
        """The `Http1` or `Http2` of the general path; most connections never need one."""
        self._sending = anyio.Lock(fast_acquire=True)
        self._receiving = anyio.CancelScope()
        """Scope of the wait for the next bytes."""
        self._receives = False
        self._pipelined = b""
        """Bytes received behind a request in progress."""
        self._answering = False
        """A request is being answered on the fast path."""
        self._idle = True
        self._in_head = False
        self._deadline = math.inf
        """Time by which the next bytes must arrive, on the event loop's clock."""
        self._took_last_look = False
        """The deadline has passed, and bytes that had arrived by then have been read."""
        self._server_state.enter(self._leave)
        self._limit.enter(self)

    async def run(self, accepted: socket.socket) -> None:
        """Serve the connection until it ends.

        Args:
            accepted: Its socket; this method closes it.
        """
        try:
            with self._scope:
                with self._server_state.timeout(self._limits.head_timeout_s) as timeout:
                    self._transport = await self._service.open(accepted, self._service.tls, self._answer_on_arrival)
                if not timeout.cancelled_caught:
                    await self._serve()
        except* OSError:
            pass  # the handshake failed, or the client left before its address was read
        except* Exception as errors:  # noqa: BLE001  # it is logged
            if accepted.fileno() >= 0 or not isinstance(first_error(errors), ValueError):
                _log_failure(errors)  # otherwise the client has left, and the descriptor is negative
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
                    await self._start_protocol()
                self._set_idle(idle=True)
                await self._receive_requests()
        finally:
            await self._close()

    # The subclass's part

    @abstractmethod
    def _answer_on_arrival(self, data: bytes) -> bool:
        """Answer received bytes within the transport's callback; False: they are left to `_receive_requests`."""

    @abstractmethod
    async def _start_protocol(self) -> None:
        """Make the protocol that TLS has agreed on."""

    @abstractmethod
    async def _receive_requests(self) -> None:
        """Receive and answer requests until the connection ends."""

    @property
    @abstractmethod
    def _has_unread(self) -> bool:
        """Bytes behind an answered request are here, and have not been read."""

    # Sending

    async def _send_event(self, event: Event) -> None:
        """Carry out an event of a protocol: send bytes, close, or update idleness.

        It is shielded from cancellation. A frame that was sent by half, or a compressed head that was not sent, would
        corrupt the rest of the connection.
        """
        if isinstance(event, Updated):
            self._set_idle(idle=event.idle)
            return
        if self._is_evicted:
            return  # Hypercorn answers 500 for a request that is cancelled
        if isinstance(event, RawData) and not self._sending.locked() and self._transport.send_nowait(event.data):
            return
        with anyio.CancelScope(shield=True):
            if isinstance(event, Closed):
                await self._close()
                await self._notify_closed()
            elif isinstance(event, RawData):
                if self._answering:
                    self.end_work()
                async with self._sending:
                    sent = await send_all(self._transport, event.data, self._server_state, self._limits.write_timeout_s)
                if self._answering:
                    self.begin_work()
                if not sent:
                    await self._notify_closed()

    async def _close(self) -> None:
        timeout_s = EVICTION_S if self._is_evicted else self._limits.write_timeout_s
        with anyio.CancelScope(shield=True), self._server_state.timeout(timeout_s):
            await self._transport.close()

    async def _notify_closed(self) -> None:
        if self._protocol is not None:
            await self._protocol.handle(Closed())

    # Deadlines

    def _set_idle(self, *, idle: bool) -> None:
        self._idle = idle
        self._has_asked = self._has_asked or not idle
        if not self._working:
            self._limit.wait(self, idle=idle)
        if idle and self._scope.deadline < math.inf:
            self._scope.cancel()  # its client has read the answer during which it was evicted
        self._in_head = self._took_last_look = False
        self._deadline = self._service.time() + (self._keep_alive_s if idle else math.inf)
        if not self._receives:
            return
        if idle and self._has_unread:
            self._receiving.cancel()
        elif self._deadline < self._receiving.deadline:  # a later deadline is applied once the earlier one has passed
            self._receiving.deadline = self._deadline

    @property
    def _keep_alive_s(self) -> float:
        """Seconds that it may be idle: none in a shutdown or while memory is short, once it has sent a request.

        A new connection may wait for `GRACE_S` in a shutdown. Its client, which has been accepted, is about to ask.
        """
        keep_alive_s, state = self._limits.keep_alive_s, self._server_state
        if self._has_asked:
            return keep_alive_s if state.keeps_alive else 0.0
        return min(keep_alive_s, self._limits.head_timeout_s, GRACE_S if state.leaving else math.inf)

    # A `Member` of the connection limit

    def evict(self) -> None:
        if self._sending.locked():  # the client may be about to read
            self._scope.deadline = self._service.time() + EVICTION_S
        else:
            self._scope.cancel()

    @property
    def _is_evicted(self) -> bool:
        return self._scope.cancel_called

    def begin_work(self) -> None:
        self._working += 1
        self._limit.work(self)

    def end_work(self) -> None:
        self._working -= 1
        if not self._working:
            self._limit.wait(self, idle=self._idle)

    def _leave(self) -> None:
        if self._idle and self._tasks is not None:
            self._set_idle(idle=True)


def _log_failure(errors: BaseExceptionGroup[Any]) -> None:
    # One line without a traceback: any client can provoke it, as often as it likes.
    first = first_error(errors)
    frame = traceback.extract_tb(first.__traceback__)[-1]
    where = f"{frame.name}:{frame.lineno}"
    log.warning("connection.failed", error=type(first).__name__, reason=str(first), where=where)
