"""GET request to an address that was checked, over a connection of its own.

httpx connects to the IP address, so that it resolves nothing. The host's name is used in the `Host` header, in TLS, and
to check the host's certificate.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.abc

from staged_pool.runtime.media import dns
from staged_pool.runtime.media.urls import WebUrl

if TYPE_CHECKING:
    import httpx

_HEADERS: Final = (
    ("Accept-Encoding", "identity"),
    ("Connection", "close"),
)


@asynccontextmanager
async def send_get(
    url: WebUrl, addresses: Sequence[str], tls: ssl.SSLContext, *, accept: str
) -> AsyncIterator[httpx.Response]:
    """Provide the response to a GET request, without its body, for a block.

    The connection is closed at the end of the block, without waiting for the host.

    Args:
        url: The URL to get.
        addresses: At least one address of its host. The first that accepts a connection is used.
        tls: Settings of TLS, with the trusted certificates. Unused for http.
        accept: Value of the header `Accept`.

    Raises:
        httpx.TransportError: No address accepts a connection, the certificate is not valid or not trusted, or the
            answer is not HTTP.
    """
    import httpx  # imported late: most servers fetch nothing

    connections = _Connections()
    try:
        # A transport, not a client: a client keeps cookies, and fails on redirects to URLs that it cannot parse.
        async with httpx.AsyncHTTPTransport(verify=tls, trust_env=False) as transport:
            response = await _first_answer(transport, url, addresses, connections, accept)
            try:
                yield response
            finally:
                with anyio.CancelScope(shield=True):
                    await response.aclose()
    finally:
        with anyio.CancelScope(shield=True):
            await connections.close()


@asynccontextmanager
async def raw_chunks(response: httpx.Response) -> AsyncIterator[AsyncIterator[bytes]]:
    """Provide the chunks of a body, not decoded, for a block. The rest is dropped at its end.

    Raises:
        httpx.TransportError: The connection breaks, or the body is not HTTP.
    """
    import httpx

    chunks = response.aiter_raw()
    try:
        yield chunks
    finally:
        # httpx nests five generators, which end only if they are exhausted: trio warns of any that are not.
        with anyio.CancelScope(shield=True), suppress(httpx.TransportError):
            await response.aclose()
            async for _ in chunks:
                pass  # chunks that have arrived already


async def _first_answer(
    transport: httpx.AsyncHTTPTransport, url: WebUrl, addresses: Sequence[str], connections: _Connections, accept: str
) -> httpx.Response:
    import httpx

    *others, last = addresses
    for address in others:
        request = _request(url, address, connections, accept=accept, connect_s=dns.ADDRESS_TIMEOUT_S)
        try:
            return await transport.handle_async_request(request)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            continue
    return await transport.handle_async_request(_request(url, last, connections, accept=accept, connect_s=None))


def _request(
    url: WebUrl, address: str, connections: _Connections, *, accept: str, connect_s: float | None
) -> httpx.Request:
    import httpx

    return httpx.Request(
        "GET",
        httpx.URL(scheme=url.scheme, host=address, port=url.port),
        headers=[("Host", url.authority), ("User-Agent", "staged-pool"), ("Accept", accept), *_HEADERS],
        extensions={
            "target": url.target.encode(),  # unchanged: httpx would normalize it
            "sni_hostname": url.host,
            "timeout": {"connect": connect_s},
            "trace": connections.trace,
        },
    )


class _Connections:
    """Opened connections: httpcore leaks one that is cancelled during the TLS handshake."""

    def __init__(self) -> None:
        self._opened: list[anyio.abc.AsyncResource] = []

    async def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Note an opened connection; see the `trace` extension of httpx."""
        if event == "connection.connect_tcp.complete":
            self._opened.append(info["return_value"])

    async def close(self) -> None:
        for connection in self._opened:
            await connection.aclose()
