"""The fast path: usual HTTP/1.1 requests, answered without Hypercorn.

A usual request is a GET without a body, or a POST with a Content-Length, and has no header that changes its framing or
its connection (`_UNUSUAL`). Its body is here with the head, or arrives within about a second. Nearly all requests are
like that. All others take the general path (`general_path.py`), which handles every request of HTTP.

There are two paths because of speed. For a few short texts, Hypercorn's protocol takes longer than all stages together.
It takes that time on the event loop, at the expense of forwards that need the core and the interpreter's lock;
`python -m perf front` measures it. Both paths share the reader of heads (`StrictReader`), the front door, and the
application, which counts and logs. So a request has the same answer on either (`tests/api/http/test_both_paths.py`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import unquote

import anyio
import h11

from staged_pool.api import status
from staged_pool.api.app.app import Application
from staged_pool.api.app.call import LIVE, NDJSON, PATH_TAKEN, PLUGINS, Answer
from staged_pool.api.asgi import Headers, Message, Scope
from staged_pool.api.http.protocol.bodies import Body
from staged_pool.api.http.protocol.strict_reader import StrictReader
from staged_pool.api.limits.connection_limit import CONNECTION, Member
from staged_pool.api.status import HttpError, Problem

_UNUSUAL: Final = frozenset({
    b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"http2-settings", b"origin",
})  # fmt: skip
"""Headers that change a request's framing, body or connection, or the readers of the answer."""

_KEEPS: Final = b"keep-alive"

_HEAD_END: Final = b"\r\n\r\n"

_UNIQUE: Final = frozenset({b"x-request-id", b"traceparent"})
"""Headers with a new value in each request: a head with one is not cached."""

MAX_CACHED_HEADS: Final = 1024
"""Parsed heads in the cache: clients repeat the same few heads, and h11 is slow at parsing."""

CACHED_HEAD_BYTES: Final = 2**11
"""Maximum size of a cached head: enough for the API keys in common use."""


@dataclass(frozen=True, slots=True)
class _Head:
    """The head of a usual request."""

    scope: Scope
    length: int
    """Bytes of the body."""
    size: int
    """Bytes of the head."""


class FastRequest:
    """One usual request, as far as it has arrived.

    Args:
        head: Its parsed head.
        data: Bytes received, from the first byte of the head on.
        client: Address of the client, as in an ASGI scope.
        connection: Its connection, for the connection limit.
    """

    __slots__ = ("_pieces", "_start", "body", "length", "missing", "rest", "scope")

    def __init__(self, head: _Head, data: bytes, client: Any, connection: Member | None) -> None:
        end = head.size + head.length
        self.scope: Scope = {
            **head.scope,
            "headers": [*head.scope["headers"]],
            "client": client,
            "state": {CONNECTION: connection},
        }
        self.length = head.length
        """Bytes of the body."""
        self.missing = max(0, end - len(data))
        """Bytes of the body that have not arrived."""
        self.rest = data[end:]
        """Bytes behind the request: the beginning of the next one."""
        self._start = data[: head.size]
        self.body: bytes | bytearray = data[head.size : end]
        """The whole body, once nothing is missing and `join` has returned."""
        self._pieces = Body()
        self._pieces.add(self.body)

    def add(self, data: bytes) -> None:
        """Add received bytes."""
        self._pieces.add(data[: self.missing])
        self.rest = data[self.missing :]
        self.missing = max(0, self.missing - len(data))

    async def join(self, *args: Any) -> None:
        """Join the pieces of the body; arguments as for `Body.whole`."""
        self.body = await self._pieces.whole(*args)

    def give_up(self) -> Iterator[bytes]:
        """Yield all received bytes, head included, for the general path.

        They come in pieces, and each piece is released. Joined, an incomplete large body would be in memory twice.
        """
        self.body = b""
        yield self._start
        yield from self._pieces.give_up()
        yield self.rest


