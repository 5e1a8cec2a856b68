"""Looking hosts up, and connecting to the very addresses that were checked.

Whoever looks a name up twice, once to check it and once to connect, may get two answers (DNS rebinding). Here the
answer to the one question is what is checked, and what is dialled; the name goes on in the `Host` header, in TLS, and
in what the host's certificate must say.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

import anyio
import anyio.abc
from anyio.streams.tls import TLSStream

ADDRESS_S: Final = 1.5
"""How long one address of several has to answer before the next is tried: a host whose IPv6 leads nowhere must not use
up the time for a picture."""

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host that is to be asked at a port, the best first. Raises OSError where there are none."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """As the machine does it. Cancelled, it returns at once, while the system's call may go on in its thread."""
    found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


@asynccontextmanager
async def connected(
    addresses: Sequence[str], port: int, *, name: str, tls: ssl.SSLContext | None
) -> AsyncIterator[anyio.abc.ByteStream]:
    """A connection to the first of some addresses that answers; closed at the end of the block, without waiting for
    the other side.

    Args:
        addresses: At least one.
        port: Of all of them.
        name: Whose certificate is asked for.
        tls: None: the connection is in the clear.

    Raises:
        OSError: None of them answers, or the certificate is not of that name or of nobody that is trusted.
    """
    async with await _dial(addresses, port) as stream:
        if tls is None:
            yield stream
        else:
            yield await TLSStream.wrap(stream, hostname=name, ssl_context=tls, standard_compatible=False)


async def _dial(addresses: Sequence[str], port: int) -> anyio.abc.SocketStream:
    *others, last = addresses
    for address in others:
        with anyio.move_on_after(ADDRESS_S):
            try:
                return await anyio.connect_tcp(address, port)
            except OSError:
                continue
    return await anyio.connect_tcp(last, port)
