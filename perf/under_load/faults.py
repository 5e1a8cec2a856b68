"""Misbehaving clients, one function for each kind, with the statuses that they may get."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ResponseReceived, StreamEnded, StreamReset

from perf.tools.client import Connection, post

TIMEOUT_S: Final = 15.0
SLOW_S: Final = 2.0
"""Duration of a slow client's request or read, in seconds."""
SLOW_PIECES: Final = 20
BODY_LIMIT_MB: Final = 2
"""The `--body-limit-mb` with which the server must be started."""
MAX_AT_ONCE: Final = 64
PIPELINED: Final = 3
STREAMS: Final = 4

_PATH: Final = "/v1/embeddings"
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: on, for no time; closing then resets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misuse:
    """Rate and duration of misbehaviour."""

    rate: float
    """Clients of each kind, per second."""
    seconds: float
    seed: int


@dataclass(slots=True)
class MisuseOutcome:
    """Answers of the server to misbehaving clients."""

    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    """Counts of outcomes by kind: a status, `closed` (no answer), or `left` (the client did not wait)."""
    unexpected: Counter[str] = field(default_factory=Counter)
    """Counts of outcomes that are not allowed, with their kinds."""
    skipped: int = 0
    """Number of clients not started because too many were active."""

    def count(self, kind: str, statuses: tuple[str, ...], allowed: frozenset[str]) -> None:
        self.statuses.setdefault(kind, Counter()).update(statuses)
        self.unexpected.update(f"{kind}: {status}" for status in statuses if status not in allowed)


class Misusers:
    """Runs clients of all kinds at random times, from a few threads.

    Args:
        port: Port of the server.
        request: A valid request, which the clients misuse.
    """

    def __init__(self, port: int, request: bytes) -> None:
        self._victim = _Victim(port, request)

    def __call__(self, misuse: Misuse) -> MisuseOutcome:
        """Run clients for the time of `misuse`; return after the last answer."""
        rng = random.Random(misuse.seed)
        outcome = MisuseOutcome()
        count = round(misuse.rate * misuse.seconds)
        times = sorted((rng.uniform(0.0, misuse.seconds), kind) for kind in KINDS for _ in range(count))
        started = time.perf_counter()
        with ThreadPoolExecutor(MAX_AT_ONCE) as threads:
            running: list[tuple[str, Future[tuple[str, ...]]]] = []
            for at, kind in times:
                time.sleep(max(0.0, started + at - time.perf_counter()))
                if sum(not call.done() for _, call in running[-4 * MAX_AT_ONCE :]) >= MAX_AT_ONCE:
                    outcome.skipped += 1
                else:
                    running.append((kind, threads.submit(KINDS[kind][0], self._victim)))
            for kind, call in running:
                failure = call.exception()
                outcome.count(kind, call.result() if failure is None else (repr(failure),), KINDS[kind][1])
        return outcome


@dataclass(frozen=True, slots=True)
class _Victim:
    """Port of the server, and the valid request."""

    port: int
    request: bytes

    def connect(self) -> Connection:
        return Connection(self.port, timeout_s=TIMEOUT_S)

    def ask(self, request: bytes) -> tuple[str, ...]:
        with closing(self.connect()) as connection:
            try:
                connection.send(request)
            except ConnectionError:
                return _answer(connection)  # the server may answer before the end of the body
            return _answer(connection)


def _answer(connection: Connection) -> tuple[str, ...]:
    try:
        while (reply := connection.receive()) is None:
            pass
    except ConnectionError:
        return ("closed",)
    return (str(reply.status),)


