"""Acceptor of connections on a listening socket, for asyncio, uvloop and trio."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.abc
import sniffio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config as HypercornConfig

from staged_pool.api.app.fleet import Accepting
from staged_pool.api.asgi import App
from staged_pool.api.http.accept_loop import AcceptLoop
from staged_pool.api.http.asyncio_transport import AsyncioTransport
from staged_pool.api.http.connection_lifecycle import ConnectionConfig, Service
from staged_pool.api.http.connections import Connection
from staged_pool.api.http.fast_path import FastPath
from staged_pool.api.http.transports import bound_unsent
from staged_pool.api.http.trio_transport import TrioTransport
from staged_pool.api.limits.connection_limit import ConnectionLimit
from staged_pool.stages.log import get_logger


class HypercornLog:
    """Hypercorn's logger, which writes to our log; access logs are left to the application."""

    def __init__(self, config: HypercornConfig) -> None:
        self._log = get_logger("staged_pool.hypercorn")

    async def access(self, request: object, response: object, request_time: float) -> None:
        """Do nothing: see `request.finished`."""

    async def exception(self, message: str, *args: Any) -> None:
        self._log.exception(message % args if args else message)


class Acceptor:
    """Serves an application on one listening socket.

    Args:
        app: The application.
        fast_path: Answers usual requests. None: all requests take the general path.
        config: Settings of Hypercorn, and ours.
        tls: TLS settings; None without TLS.
    """

    def __init__(
        self, app: App, fast_path: FastPath | None, config: ConnectionConfig, tls: ssl.SSLContext | None
    ) -> None:
        backend = _asyncio if sniffio.current_async_library() == "asyncio" else _trio
        self._limit: ConnectionLimit = config.server_state.limit
        open_transport, tasks, context, clock = backend()
        self._service = Service(
            app=ASGIWrapper(app),
            fast_path=fast_path,
            config=config,
            tls=tls,
            open=open_transport,
            tasks=tasks,
            context=context,
            time=clock,
            limit=self._limit,
        )

    async def run(
        self,
        listener: socket.socket,
        until: Callable[[], Awaitable[None]],
        grace_s: float,
        accepting: Accepting | None = None,
    ) -> None:
        """Serve until `until` returns; then shut the connections down.

        Cancellation cancels the connections.

        Args:
            listener: A non-blocking, listening socket; this method closes it.
            until: Returns when no more connections are to be accepted.
            grace_s: Seconds that connections have to end before they are cancelled.
            accepting: Decides when connections are accepted. None: always.
        """
        server_state = self._service.config.server_state
        async with anyio.create_task_group() as connections:
            loop = AcceptLoop(listener, partial(self._begin, connections), self._make_room)
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(loop.run, partial(_pass, accepting))
                    await until()
                    tasks.cancel_scope.cancel()
                loop.accept_waiting()  # they would be reset; now they learn that the server ends
            finally:
                listener.close()
                server_state.end()
            await self._service.context.terminated.set()
            connections.cancel_scope.deadline = anyio.current_time() + grace_s

    async def _make_room(self) -> None:
        """Close the connection that has waited longest, and wait until one has ended."""
        self._limit.make_room()
        await self._service.config.server_state.changed()

    def _begin(self, connections: anyio.abc.TaskGroup, accepted: socket.socket, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) else None
        if not self._limit.admit(host):
            self._service.config.server_state.connections_rejected += 1
            accepted.close()
            return
        accepted.setblocking(False)
        if accepted.family != getattr(socket, "AF_UNIX", None):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            bound_unsent(accepted)
        connections.start_soon(Connection(self._service, host).run, accepted)


async def _pass(accepting: Accepting | None) -> bool:
    """Wait until connections may be accepted; see `AcceptLoop.run`."""
    if accepting is None or accepting.is_on:
        return True
    await accepting.until_on()
    return False


def _asyncio() -> tuple[Any, ...]:
    import asyncio

    from hypercorn.asyncio.task_group import TaskGroup
    from hypercorn.asyncio.worker_context import WorkerContext

    loop = asyncio.get_running_loop()
    return AsyncioTransport.open, lambda: TaskGroup(loop), WorkerContext(None), loop.time


def _trio() -> tuple[Any, ...]:
    import trio
    from hypercorn.trio.task_group import TaskGroup
    from hypercorn.trio.worker_context import WorkerContext

    return TrioTransport.open, TaskGroup, WorkerContext(None), trio.current_time
