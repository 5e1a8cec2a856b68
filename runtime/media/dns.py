"""Looking hosts up, and how long one of their addresses has to answer.

Whoever looks a name up twice, once to check it and once to connect, may get two answers (DNS rebinding). Here the
answer to the one question is what is checked, and what is dialled (see `asking`).
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import anyio

ADDRESS_S: Final = 1.5
"""How long one address of several has to answer before the next is tried: a host whose IPv6 leads nowhere must not use
up the time for an image."""

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host that is to be asked at a port, the best first. Raises OSError where there are none."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """As the machine does it. Cancelled, it returns at once, while the system's call may go on in its thread."""
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
