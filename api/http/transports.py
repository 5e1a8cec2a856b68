"""Interface of a connection's byte stream, the same on asyncio and trio."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, Final, Protocol

ARRIVAL_BYTES: Final = 2**16
"""Maximum bytes that one connection buffers until they are received: hundreds of clients may send at once."""

READ_BYTES: Final = 2**18
"""Bytes of a body read after one `ServerState.wait_for_iteration`: about 0.1 ms of the event loop."""

_RESET: Final = struct.pack("ii", 1, 0)
"""Value of SO_LINGER: closing drops unsent bytes, so that the kernel keeps none for a client that never reads."""


class Transport(Protocol):
    """One connection to a client. One task receives; calls of `send` do not overlap."""

    socket: Any
    """The connected socket, for its addresses."""
    alpn: str | None
    """The protocol negotiated in TLS, if any."""

    async def receive(self) -> bytes:
        """Wait for the next bytes; b"" at the end. Cancellation loses nothing."""

    async def arrived(self) -> bytes:
        """Receive bytes that have already arrived, without waiting for more; b"" if there are none."""

    def read_now(self, most: int) -> bytes:
        """Read up to `most` bytes from the kernel's buffer; b"" if it is empty, or with TLS."""

    @property
    def has_sent_all(self) -> bool:
        """True if the connection is open and the kernel has all bytes sent so far."""

    def send_nowait(self, data: bytes) -> bool:
        """Send without waiting, if the bytes fit in the buffer. False: nothing was sent."""

    async def send(self, data: bytes | memoryview) -> None:
        """Send bytes, and return when the kernel has them. Cancellation may leave a part sent.

        Raises:
            OSError: Either side has closed.
        """

    async def send_rest(self) -> None:
        """Continue a `send` that was cancelled.

        Raises:
            OSError: Either side has closed, or the transport cannot continue.
        """

    async def close(self) -> None:
        """Send the remaining bytes and close; cancellation drops them. It does nothing when closed."""

    def cut(self) -> None:
        """Reset the connection at once."""


UNSENT_BYTES: Final = 2**17
"""Maximum bytes of one connection that the kernel buffers unsent.

By default it buffers megabytes of a response that nobody reads, memory that the server cannot account for. Two pieces
of `SEND_CHUNK_BYTES` keep any link busy.
"""


def bound_unsent(connection: socket.socket) -> None:
    """Limit the kernel's buffer of unsent bytes to `UNSENT_BYTES`, where the system can."""
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)  # Linux and macOS
    if option is not None and connection.family != getattr(socket, "AF_UNIX", None):
        connection.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)


Look = Callable[[bytes], bool]
"""Callback for arriving bytes. True: it has consumed them, and `receive` does not return them."""


def read_kernel(descriptor: int | None, most: int) -> bytes:
    """Read bytes from the kernel's buffer; b"" if it is empty. The transport notices a closed connection itself."""
    if descriptor is None:
        return b""
    try:
        return os.read(descriptor, most)
    except OSError:
        return b""


def drop_unsent(connection: Any) -> None:
    """Make the next close of a socket drop its unsent bytes."""
    with contextlib.suppress(OSError, ValueError):  # it is closed already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
