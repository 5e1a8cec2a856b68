"""Control line between the supervisor and a child: reports, questions and orders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from staged_pool.api.fleet.snapshot import Snapshot
from staged_pool.runtime.load_progress import LoadStatus
from staged_pool.stages.link import Link, Stream
from staged_pool.stages.wire import Frame, FrameLimits, WireError


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Supervisor: finish the requests in flight, and end."""


class Listening(msgspec.Struct, tag=True, frozen=True):
    """Front: it can accept connections, and has to know whether other fronts serve."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Child: it serves from now on."""


class Others(msgspec.Struct, tag=True, frozen=True):
    """Supervisor, to a front that is listening and not ready: whether other fronts serve."""

    serve: bool


class Lost(msgspec.Struct, tag=True, frozen=True):
    """Front: a line to the engine process has ended."""

    number: int
    """Number of the line."""


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


Order: TypeAlias = Drain | Listening | Ready | Others | Lost | Loading | Beat | Ask | Tell

_KIND: Final = 0
MOST_ORDER_BYTES: Final = 64 << 20
"""Longest order. Reports on a server with thousands of tenants have some megabytes."""

BEHIND_BYTES: Final = 1 << 18
"""Bytes that wait to be sent from which on no report is added to them: the other end stands still."""

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Order)


class Control:
    """One end of a control line.

    Args:
        stream: Byte stream to the other end.
        handlers: Functions that take the orders of each class.
    """

    def __init__(self, stream: Stream, handlers: Mapping[type[Any], Callable[[Any], object]]) -> None:
        self._link = Link(stream, self._take, limits_of)
        self._handlers = handlers
        self.run = self._link.run
        self.close = self._link.close

    def post(self, order: Order) -> None:
        """Send an order, without waiting."""
        self._link.post(_KIND, _encoder.encode(order))

    def post_report(self, report: Beat | Loading) -> None:
        """Send a report that the next one replaces. It is dropped while the other end reads nothing."""
        if self._link.unsent_bytes < BEHIND_BYTES:
            self.post(report)

    def _take(self, frame: Frame) -> None:
        try:
            order = _decoder.decode(frame.head)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise WireError(f"the other end sends an order that cannot be read: {error}") from error
        if (handler := self._handlers.get(type(order))) is not None:
            handler(order)


def limits_of(kind: int) -> FrameLimits:
    """Return the limits of a frame with an order.

    Raises:
        WireError: It has another kind.
    """
    if kind != _KIND:
        raise WireError(f"the other end sends a frame of the unknown kind {kind}")
    return FrameLimits(MOST_ORDER_BYTES, 0)
