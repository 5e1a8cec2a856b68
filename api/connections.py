"""Keeps what goes wrong in one connection, or in one HTTP/2 stream, from reaching any other.

Hypercorn 0.18 lets an unexpected exception of a connection's protocol code run into the task group of the whole server.
On trio that ends the server, on asyncio it prints a traceback; and a few bytes from any client are enough, because
HTTP/2 without TLS cannot be switched off. `isolate_connections()` replaces the two
classes that it looks up by name.
"""

from __future__ import annotations

import traceback
from types import ModuleType
from typing import Any

import h2.errors
import h2.events
import h2.exceptions
import hypercorn.protocol
import structlog
from hypercorn.events import Closed, Event
from hypercorn.protocol.h2 import H2Protocol

log = structlog.get_logger("staged_pool.api")


def isolate_connections(worker: ModuleType) -> None:
    """Make the servers that `worker` starts from now on isolate their connections. Idempotent.

    Args:
        worker: `hypercorn.trio.run` or `hypercorn.asyncio.run`: the module that looks its connection class up by name.
    """
    if not issubclass(worker.TCPServer, IsolatedConnection):
        bases = (IsolatedConnection, worker.TCPServer)
        setattr(worker, "TCPServer", type("IsolatedTCPServer", bases, {}))  # noqa: B010  # mypy: not declared
    hypercorn.protocol.H2Protocol = IsolatedH2Protocol


class IsolatedConnection:
    """Goes in front of Hypercorn's connection class. Cancellation passes; any other exception ends this connection."""

    async def run(self) -> None:
        try:
            await super().run()  # type: ignore[misc]  # of the class behind this one
        except* Exception as errors:  # noqa: BLE001  # it is logged
            _log_failure(errors)

    async def _read_data(self) -> None:
        await super()._read_data()  # type: ignore[misc]
        # The client has closed. Left alone, the task that waits for an idle connection's end would wait for all of it.
        await self.idle_task.stop()  # type: ignore[attr-defined]


class IsolatedH2Protocol(H2Protocol):  # type: ignore[misc]  # Hypercorn is untyped here
    """HTTP/2 in which one bad stream costs that stream, not all those that a proxy sends beside it.

    Hypercorn trips over data for a stream whose answer is complete (it looks the stream up, and it is gone), and over
    requests whose path is missing or not ASCII. And when a connection closes, it leaves whoever waits to send on it
    waiting for ever.
    """

    async def handle(self, event: Event) -> None:
        await super().handle(event)
        if isinstance(event, Closed):
            for buffer in list(self.stream_buffers.values()):
                await buffer.close()

    async def _handle_events(self, events: list[h2.events.Event]) -> None:
        for event in events:
            if isinstance(event, h2.events.DataReceived) and event.stream_id not in self.streams:
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                self._reset(event.stream_id, h2.errors.ErrorCodes.NO_ERROR)  # answered: no need to send on
            elif isinstance(event, h2.events.RequestReceived) and not _is_routable(event.headers):
                self._reset(event.stream_id, h2.errors.ErrorCodes.PROTOCOL_ERROR)
            else:
                await super()._handle_events([event])
        await self._flush()

    def _reset(self, stream_id: int, code: h2.errors.ErrorCodes) -> None:
        try:
            self.connection.reset_stream(stream_id, code)
        except h2.exceptions.ProtocolError:
            return  # the client has closed it already


def _is_routable(headers: list[tuple[bytes, bytes]]) -> bool:
    fields = dict(headers)
    return fields.get(b":path", b"").isascii() and b":path" in fields and fields.get(b":method", b"").isascii()


def _log_failure(errors: BaseExceptionGroup[Any]) -> None:
    # One line without a traceback: any client can provoke it, as often as it likes.
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    frame = traceback.extract_tb(first.__traceback__)[-1]
    where = f"{frame.name}:{frame.lineno}"
    log.warning("connection.failed", error=type(first).__name__, reason=str(first), where=where)
