"""Minimal HTTP/1.1 client on a blocking socket, cheap enough not to affect measurements."""

from __future__ import annotations

import re
import socket
from typing import Final, NamedTuple

_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding: *chunked\r\n", re.IGNORECASE)
_RETRY_AFTER: Final = re.compile(rb"\r\nretry-after: *(\d+)", re.IGNORECASE)
_STAGE_TIME: Final = re.compile(rb"(\w+);dur=([\d.e+-]+)")
_READ_BYTES: Final = 2**16


class Reply(NamedTuple):
    """Answer to one request."""

    status: int
    head: bytes
    """Status line and headers."""
    body: bytes


def get(path: str) -> bytes:
    """Return the bytes of a GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: perf\r\n\r\n".encode()


def post(path: str, body: bytes) -> bytes:
    """Return the bytes of a POST request with a JSON body."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: perf\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def stage_times_ms(reply: Reply) -> dict[str, float]:
    """Return the entries of the `Server-Timing` header, in ms."""
    return {name.decode(): float(ms) for name, ms in _STAGE_TIME.findall(reply.head)}


def retry_after_s(reply: Reply) -> float | None:
    """Return the pause before a retry after a 429, in seconds; None for other answers."""
    if reply.status != 429:
        return None
    hint = _RETRY_AFTER.search(reply.head)
    return float(hint[1]) if hint else 1.0


class Connection:
    """Keep-alive connection to 127.0.0.1, one request at a time.

    Args:
        port: Port of the server.
        timeout_s: Limit for one read or write, in seconds; then `TimeoutError` is raised.
    """

    def __init__(self, port: int, *, timeout_s: float) -> None:
        self._port = port
        self._timeout_s = timeout_s
        self._buffer = bytearray()
        self._open()

    def _open(self) -> None:
        self.socket = socket.create_connection(("127.0.0.1", self._port), timeout=self._timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self.socket.close()

    def reopen(self) -> None:
        """Close the socket and open a new one; a pending answer is lost."""
        self.socket.close()
        self._buffer.clear()
        self._open()

    def send(self, request: bytes) -> None:
        self.socket.sendall(request)

    def receive(self) -> Reply | None:
        """Read once; return the answer if it is complete. Blocks if there is nothing to read.

        Raises:
            ConnectionError: The server closed the connection, or the answer has no length.
        """
        chunk = self.socket.recv(_READ_BYTES)
        if not chunk:
            raise ConnectionError("the server closed the connection")
        if self._buffer:
            self._buffer += chunk
            chunk = bytes(self._buffer)
        if (reply := _reply(chunk)) is not None:
            self._buffer.clear()
        elif not self._buffer:
            self._buffer += chunk
        return reply

    def exchange(self, request: bytes) -> Reply:
        """Send one request and wait for its answer."""
        self.send(request)
        while (reply := self.receive()) is None:
            pass
        return reply


def _reply(answer: bytes) -> Reply | None:
    """Return the answer if it is complete."""
    head_bytes = answer.find(_HEAD_END) + len(_HEAD_END)
    if head_bytes < len(_HEAD_END):
        return None
    length = _LENGTH.search(answer, 0, head_bytes)
    if length is not None:
        if len(answer) < head_bytes + int(length[1]):
            return None
        body: bytes | None = answer[head_bytes:]
    elif _CHUNKED.search(answer, 0, head_bytes) is not None:
        body = _of_chunks(answer, head_bytes)
    else:
        raise ConnectionError("the answer has no Content-Length, and does not come in chunks")
    return None if body is None else Reply(int(answer[9:12]), answer[:head_bytes], body)


def _of_chunks(answer: bytes, start: int) -> bytes | None:
    """Return the body of a chunked answer without trailers; None: it is incomplete."""
    body = bytearray()
    while (end := answer.find(b"\r\n", start)) >= 0:
        size = int(answer[start:end].partition(b";")[0], 16)
        start = end + 2 + size + 2
        if len(answer) < start:
            return None
        if not size:
            return bytes(body)
        body += answer[end + 2 : end + 2 + size]
    return None


def successful(reply: Reply) -> Reply:
    """Return the reply if its status is 200.

    Raises:
        RuntimeError: The status is another one, so there is nothing to measure.
    """
    if reply.status != 200:
        raise RuntimeError(f"status {reply.status}: {reply.body[:300].decode(errors='replace')}")
    return reply