def _leave_in_the_body(victim: _Victim) -> tuple[str, ...]:
    with closing(victim.connect()) as connection:
        connection.send(victim.request[: len(victim.request) * 2 // 3])
        time.sleep(0.02)
    return ("left",)


def _leave_after_sending(victim: _Victim) -> tuple[str, ...]:
    with closing(victim.connect()) as connection:
        connection.send(victim.request)
    return ("left",)


def _reset(victim: _Victim) -> tuple[str, ...]:
    with closing(victim.connect()) as connection:
        connection.send(victim.request)
        time.sleep(0.01)
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    return ("left",)


def _send_slowly(victim: _Victim) -> tuple[str, ...]:
    piece = -(-len(victim.request) // SLOW_PIECES)
    with closing(victim.connect()) as connection:
        for first in range(0, len(victim.request), piece):
            connection.send(victim.request[first : first + piece])
            time.sleep(SLOW_S / SLOW_PIECES)
        return _answer(connection)


def _read_slowly(victim: _Victim) -> tuple[str, ...]:
    """Read the answer in small pieces through a small receive window."""
    with closing(socket.socket()) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(TIMEOUT_S)
        raw.connect(("127.0.0.1", victim.port))
        raw.sendall(post(_PATH, json.dumps({"input": ["a text"] * 64, "encoding_format": "float"}).encode()))
        head, _, body = raw.recv(2048).partition(b"\r\n\r\n")
        missing = int(head.lower().partition(b"content-length:")[2].split()[0]) - len(body)
        piece = max(1, missing // SLOW_PIECES)
        while missing > 0 and (chunk := raw.recv(piece)):
            missing -= len(chunk)
            time.sleep(SLOW_S * len(chunk) / piece / SLOW_PIECES)
        return ("cut",) if missing > 0 else (head[9:12].decode(),)


def _send_bad_json(victim: _Victim) -> tuple[str, ...]:
    return victim.ask(post(_PATH, b'{"input": ["a text", '))


def _send_wrong_types(victim: _Victim) -> tuple[str, ...]:
    return victim.ask(post(_PATH, b'{"input": {"text": 7}}'))


def _send_too_much(victim: _Victim) -> tuple[str, ...]:
    return victim.ask(post(_PATH, b'{"input": "' + b"a " * (BODY_LIMIT_MB * 2**20) + b'"}'))


def _ask_for_another_model(victim: _Victim) -> tuple[str, ...]:
    return victim.ask(post(_PATH, b'{"model": "no-such-model", "input": "a text"}'))


def _have_no_time(victim: _Victim) -> tuple[str, ...]:
    return victim.ask(victim.request.replace(b"\r\n", b"\r\nX-Request-Timeout: 0.001\r\n", 1))


def _pipeline(victim: _Victim) -> tuple[str, ...]:
    """Send several requests in one write; they are answered in their order."""
    received = b""
    with closing(victim.connect()) as connection:
        connection.send(victim.request * PIPELINED)
        while received.count(b"HTTP/1.1 ") < PIPELINED and (chunk := connection.socket.recv(2**18)):
            received += chunk
    answers = [part[:3].decode() for part in received.split(b"HTTP/1.1 ")[1:]]
    return (*answers, *["closed"] * (PIPELINED - len(answers)))


def _close_half(victim: _Victim) -> tuple[str, ...]:
    """Close the sending side, and wait for the answer."""
    with closing(victim.connect()) as connection:
        connection.send(victim.request)
        connection.socket.shutdown(socket.SHUT_WR)
        return _answer(connection)


def _reset_streams(victim: _Victim) -> tuple[str, ...]:
    """Send several requests on one HTTP/2 connection, and reset all but the last."""
    body = victim.request.partition(b"\r\n\r\n")[2]
    headers = [
        (":method", "POST"), (":scheme", "http"), (":authority", "perf"), (":path", _PATH),
        ("content-type", "application/json"), ("content-length", str(len(body))),
    ]  # fmt: skip
    h2 = H2Connection(H2Configuration(client_side=True))
    h2.initiate_connection()
    streams = []
    for _ in range(STREAMS):
        streams.append(h2.get_next_available_stream_id())
        h2.send_headers(streams[-1], headers)
        for first in range(0, len(body), 16384):
            h2.send_data(streams[-1], body[first : first + 16384])
        h2.end_stream(streams[-1])
    with closing(victim.connect()) as connection:
        connection.send(h2.data_to_send())
        for stream in streams[:-1]:
            h2.reset_stream(stream)
        connection.send(h2.data_to_send())
        return _stream_answer(connection, h2, streams[-1])


def _stream_answer(connection: Connection, h2: H2Connection, stream: int) -> tuple[str, ...]:
    status = "closed"
    while chunk := connection.socket.recv(2**16):
        for event in h2.receive_data(chunk):
            if isinstance(event, ResponseReceived) and event.stream_id == stream:
                status = dict(event.headers)[b":status"].decode()
            elif isinstance(event, StreamReset) and event.stream_id == stream:
                return ("stream reset",)
            elif isinstance(event, StreamEnded) and event.stream_id == stream:
                return (status,)
        if outgoing := h2.data_to_send():
            connection.send(outgoing)
    return ("closed",)


def _kind(
    does: Callable[[_Victim], tuple[str, ...]], *allowed: str
) -> tuple[Callable[[_Victim], tuple[str, ...]], frozenset[str]]:
    return does, frozenset(allowed)


KINDS: Final = {
    "leaves in the middle of the body": _kind(_leave_in_the_body, "left"),
    "leaves after sending": _kind(_leave_after_sending, "left"),
    "resets the connection": _kind(_reset, "left"),
    "sends slowly": _kind(_send_slowly, "200"),
    "reads slowly": _kind(_read_slowly, "200"),
    "sends bad JSON": _kind(_send_bad_json, "400"),
    "sends wrong types": _kind(_send_wrong_types, "400"),
    "sends too much": _kind(_send_too_much, "413"),
    "asks for another model": _kind(_ask_for_another_model, "404"),
    "has no time": _kind(_have_no_time, "504"),
    "pipelines": _kind(_pipeline, "200"),
    "closes its half": _kind(_close_half, "200", "closed"),
    "resets HTTP/2 streams": _kind(_reset_streams, "200"),
}
"""Kinds of clients, with their functions and the outcomes that are allowed."""
