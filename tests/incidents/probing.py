"""Probes as kubelet sends them: a connection each, dialed anew, with one time limit for all of it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread

PROBE_S: Final = 2.0
"""Time limit of a probe in seconds, from the dial to the last byte (`timeoutSeconds`)."""

PERIOD_S: Final = 0.02
"""Pause between two probes in seconds. Kubelet waits seconds; so a test sees more of them."""

ASK: Final = b"%s HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: kube-probe/1.31\r\nAccept: */*\r\nConnection: close\r\n"


@dataclass(frozen=True)
class Probe:
    """Outcome of one probe."""

    status: int | None
    """Status of the answer. None: there was none."""
    failure: str = ""
    """Reason for no answer: `connection refused`, `timeout` or `closed`."""
    body: bytes = b""

    @property
    def passes(self) -> bool:
        """True if kubelet counts it as a success."""
        return self.status is not None and 200 <= self.status < 400

    @property
    def reason(self) -> str:
        """The reason that `/ready` gives."""
        return str(json.loads(self.body)["reason"])


def probe(port: int, path: str = "/health", *, body: bytes | None = None, limit_s: float = PROBE_S) -> Probe:
    """Dial, send one request, and read its answer to the end, within one time limit.

    Args:
        port: The port of 127.0.0.1.
        path: Path of the request.
        body: A body to POST. None: the request is a GET.
        limit_s: Time limit in seconds.
    """
    latest = time.monotonic() + limit_s
    method = b"GET" if body is None else b"POST"
    request = ASK % (method + b" " + path.encode())
    if body is not None:
        request += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    try:
        with closing(socket.create_connection(("127.0.0.1", port), timeout=limit_s)) as stream:
            stream.sendall(request + b"\r\n" + (body or b""))
            answer = bytearray()
            while not _is_complete(answer):
                stream.settimeout(max(0.001, latest - time.monotonic()))
                if not (piece := stream.recv(65536)):
                    return Probe(None, "closed")
                answer += piece
    except TimeoutError:
        return Probe(None, "timeout")
    except ConnectionRefusedError:
        return Probe(None, "connection refused")
    except OSError:
        return Probe(None, "closed")
    head, _, content = bytes(answer).partition(b"\r\n\r\n")
    return Probe(int(head.split(maxsplit=2)[1]), body=content)


def embed(port: int, text: str, *, limit_s: float = PROBE_S) -> Probe:
    """Ask for the embedding of a text."""
    return probe(port, "/v1/embeddings", body=json.dumps({"input": text}).encode(), limit_s=limit_s)


async def in_thread(ask: Any, *arguments: Any, **named: Any) -> Any:
    """Run a blocking client in a thread that no limiter of the server holds back."""
    return await anyio.to_thread.run_sync(partial(ask, *arguments, **named), limiter=anyio.CapacityLimiter(1))


@asynccontextmanager
async def kubelet(port: int, path: str = "/health") -> AsyncIterator[list[Probe]]:
    """Probe again and again, for the length of a block. The block gets the list of outcomes, which grows."""
    outcomes: list[Probe] = []
    ends = threading.Event()

    def watch() -> None:
        while not ends.is_set():
            outcomes.append(probe(port, path))
            ends.wait(PERIOD_S)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(in_thread, watch)
        try:
            yield outcomes
        finally:
            ends.set()


@contextmanager
def crowd(port: int, count: int, sent: bytes = b"") -> Iterator[None]:
    """Open connections, send the same bytes on each, and leave them open for a block.

    Args:
        port: The port of 127.0.0.1.
        count: Number of connections.
        sent: The bytes; none by default.
    """
    with ExitStack() as streams:
        _open(streams, port, count, sent)
        yield


@asynccontextmanager
async def crowded(port: int, count: int, sent: bytes = b"") -> AsyncIterator[None]:
    """See `crowd`. The connections are opened in a thread, as the server may run in this event loop."""
    with ExitStack() as streams:
        await in_thread(_open, streams, port, count, sent)
        yield


def _open(streams: ExitStack, port: int, count: int, sent: bytes) -> None:
    for _ in range(count):
        stream = streams.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PROBE_S))
        if sent:
            stream.sendall(sent)


def post_embeddings(text: str) -> bytes:
    """Return the bytes of one complete request for an embedding."""
    body = json.dumps({"input": text}).encode()
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _is_complete(answer: bytearray) -> bool:
    head, end, body = bytes(answer).partition(b"\r\n\r\n")
    if not end:
        return False
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.split(b":")[1])
    return answer.endswith(b"0\r\n\r\n")
