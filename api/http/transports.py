"""The bytes of one connection, as far as `connections.py` needs them to be the same on asyncio and on trio."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, Final, Protocol

ARRIVAL_BYTES: Final = 2**16
"""Bytes of one connection that wait here at most until somebody receives them: hundreds may begin to send at once."""

READ_BYTES: Final = 2**18
"""Bytes that are read at once from a connection that has its turn: the event loop needs about 0.1 ms for them."""

_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: closing drops what is unsent, so that the kernel does not keep it for a client that never reads."""


class Transport(Protocol):
    """One connection to a client. One task receives; calls of `send` do not overlap."""

    socket: Any
    """For its addresses."""
    alpn: str | None
    """The protocol that TLS has agreed upon, if it has."""

    async def receive(self) -> bytes:
        """Wait for the next bytes; none at the end. Cancelled, it loses nothing."""

    async def arrived(self) -> bytes:
        """Receive the bytes that the client has sent by now; none if there are none."""

    def read_now(self, most: int) -> bytes:
        """Read up to `most` bytes that wait in the kernel; none if there are none, or TLS has to see them first."""

    @property
    def has_sent_all(self) -> bool:
        """Everything is the kernel's, and neither side is gone: it takes more, though perhaps not all."""

    def send_nowait(self, data: bytes) -> bool:
        """Take bytes that fit into what may wait here. False: nothing was taken."""

    async def send(self, data: bytes | memoryview) -> None:
        """Hand bytes to the kernel. Cancelled, some of them are handed over.

        Raises:
            OSError: Either side is gone.
        """

    async def send_rest(self) -> None:
        """Go on with a `send` that was cancelled.

        Raises:
            OSError: Either side is gone, or it cannot go on.
        """

    async def close(self) -> None:
        """Send what is unsent and close. Cancelled, it drops what is unsent. Does nothing on a closed one."""

    def cut(self) -> None:
        """Close at once, with a reset."""


UNSENT_BYTES: Final = 2**17
"""Bytes of one connection that the kernel takes at most before it has sent them. Without this it takes megabytes of an
answer that nobody reads, which nothing here could count; two pieces are enough to keep any line busy."""


def bound_unsent(connection: socket.socket) -> None:
    """Have the kernel take no more of an answer than it will send soon, where it can be told so."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)  # Linux and macOS
    if option is not None and connection.family != getattr(socket, "AF_UNIX", None):
        connection.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)


Look = Callable[[bytes], bool]
"""Sees what arrives before anybody receives it; nobody receives what it takes (True)."""


def read_kernel(descriptor: int | None, most: int) -> bytes:
    """Read bytes that wait in the kernel; none if there are none. The transport finds out about an end."""
    if descriptor is None:
        return b""
    try:
        return os.read(descriptor, most)
    except OSError:
        return b""


def drop_unsent(connection: Any) -> None:
    """Have a socket that is closed next drop what it has not sent."""
    with contextlib.suppress(OSError, ValueError):  # closed already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
