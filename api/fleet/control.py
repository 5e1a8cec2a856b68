"""Control line between the supervisor and a child: reports, questions and orders."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeAlias

import anyio
import msgspec

from staged_pool.api.fleet.snapshot import Snapshot
from staged_pool.runtime.load_progress import LoadStatus
from staged_pool.runtime.remote.port import RING_BYTES, Rings
from staged_pool.stages.link import Link, Stream
from staged_pool.stages.ring import open_memory
from staged_pool.stages.unix_stream import UnixStream
from staged_pool.stages.wire import Frame, WireError


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Supervisor: finish the requests in flight, and end."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Child: it serves from now on."""


class Loading(msgspec.Struct, tag=True, frozen=True):
    """Engine process, by way of the supervisor to the fronts: the state of its load."""

    status: LoadStatus | None


class Beat(msgspec.Struct, tag=True, frozen=True):
    """Child: it is alive, and this is its work so far."""

    snapshot: Snapshot


class Ask(msgspec.Struct, tag=True, frozen=True):
    """Front: a client asks for a report on all processes."""

    number: int
    report: str
    """One of `metrics`, `openmetrics` and `stages`."""


class Tell(msgspec.Struct, tag=True, frozen=True):
    """Supervisor: the report."""

    number: int
    body: bytes


Order: TypeAlias = Drain | Ready | Loading | Beat | Ask | Tell

_KIND: Final = 0
_LINE: Final = b"L"
"""Message that carries the end of a line: descriptors need a byte to travel with."""

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Order)


class Control:
    """One end of a control line.

    Args:
        stream: Byte stream to the other end.
        handlers: Functions that take the orders of each class.
    """

    def __init__(self, stream: Stream, handlers: Mapping[type[Any], Callable[[Any], object]]) -> None:
        self._link = Link(stream, self._take)
        self._handlers = handlers
        self.run = self._link.run
        self.close = self._link.close

    def post(self, order: Order) -> None:
        """Send an order, without waiting."""
        self._link.post(_KIND, _encoder.encode(order))

    def _take(self, frame: Frame) -> None:
        try:
            order = _decoder.decode(frame.head)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise WireError(f"the other end sends an order that cannot be read: {error}") from error
        if (handler := self._handlers.get(type(order))) is not None:
            handler(order)


async def send_line(first: UnixStream, second: UnixStream) -> None:
    """Make a line between two processes, and send each its end: a socket, and two rings in opposite directions.

    A process that has ended in the meantime gets nothing, and its peer a line that ends at once.
    """
    ours, theirs = socket.socketpair()
    up, down = open_memory(RING_BYTES), open_memory(RING_BYTES)
    try:
        for child, files in ((first, (ours.fileno(), up, down)), (second, (theirs.fileno(), down, up))):
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await child.send_files(_LINE, files)
    finally:
        ours.close()
        theirs.close()
        os.close(up)
        os.close(down)


async def receive_line(handover: UnixStream) -> tuple[UnixStream, Rings] | None:
    """Wait for the end of a line from `send_line`.

    Returns:
        Its socket, and the descriptors of its rings, which the caller closes. None: the supervisor is gone.
    """
    try:
        files = await handover.receive_files(len(_LINE), 3)
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return None
    end, written, read = files
    return UnixStream(socket.socket(fileno=end)), Rings(written, read)
