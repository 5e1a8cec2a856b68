"""Clients that hold connections, announce bodies, and send as little as they can."""

from __future__ import annotations

import socket
import time
from collections import Counter
from contextlib import suppress

from tests.hostile.attack import ELSEWHERE, Counts, Target, attack

CONNECTIONS = 250
"""Number of connections, above the server's limit."""
LARGE = 31 * 2**20
"""Bytes of a body just within the limit."""
DROPS_S = 0.5
"""Seconds between two bytes of a client that is slow."""


def connect(target: Target) -> socket.socket:
    return socket.create_connection(("127.0.0.1", target.port), timeout=5, source_address=(ELSEWHERE, 0))


def hold(target: Target, sent: bytes, drop: bytes) -> Counts:
    """Hold many connections open with a byte now and then; replace those that end."""
    seen: Counter[str] = Counter()
    held: list[socket.socket] = []
    for _ in target.rounds():
        while len(held) < CONNECTIONS and (seen["connections"] < CONNECTIONS or not target.time_is_up):
            try:
                client = connect(target)
                client.sendall(sent)
            except OSError:
                seen["not connected"] += 1
                break
            client.setblocking(False)
            held.append(client)
            seen["connections"] += 1
        for client in list(held):
            try:
                client.send(drop)
                if not client.recv(4096):
                    raise ConnectionError
            except BlockingIOError:
                continue
            except OSError:
                seen["ended"] += 1
                held.remove(client)
                client.close()
        time.sleep(DROPS_S)
    for client in held:
        client.close()
    return seen


@attack("connections that ask nothing (F8)")
def idle_connections(target: Target) -> Counts:
    return hold(target, b"", b"")


@attack("heads in drops (F8)")
def slow_heads(target: Target) -> Counts:
    return hold(target, b"POST /v1/embeddings HTTP/1.1\r\nhost: test\r\nx: ", b"y")


@attack("bodies in drops (F8)")
def slow_bodies(target: Target) -> Counts:
    return hold(target, target.headers("content-type: application/json", "content-length: 1000"), b" ")


def announce(target: Target, head: bytes, *, sends: bool) -> Counts:
    """Announce 18 large bodies, and send all of each but the end, or nothing."""
    seen: Counter[str] = Counter()
    held = [connect(target) for _ in range(18)]
    for client in held:
        with suppress(OSError):
            client.sendall(head)
        if sends:
            client.settimeout(0.05)
            with suppress(OSError):  # it is rejected before all is sent
                client.sendall(bytes(LARGE - 1))
    for _ in target.rounds():
        for client in held:
            client.setblocking(False)
            with suppress(OSError):
                if (answer := client.recv(4096)).startswith(b"HTTP/1.1 "):
                    seen[answer[9:12].decode()] += 1
        time.sleep(0.1)
    seen["bodies"] = len(held)
    for client in held:
        client.close()
    return seen


@attack("large bodies to /health, without a key (F1)")
def bodies_to_health(target: Target) -> Counts:
    head = f"POST /health HTTP/1.1\r\nhost: test\r\ncontent-length: {LARGE}\r\n\r\n"
    return announce(target, head.encode(), sends=True)


@attack("large bodies that are announced and do not come (F1)")
def announced_bodies(target: Target) -> Counts:
    return announce(target, target.headers(f"content-length: {LARGE}"), sends=False)


@attack("large bodies that never end (F1)")
def unfinished_bodies(target: Target) -> Counts:
    return announce(target, target.headers(f"content-length: {LARGE}"), sends=True)
