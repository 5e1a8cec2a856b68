"""DNS lookup of hosts, and the timeout of one address.

A host is resolved once, and the resolved addresses are both checked and connected to (see `http_get`). If it were
resolved once to check and once to connect, the answers could differ (DNS rebinding).
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import anyio

ADDRESS_TIMEOUT_S: Final = 1.5
"""Timeout in seconds to connect to one address of several, before the next is tried.

A host whose IPv6 is unreachable must not use up the time for an image."""

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Function that resolves a host and port to addresses, the best first. Raises OSError if there are none."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """Resolve a host by the system. Cancellation returns at once; the system's call may go on in its thread."""
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
