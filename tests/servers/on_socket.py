"""A server on a real socket, in the event loop of the test."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
from anyio.streams.tls import TLSStream

from staged_pool.api.config import ServerConfig
from staged_pool.api.http.listener import bind, bind_udp, bind_unix, url
from staged_pool.api.http.server import Server
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.media.image_completer import Fetch, reject_fetch
from staged_pool.runtime.pipelines.file import PipelineFile
from staged_pool.stages.stage import StageOptions
from tests.servers.byte_client import read_to_end
from tests.servers.certificates import Certificates
from tests.servers.engines import Given, opening
from tests.support.model import LetterModel
from tests.support.waiting import until

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of plain sockets: by itself each one reads the certificates of all authorities, which takes longer than
what most tests do."""


class Served:
    """A server, and clients of it."""

    def __init__(
        self,
        server: Server,
        listener: socket.socket,
        certificates: Certificates | None = None,
        quic_port: int | None = None,
    ) -> None:
        self.server = server
        self.url = url(listener, tls=certificates is not None)
        self._address = listener.getsockname()
        self._certificates = certificates
        self._quic_port = quic_port

    @property
    def port(self) -> int:
        """The port of TCP."""
        assert not isinstance(self._address, str), "it has a Unix socket"
        port: int = self._address[1]
        return port

    @property
    def quic_port(self) -> int:
        """The port of HTTP/3."""
        assert self._quic_port is not None, "it does not speak HTTP/3"
        return self._quic_port

    @property
    def certificates(self) -> Certificates:
        assert self._certificates is not None, "it does not speak TLS"
        return self._certificates

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The engines by the names of their models."""
        return {engine.card.name: engine for engine in self.server.registry.engines}

    @property
    def engine(self) -> Engine:
        """The only engine."""
        (engine,) = self.server.registry.engines
        return engine

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return self.engine.statistics().admission.requests

    def client(self, **settings: Any) -> httpx.AsyncClient:
        """Make a client. By default it trusts the server's certificate, if it has one."""
        if "verify" not in settings:
            settings["verify"] = NO_TLS if self._certificates is None else self._certificates.trusting()
        if isinstance(self._address, str):
            transport = httpx.AsyncHTTPTransport(uds=self._address, **settings)
            return httpx.AsyncClient(transport=transport, base_url="http://pool", timeout=30)
        return httpx.AsyncClient(base_url=self.url, timeout=30, **settings)

    async def connect(self) -> anyio.abc.SocketStream:
        """Open a connection without TLS."""
        return await anyio.connect_tcp("127.0.0.1", self.port)

    async def connect_tls(self, context: ssl.SSLContext, *, strict: bool = False) -> TLSStream:
        """Open a connection with TLS.

        Args:
            context: See `Certificates.trusting`.
            strict: Take an end of the connection without TLS's own end for an attack.
        """
        return await anyio.connect_tcp(
            "127.0.0.1",
            self.port,
            ssl_context=context,
            tls_hostname="127.0.0.1",
            tls_standard_compatible=strict,
        )

    async def talk(self, request: bytes) -> bytes:
        """Send bytes, and read until the server closes the connection."""
        async with await self.connect() as stream:
            await stream.send(request)
            return await read_to_end(stream)

    async def assert_alive(self) -> None:
        """Check that it answers a request, and that nothing is left in flight."""
        async with self.client() as client:
            response = await client.post("/v1/embeddings", json={"input": "alive"})
        assert response.status_code == 200
        await until(lambda: self.in_flight == 0)


def server_on(
    *models: Given,
    engine: EngineConfig | None = None,
    options: StageOptions | None = None,
    fetch: Fetch = reject_fetch,
    owns_process: bool = False,
    pipelines: Sequence[PipelineFile] = (),
    **config: Any,
) -> Server:
    """Make a server that the test runs itself, to see how it ends; for all else there is `serving`."""
    configs, open_engines = opening(models or (LetterModel(),), engine, options, fetch)
    return Server(
        ServerConfig(**config), configs, owns_process=owns_process, open_engines=open_engines, pipelines=pipelines
    )


@asynccontextmanager
async def serving(
    *models: Given,
    engine: EngineConfig | None = None,
    options: StageOptions | None = None,
    fetch: Fetch = reject_fetch,
    listener: socket.socket | None = None,
    unix_socket: Path | None = None,
    certificates: Certificates | None = None,
    http3: bool = False,
    pipelines: Sequence[PipelineFile] = (),
    **config: Any,
) -> AsyncIterator[Served]:
    """Run a server; the block begins when its models are there. At its end the server drains.

    Args:
        models: See `opening`. None: one `LetterModel`.
        engine: See `opening`.
        options: See `opening`.
        fetch: See `opening`.
        listener: A listening socket. None: one on a free port.
        unix_socket: Path of a socket to listen on instead.
        certificates: For TLS, with HTTP/1.1 and HTTP/2. None: no TLS.
        http3: HTTP/3 too, on a port of its own.
        pipelines: Pipelines on the models.
        config: Settings of HTTP, see `ServerConfig`.
    """
    if listener is None:
        listener = bind("127.0.0.1", 0) if unix_socket is None else bind_unix(unix_socket)
    quic_listener = bind_udp("127.0.0.1", 0) if http3 else None
    quic_port = None if quic_listener is None else quic_listener.getsockname()[1]
    if certificates is not None:
        config |= certificates.settings
    server = server_on(
        *models, engine=engine, options=options, fetch=fetch, pipelines=pipelines, quic_port=quic_port, **config
    )
    served = Served(server, listener, certificates, quic_port)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run, listener, quic_listener)
        try:
            await until(lambda: not server.registry.not_ready, within_s=120)  # models are loaded
            yield served
        finally:
            with anyio.CancelScope(shield=True):
                await server.close()
