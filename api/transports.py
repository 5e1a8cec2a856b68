"""The bytes of one connection, as far as `connections.py` needs them to be the same on asyncio and on trio.

Each loop's half of Hypercorn hands accepted connections over in the loop's own form: `asyncio_transport.py` and
`trio_transport.py` make a `Transport` of it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Protocol, Self

RECEIVE_BYTES: Final = 2**18
"""What is received at once, at most."""

_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: closing drops what is unsent, so that the kernel does not keep it for a client that never reads."""


class Spawner(Protocol):
    """What Hypercorn's protocols start their tasks in."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Cancellable(Protocol):
    """A block whose work can be cancelled, which then ends as if it were done."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool: ...

    def cancel(self) -> None:
        """From within or without, while the block runs."""


class Transport(Protocol):
    """One connection to a client. One task receives; calls of `send` do not overlap."""

    time: Callable[[], float]
    """The event loop's, in seconds."""

    @property
    def socket(self) -> Any:
        """For its addresses."""

    def spawner(self) -> Spawner: ...

    def cancellable(self) -> Cancellable:
        """A block of one of its tasks. What it awaits may be cancelled once, or again and again until it ends."""

    async def handshake(self) -> str | None:
        """Begin TLS, on a connection that has it; which protocol the client has chosen of those offered, if it has.

        Raises:
            OSError: There is no agreement, or the client is gone.
        """

    async def receive(self) -> bytes:
        """The next bytes; none when the client has closed, or either side is gone. Cancelled, it loses nothing."""

    def show_first(self, look: Callable[[bytes], bool]) -> None:
        """Show `look` what arrives before anybody receives it, where that costs no turn of the event loop; nobody
        receives what it takes. What waits to be received, or is received into a room, is not shown."""

    def rest(self) -> None:
        """Receive nothing until somebody asks for it, as far as that can be chosen."""

    async def receive_into(self, room: memoryview, within_s: float) -> int | None:
        """Receive bytes to where they are to lie: as many as there is room for and come within so many seconds. Nothing
        is received until it is called again, or `receive` is.

        Returns:
            How many; None where `receive` would return none. Cancelled, it loses what it has received.
        """

    @property
    def has_sent_all(self) -> bool:
        """Whether everything is the kernel's, and neither side is gone: it will take more, though perhaps not all."""

    def send_nowait(self, data: bytes) -> bool:
        """Take bytes that fit into what may wait here. False: it has taken nothing."""

    async def send(self, data: bytes | memoryview) -> None:
        """Hand bytes to the kernel. Cancelled, it has handed over some of them.

        Raises:
            OSError: Either side is gone.
        """

    async def close(self) -> None:
        """Send what is unsent and close. Cancelled, it drops what is unsent. Does nothing on a closed one."""

    def cut(self) -> None:
        """Close at once, with a reset."""


def drop_unsent(connection: Any) -> None:
    """Have a socket that is closed next drop what it has not sent."""
    with contextlib.suppress(OSError, ValueError):  # closed already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