class FastPath:
    """Reads, admits and answers usual requests of HTTP/1.1.

    Args:
        application: Answers, counts and logs requests; its front door admits them.
        common: Makes the headers that every response has.
    """

    def __init__(self, application: Application, common: Callable[[], Headers]) -> None:
        self._application = application
        self._front_door = application.front_door
        self._limits = application.front_door.limits
        self._common = common
        self._common_lines = b""
        self._common_second = 0
        """The second in which `_common_lines` was made: the date in it has a resolution of one second."""
        self._heads: dict[bytes, _Head] = {}

    def read(self, data: bytes, client: Any = None, connection: Member | None = None) -> FastRequest | None:
        """Read the head at the start of `data`; None if it is incomplete or unusual."""
        end = data.find(_HEAD_END)
        if end < 0:
            return None
        start = data[: end + len(_HEAD_END)]
        head = self._heads.get(start) or self._read_head(start)
        return None if head is None else FastRequest(head, data, client, connection)

    def _read_head(self, data: bytes) -> _Head | None:
        reader = StrictReader(len(data) + 1)
        reader.receive_data(data)
        try:
            request = reader.next_event()
        except h11.RemoteProtocolError:
            return None  # the general path answers with the reason
        if not isinstance(request, h11.Request) or (length := _length(request)) is None:
            return None
        path, _, query = request.target.partition(b"?")
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": request.method.decode("ascii"),
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "headers": list(request.headers),
            PATH_TAKEN: "fast",
        }
        try:
            self._limits.check_head(scope)
        except HttpError:
            return None  # likewise
        head = _Head(scope, length, len(data))
        if len(data) <= CACHED_HEAD_BYTES and _UNIQUE.isdisjoint(dict(request.headers)):
            if len(self._heads) >= MAX_CACHED_HEADS:
                self._heads.clear()
            self._heads[data] = head
        return head

    def admit(self, request: FastRequest) -> bytes | Literal[False] | None:
        """Decide by the headers, before the body is complete.

        Returns:
            None: the body is to be received. False: the general path takes the request. Bytes: the whole response, for
            a complete request without a valid key.
        """
        problem = self._front_door.reject(request.scope)
        if problem is None:
            limits, scope = self._limits, request.scope
            if limits.is_upload(scope):
                return False
            fits = request.length <= limits.body_limit_bytes(scope) and limits.has_room(request.length, scope)
            return None if fits else False
        if request.missing or problem.kind is not status.UNAUTHORIZED or self._application.closes_connections:
            return False
        return self._response_now(request, problem)

    @contextmanager
    def receiving(self, request: FastRequest) -> Iterator[Callable[[bytes], None]]:
        """Count a request while its body arrives; the block passes each received part to the yielded function."""
        with self._limits.hold(request.scope) as held:
            held.keep(request.length)  # `admit` has found room for it
            yield request.add

    def decide(self, request: FastRequest) -> bytes | None:
        """Return the whole response to a complete request if it needs no engine; None: call `answer`."""
        if self._application.closes_connections:
            return None  # `answer` closes the connection, too
        decision = self._front_door.decide(request.scope, request.body)
        return None if decision is None else self._response_now(request, decision)

    def _response_now(self, request: FastRequest, decision: Problem | Answer) -> bytes:
        answer, headers = self._application.answer_now(decision, request.scope, len(request.body))
        return self._head(answer.status, headers) + b"".join(answer.pieces)

    async def answer(self, request: FastRequest, send: Callable[[bytes], Awaitable[None]]) -> bool:
        """Answer a request. Cancellation reaches the application.

        Args:
            request: A complete request that was admitted.
            send: Called with the bytes of the response, once or several times.

        Returns:
            True: the connection must be closed now.
        """
        exchange = _FastExchange(request.body, send, self._head)
        with self._limits.hold(request.scope) as held:
            held.keep(request.length)
            await self._application(request.scope, exchange.receive, exchange.send)
        return exchange.closes

    def _head(self, code: int, headers: Headers) -> bytes:
        if (second := int(time.time())) != self._common_second:
            self._common_lines = _lines(self._common())
            self._common_second = second
        return b"HTTP/1.1 %d \r\n%s%s\r\n" % (code, _lines(headers), self._common_lines)


class _FastExchange:
    """ASGI's `receive` and `send` for one request."""

    __slots__ = ("_body", "_head", "_make_head", "_send", "closes")

    def __init__(
        self,
        body: bytes | bytearray,
        send: Callable[[bytes], Awaitable[None]],
        make_head: Callable[[int, Headers], bytes],
    ) -> None:
        self._body: bytes | bytearray | None = body
        self._send = send
        self._make_head = make_head
        self._head = b""
        self.closes = False

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is None:
            await anyio.sleep_forever()  # until the client leaves, which cancels
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message["headers"]
            self.closes = (b"connection", b"close") in headers
            self._head = self._make_head(message["status"], headers)
            return
        head, self._head = self._head, b""  # sent together with the body, so that the client wakes up once
        await self._send(head + message["body"])


def _lines(headers: Headers) -> bytes:
    lines = b"".join([b"%s: %s\r\n" % header for header in headers])
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers):
        raise RuntimeError("a response header has more than one line")
    return lines


def _length(request: h11.Request) -> int | None:
    """Return the bytes of a usual request's body; None if the request is unusual."""
    headers = dict(request.headers)
    given = headers.get(b"content-length")
    is_usual = (
        request.http_version == b"1.1"
        and _UNUSUAL.isdisjoint(headers)
        and headers.get(b"connection", _KEEPS).lower() == _KEEPS
        and NDJSON not in headers.get(b"accept", b"")  # a streamed response has no Content-Length,
        and PLUGINS.encode() not in request.target  # that of a plugin may have none,
        and LIVE.encode() not in request.target  # and that of the live feed never ends
    )
    if not is_usual or request.method not in (b"GET", b"POST") or (given is None) != (request.method == b"GET"):
        return None
    return int(given or 0)
