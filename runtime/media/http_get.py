"""One GET request over one connection to an address that was checked, and nothing that a client of browsers would add.

httpx is asked for the address itself, so that it looks nothing up. The name of the host goes on in the `Host` header,
in TLS, and in what the host's certificate must say.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.abc

from staged_pool.runtime.media import dns as dialing
from staged_pool.runtime.media.urls import WebUrl

if TYPE_CHECKING:
    import httpx

_HEADERS: Final = (
    ("User-Agent", "staged-pool"),
    ("Accept", "image/*"),
    ("Accept-Encoding", "identity"),
    ("Connection", "close"),
)


@asynccontextmanager
async def asked(url: WebUrl, addresses: Sequence[str], tls: ssl.SSLContext) -> AsyncIterator[httpx.Response]:
    """The head of the answer, whose body is yet to be read; its connection is closed at the end of the block, without
    waiting for the other side.

    Args:
        url: Of whose host these are the addresses.
        addresses: At least one. The first that answers is asked.
        tls: Whom a host's certificate must be from. Not looked at for http.

    Raises:
        httpx.TransportError: None of the addresses answers, the certificate is not of that name or of nobody that is
            trusted, or what comes is no HTTP.
    """
    import httpx  # here: most servers fetch nothing

    connections = _Connections()
    try:
        # The transport without its client, which would keep cookies, and fails on redirects to what it cannot read.
        async with httpx.AsyncHTTPTransport(verify=tls, trust_env=False) as transport:
            response = await _first_answer(transport, url, addresses, connections)
            try:
                yield response
            finally:
                with anyio.CancelScope(shield=True):
                    await response.aclose()
    finally:
        with anyio.CancelScope(shield=True):
            await connections.close()


@asynccontextmanager
async def whole(response: httpx.Response) -> AsyncIterator[AsyncIterator[bytes]]:
    """The pieces of a body, as they come and as they are; what is not read of them by the end of the block never is.

    Raises:
        httpx.TransportError: It breaks off, or is no HTTP.
    """
    import httpx

    pieces = response.aiter_raw()
    try:
        yield pieces
    finally:
        # httpx has five generators inside each other, which only end by running out: trio warns of any that do not.
        with anyio.CancelScope(shield=True), suppress(httpx.TransportError):
            await response.aclose()
            async for _ in pieces:
                pass  # what has arrived already


async def _first_answer(
    transport: httpx.AsyncHTTPTransport, url: WebUrl, addresses: Sequence[str], connections: _Connections
) -> httpx.Response:
    import httpx

    *others, last = addresses
    for address in others:
        with_patience = _request(url, address, connections, connect_s=dialing.ADDRESS_S)
        try:
            return await transport.handle_async_request(with_patience)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            continue
    return await transport.handle_async_request(_request(url, last, connections, connect_s=None))


def _request(url: WebUrl, address: str, connections: _Connections, *, connect_s: float | None) -> httpx.Request:
    import httpx

    return httpx.Request(
        "GET",
        httpx.URL(scheme=url.scheme, host=address, port=url.port),
        headers=[("Host", url.authority), *_HEADERS],
        extensions={
            "target": url.target.encode(),  # as it was written
            "sni_hostname": url.host,
            "timeout": {"connect": connect_s},
            "trace": connections.trace,
        },
    )


class _Connections:
    """What was opened: httpcore leaves a connection open that is cancelled before TLS has come about."""

    def __init__(self) -> None:
        self._opened: list[anyio.abc.AsyncResource] = []

    async def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """See httpx, "trace" among its extensions."""
        if event == "connection.connect_tcp.complete":
            self._opened.append(info["return_value"])

    async def close(self) -> None:
        for connection in self._opened:
            await connection.aclose()
