"""HTTP/1.1 connection that costs a tenth of a general client's: one request at a time.

Answers with a Content-Length are read here. All others (chunks, no length, interim answers) are read by h11.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

import anyio
import anyio.abc
import h11

ENDS_BYTES: Final = 512
"""Bytes that are kept of both ends of a body: embeddings have their usage in the last, rankings in the first."""

READ_BYTES: Final = 2**16
MOST_HEAD_BYTES: Final = 2**16

_HEAD_END: Final = b"\r\n\r\n"
_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([2-5]\d\d)[ \r]")
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*\r\n", re.IGNORECASE)
_CODING: Final = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
_CLOSE: Final = re.compile(rb"\r\nconnection:[^\r]*\bclose\b", re.IGNORECASE)


class BrokenAnswer(Exception):
    """The server closed the connection before the end of an answer, or sent no HTTP."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer."""

    status: int
    head: bytes
    """Status line and headers, with the empty line."""
    body: bytes
    """Both ends of the body, or all of it where it is asked for."""
    resent: bool = False
    """The kept connection was closed, so the request was sent again on a new one."""

    def header(self, name: str) -> str | None:
        """Return the value of a header; None if there is none."""
        found = re.search(rb"\r\n%s:[ \t]*([^\r]*)" % re.escape(name.encode()), self.head, re.IGNORECASE)
        return None if found is None else found[1].decode("latin-1").strip()


class Connection(Protocol):
    """Connection of a client, one request at a time."""

    async def exchange(self, request: bytes) -> Reply:
        """Send a request, and wait for its answer.

        Raises:
            OSError: The connection cannot be made.
            BrokenAnswer: The connection or the answer broke.
        """

    async def close(self) -> None:
        """Close the connection at once."""


class HttpConnection:
    """Connection that opens itself, and again after the server has closed it.

    Cancellation leaves it in the middle of an answer; then only `close` is allowed, after which it opens itself anew.

    Args:
        connect: Opens the stream.
        whole: Keep the whole body of an answer.
    """

    def __init__(self, connect: Callable[[], Awaitable[anyio.abc.ByteStream]], *, whole: bool = False) -> None:
        self._connect = connect
        self._whole = whole
        self._stream: anyio.abc.ByteStream | None = None

    async def exchange(self, request: bytes) -> Reply:
        """See `Connection`. A kept connection that the server has closed meanwhile is opened again, once."""
        resent = False
        if self._stream is not None:
            try:
                return await self._exchange(self._stream, request)
            except _ClosedWhileIdle:
                await self.close()
                resent = True
        self._stream = stream = await self._connect()
        reply = await self._exchange(stream, request)
        return replace(reply, resent=True) if resent else reply

    async def close(self) -> None:
        """See `Connection`."""
        if (stream := self._stream) is not None:
            self._stream = None
            await anyio.aclose_forcefully(stream)

    async def _exchange(self, stream: anyio.abc.ByteStream, request: bytes) -> Reply:
        # The server may have answered before it closed: a rejected large body is not read to its end.
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await stream.send(request)
        try:
            reply, reusable = await self._read(stream)
        except BrokenAnswer:
            await self.close()
            raise
        except h11.RemoteProtocolError as error:
            await self.close()
            raise BrokenAnswer(f"the answer is no HTTP: {error}") from None
        if not reusable:
            await self.close()
        return reply

    async def _read(self, stream: anyio.abc.ByteStream) -> tuple[Reply, bool]:
        """Read an answer; return it, and whether the connection can be used again."""
        data = await _receive(stream)
        if data is None:
            raise _ClosedWhileIdle("the server closed the connection without an answer")
        while (end := data.find(_HEAD_END)) < 0:
            if len(data) > MOST_HEAD_BYTES:
                raise BrokenAnswer("the server sends no HTTP, or more than 64 KiB of headers")
            data += await _more(stream)
        head = data[: end + len(_HEAD_END)]
        status, length = _STATUS.match(head), _LENGTH.search(head)
        if status is None or length is None or _CODING.search(head) is not None:
            return await self._read_with_h11(stream, data)
        missing = int(length[1]) - (len(data) - len(head))
        pieces = [data[len(head) :]]
        while missing > 0:
            piece = await _more(stream)
            missing -= len(piece)
            pieces.append(piece)
        if missing < 0:
            raise BrokenAnswer("the server sends more bytes than its Content-Length says")
        return Reply(int(status[1]), head, self._kept(pieces)), _CLOSE.search(head) is None and head[7:8] == b"1"

    async def _read_with_h11(self, stream: anyio.abc.ByteStream, data: bytes) -> tuple[Reply, bool]:
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method="POST", target="/", headers=[("host", "any"), ("content-length", "0")]))
        parser.send(h11.EndOfMessage())
        parser.receive_data(data)
        response: h11.Response | None = None
        pieces: list[bytes] = []
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                parser.receive_data(await _receive(stream) or b"")  # the end may be that of the body
            elif isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
            elif isinstance(event, h11.ConnectionClosed):
                raise BrokenAnswer("the server closed the connection without an answer")
            elif isinstance(event, h11.EndOfMessage):
                break
        assert response is not None
        headers = b"".join(b"%s: %s\r\n" % pair for pair in response.headers.raw_items())
        head = b"HTTP/%s %d\r\n%s\r\n" % (response.http_version, response.status_code, headers)
        return Reply(response.status_code, head, self._kept(pieces)), parser.their_state is h11.DONE

    def _kept(self, pieces: list[bytes]) -> bytes:
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._whole or len(body) <= 2 * ENDS_BYTES:
            return body
        return body[:ENDS_BYTES] + body[-ENDS_BYTES:]


class _ClosedWhileIdle(BrokenAnswer):
    """The server closed the connection before the first byte of an answer."""


async def _receive(stream: anyio.abc.ByteStream) -> bytes | None:
    """Receive bytes; None at the end of the connection."""
    try:
        return await stream.receive(READ_BYTES)
    except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
        return None


async def _more(stream: anyio.abc.ByteStream) -> bytes:
    if (data := await _receive(stream)) is None:
        raise BrokenAnswer("the server closed the connection within an answer")
    return data


def post(authority: str, path: str, api_key: str | None, *more: str) -> bytes:
    """Return the head of a POST of JSON, up to the number of its Content-Length."""
    return _head("POST", authority, path, api_key, "Content-Type: application/json", *more, "Content-Length: ")


def get(authority: str, path: str, api_key: str | None) -> bytes:
    """Return a whole GET request."""
    return _head("GET", authority, path, api_key) + b"\r\n\r\n"


def _head(method: str, authority: str, path: str, api_key: str | None, *lines: str) -> bytes:
    key = [] if api_key is None else [f"Authorization: Bearer {api_key}"]
    fixed = (f"{method} {path} HTTP/1.1", f"Host: {authority}", "Accept: application/json", "User-Agent: staged-pool")
    return "\r\n".join((*fixed, *key, *lines)).encode()


def with_body(head: bytes, body: bytes) -> bytes:
    """Return a request of the head that `post` made, and a body."""
    return b"%s%d\r\n\r\n%s" % (head, len(body), body)
