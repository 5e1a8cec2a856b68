"""HTTP/3 endpoint on a UDP socket, available where aioquic is installed.

Hypercorn's own HTTP/3 does not notice that a client leaves. An error of one client ends all its connections, and its
shutdown waits for every idle timeout. So this module uses aioquic directly, which does no input and output. A
connection has one task that sends datagrams and keeps its timers, and one task per request.
"""

from __future__ import annotations

import importlib.util
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc

from staged_pool.api.asgi import App
from staged_pool.api.config import ServerConfig
from staged_pool.api.http.http3.connection import Address, Endpoint, Http3Connection
from staged_pool.api.limits.server_state import ServerState
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.log import get_logger

if TYPE_CHECKING:
    from aioquic.quic.configuration import QuicConfiguration

FIRST_DATAGRAM_BYTES: Final = 1200
"""Minimum size of a client's first datagram (RFC 9000, section 14.1), against amplification attacks."""

DATAGRAM_BYTES: Final = 2**14
"""Maximum size of a datagram: it may have thousands of frames, which are processed in one call."""

log = get_logger("staged_pool.api")


def check_installed() -> None:
    """Check that HTTP/3 can be served.

    Raises:
        ConfigError: aioquic is not installed.
    """
    if importlib.util.find_spec("aioquic") is None:
        raise ConfigError("quic_port: HTTP/3 needs aioquic; install staged-pool[http3]")


class Http3:
    """Serves HTTP/3 on one UDP socket.

    Args:
        app: The application.
        config: The certificate, and the limits.
        server_state: Counts the connections.
    """

    def __init__(self, app: App, config: ServerConfig, server_state: ServerState) -> None:
        from staged_pool.api.http.http3.handshakes import Handshakes

        self._endpoint = Endpoint(app, config, server_state, Handshakes())
        self._settings = _settings(config)

    async def run(self, listener: socket.socket) -> None:
        """Serve until cancelled. During a shutdown, connections end once their requests are answered.

        An error in a connection ends that connection alone.

        Args:
            listener: A bound UDP socket; this method closes it.
        """
        async with await anyio.abc.UDPSocket.from_socket(listener) as udp, anyio.create_task_group() as tasks:
            while True:
                data, (host, port, *_) = await udp.receive()
                if len(data) > DATAGRAM_BYTES:
                    continue
                found = self._connection(data, (host, port))
                if isinstance(found, bytes):
                    with suppress(OSError):
                        async with self._endpoint.sending:
                            await udp.sendto(found, host, port)
                elif found is not None:
                    if not found.begun:
                        found.begin(udp, tasks, (host, port))
                    found.take(data, (host, port))

    def _connection(self, data: bytes, address: Address) -> Http3Connection | bytes | None:
        """Return the connection of a datagram, known or new; bytes: a Retry to send; None: drop the datagram."""
        from aioquic._buffer import Buffer
        from aioquic.quic.connection import QuicConnection
        from aioquic.quic.packet import QuicPacketType, pull_quic_header

        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=self._settings.connection_id_length)
        except ValueError:
            return None
        if (known := self._endpoint.connections.get(header.destination_cid)) is not None:
            return known
        if header.packet_type != QuicPacketType.INITIAL or len(data) < FIRST_DATAGRAM_BYTES:
            return None
        if header.version not in self._settings.supported_versions or self._endpoint.server_state.leaving:
            return None
        admitted = self._endpoint.handshakes.admit(header, address, anyio.current_time())
        if admitted is None or isinstance(admitted, bytes):
            return admitted
        if self._endpoint.server_state.quic_connections >= self._endpoint.config.max_connections:
            self._endpoint.server_state.connections_rejected += 1
            self._close_longest_idle()
            return None  # the client sends it again, and finds room
        quic = QuicConnection(
            configuration=self._settings,
            original_destination_connection_id=admitted.original_id,
            retry_source_connection_id=admitted.retry_id,
        )
        connection = Http3Connection(self._endpoint, quic, {header.destination_cid, quic.host_cid})
        for name in (header.destination_cid, quic.host_cid):
            self._endpoint.connections[name] = connection
        return connection

    def _close_longest_idle(self) -> None:
        idle = [connection for connection in set(self._endpoint.connections.values()) if connection.is_idle]
        if idle:
            min(idle, key=lambda connection: connection.deadline).close()


def _settings(config: ServerConfig) -> QuicConfiguration:
    from aioquic.h3.connection import H3_ALPN
    from aioquic.quic.configuration import QuicConfiguration

    settings = QuicConfiguration(alpn_protocols=H3_ALPN, is_client=False, idle_timeout=config.keep_alive_s)
    settings.load_cert_chain(str(config.tls_cert), str(config.tls_key))
    return settings
