"""The short way through HTTP, for a request that comes alone and at once on a connection where nothing else goes on.

Nearly every request comes like that, and nothing about it is left for machinery to wait for. The usual way takes longer
for a few texts than all stages together, and what the event loop's thread does is taken, on a small machine, from the
forwards that run: the cores and the interpreter. It matters most for refusals: with ten times as many requests as can
be answered, a third of the answers would be lost. And it matters for who asks whether the server is alive: that answer
should wait for nothing, least of all for the turns of several tasks on a loop that has much to do. Anything unusual
about a request, any limit that it would exceed, and a body that takes its time, is left to the usual way, which gives
the same answers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import anyio

from staged_pool.api.app import Application, Asks, AtOnce
from staged_pool.api.asgi import Headers, Message, Scope
from staged_pool.api.bodies import unwritten
from staged_pool.api.call import LINES, new_request_id
from staged_pool.api.config import ServerConfig
from staged_pool.api.guard import TARGET_LIMIT_BYTES
from staged_pool.api.traffic import Traffic

T = TypeVar("T")

_REQUEST: Final = re.compile(
    rb"(?P<method>GET|POST) (?P<path>/[!-$&->@-~]*) HTTP/1\.1\r\n"
    rb"(?P<headers>(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~]*\r\n)+)\r\n"
)
"""A head that can be read in one way only: its path has no escapes and no query."""

_UNUSUAL: Final = frozenset({
    b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"http2-settings", b"origin",
})  # fmt: skip
"""Those that change what a request says, where it ends, what becomes of its connection, or who may read its answer."""

_KEEPS: Final = b"keep-alive"

_HEAD_END: Final = b"\r\n\r\n"

_LENGTH: Final = re.compile(rb"[0-9]{1,10}")


LARGEST_BODY_BYTES: Final = 2**26
"""Of those that go the short way, if the server takes bodies of that size. Room for all of it is set aside before it is
here, which takes no memory yet. A body that stops in between is copied once, to be left to the usual way: that is why
there is an end to it."""

ROOM_BYTES: Final = 2**18
"""What is received of it at once. The event loop spends a few tenths of a millisecond on that."""


_OF_ONE: Final = frozenset({b"x-request-id", b"traceparent"})
"""Headers that belong to one request alone: no other will read like it."""

MOST_HEADS: Final = 1024
"""That are known again, of"""

KNOWN_HEAD_BYTES: Final = 2**11
"""at most: enough for the keys that services give out."""


@dataclass(frozen=True, slots=True)
class _Head:
    """What the bytes of a head say, but for who sent them."""

    method: str
    path: str
    headers: Headers
    """Names in lower case."""
    length: int
    """Bytes of the body."""
    size: int
    """Bytes of the head."""


@dataclass(frozen=True, slots=True)
class Whole:
    """One complete request."""

    scope: Scope
    head: bytes
    body: bytes | bytearray


class Arriving:
    """A request whose head is here, and whose body is not yet.

    Args:
        scope: Of ASGI.
        data: What there is of it.
        start: Where in that the body begins.
        length: Bytes of the body.
    """

    __slots__ = ("_body", "_data", "_start", "count", "length", "scope")

    def __init__(self, scope: Scope, data: bytes, start: int, length: int) -> None:
        self.scope = scope
        self._data = data
        self._start = start
        self._body: bytearray | None = None
        self.length = length
        """Bytes of the body."""
        self.count = len(data) - start
        """Bytes of the body that are here."""

    def room(self) -> memoryview:
        """Where the rest is to lie, or a part of it."""
        if self._body is None:
            self._body = unwritten(self.length)
            self._body[: self.count] = memoryview(self._data)[self._start :]
        return memoryview(self._body)[self.count : self.count + ROOM_BYTES]

    def whole(self) -> Whole:
        """The request, when all of its body is here."""
        assert self._body is not None
        return Whole(self.scope, self._data[: self._start], self._body)

    def so_far(self) -> bytes:
        """All that has arrived, the head too."""
        return self._data if self._body is None else self._data[: self._start] + self._body[: self.count]


class Express:
    """Looks at what has arrived on a connection that has no request in hand.

    Args:
        application: Knows whether a request may enter or is to be turned away, answers it, logs and counts it.
        config: Requests beyond its limits are left to the usual way.
        traffic: Where the requests that are being handled, and their bodies, are counted.
        common: Makes the headers that every answer of the server has.
    """

    def __init__(
        self, application: Application, config: ServerConfig, traffic: Traffic, common: Callable[[], Headers]
    ) -> None:
        self._application = application
        self._config = config
        self._traffic = traffic
        self._common = common
        self._common_lines = b""
        self._common_second = 0
        """That they were made in: the date among them has whole seconds."""
        self._heads: dict[bytes, _Head] = {}
        """That have been read. Clients send the same few again and again."""
        self._refused: dict[bytes, tuple[int, Asks]] = {}
        """Heads of requests that were refused for overload: how long the body is, and what else the refusal depended
        on."""

    def read(self, data: bytes, client: Any = None) -> Whole | Arriving | None:
        """The one request that `data` is, or the head and the beginning of; None where it is anything else.

        Args:
            data: What has arrived.
            client: Who sent it, as ASGI has it.
        """
        size = data.find(_HEAD_END) + len(_HEAD_END)
        head = self._heads.get(data[:size]) or self._read_head(data)
        if head is None:
            return None
        begun = len(data) - head.size
        if not begun <= head.length <= max(begun, LARGEST_BODY_BYTES):
            return None
        scope = {
            "type": "http",
            "method": head.method,
            "path": head.path,
            "http_version": "1.1",
            "headers": [*head.headers],
            "client": client,
        }
        if begun == head.length:
            return Whole(scope, data[: head.size], data[head.size :])
        return Arriving(scope, data, head.size, head.length)

    def _read_head(self, data: bytes) -> _Head | None:
        """None where there is anything unusual about it, or it is not all there."""
        if (request := _REQUEST.match(data)) is None:
            return None
        headers = _headers(request["headers"])
        if headers is None or not self._is_usual(headers) or request.end() > self._config.header_limit_bytes:
            return None
        if len(request["path"]) > TARGET_LIMIT_BYTES:
            return None
        if (length := _length(request["method"], headers)) is None:
            return None
        head = _Head(
            request["method"].decode("ascii"),
            request["path"].decode("ascii"),
            list(headers.items()),
            length,
            request.end(),
        )
        if head.size <= KNOWN_HEAD_BYTES and _OF_ONE.isdisjoint(headers):
            _put(self._heads, request[0], head)
        return head

    def answer_at_once(self, request: Whole) -> bytes | None:
        """The whole answer, where nothing has to be done for it: a refusal, or that the server is alive. None: the
        request may enter."""
        size = len(request.body)
        found = self._application.refuse_at_once(request.scope, size)
        if found is None and self.has_room(size):
            found = self._application.tell_alive(request.scope)
        if found is None:
            return None
        given, request_id = found
        if given.standing is not None:
            self._remember(request, given.standing[0])
        return self._written(given, request_id)

    def refuse_again(self, data: bytes) -> bytes | None:
        """The refusal of a request that reads like one which was just refused; None where it is to be read."""
        start = data.find(_HEAD_END) + len(_HEAD_END)
        known = self._refused.get(data[:start])
        if known is None:
            return None
        length, asks = known
        if len(data) - start != length or (refused := self._application.refuse_again(asks, length)) is None:
            return None
        return self._written(refused, new_request_id())

    def _remember(self, request: Whole, asks: Asks) -> None:
        if len(request.head) > KNOWN_HEAD_BYTES or not _OF_ONE.isdisjoint(dict(request.scope["headers"])):
            return
        _put(self._refused, request.head, (len(request.body), asks))

    def _written(self, given: AtOnce, request_id: str) -> bytes:
        headers = [*given.headers, (b"x-request-id", request_id.encode())]
        return self._head(given.answer.status, headers) + b"".join(given.answer.pieces)

    def has_room(self, size: int) -> bool:
        """Whether a request with a body of so many bytes keeps within the limits of the server now; what becomes of
        others is decided elsewhere."""
        config = self._config
        return (
            size <= config.body_limit_bytes
            and self._traffic.body_bytes + size <= config.bodies_limit_bytes
            and self._traffic.requests < config.max_http_requests
        )

    def may_arrive(self, arriving: Arriving) -> bool:
        """Whether the body of a request is to be waited for here: nothing is read for a caller without a key."""
        return self.has_room(arriving.length) and self._application.admit(arriving.scope) is None

    @contextmanager
    def holding(self, arriving: Arriving) -> Iterator[Callable[[int], None]]:
        """Count a request while its body arrives; the block says how many bytes more have come, each time."""

        def came(count: int) -> None:
            arriving.count += count
            self._traffic.body_bytes += count

        self._traffic.requests += 1
        self._traffic.body_bytes += arriving.count
        try:
            yield came
        finally:
            self._traffic.requests -= 1
            self._traffic.body_bytes -= arriving.count

    async def answer(self, request: Whole, send: Callable[[bytes], Awaitable[None]]) -> bool:
        """Answer a request. Cancellation reaches the application.

        Args:
            request: See `read`.
            send: Gets the bytes of the answer, in one piece or several.

        Returns:
            Whether the connection is to be closed now.
        """
        exchange = _Exchange(request.body, send, self._head)
        self._traffic.requests += 1
        self._traffic.body_bytes += len(request.body)
        try:
            await self._application(request.scope, exchange.receive, exchange.send)
        finally:
            self._traffic.requests -= 1
            self._traffic.body_bytes -= len(request.body)
        return exchange.closes

    def _head(self, status: int, headers: Headers) -> bytes:
        if (second := int(time.time())) != self._common_second:
            self._common_lines = _lines(self._common())
            self._common_second = second
        return b"HTTP/1.1 %d \r\n%s%s\r\n" % (status, _lines(headers), self._common_lines)

    def _is_usual(self, headers: dict[bytes, bytes]) -> bool:
        return (
            b"host" in headers
            and len(headers) <= self._config.header_limit
            and _UNUSUAL.isdisjoint(headers)
            and headers.get(b"connection", _KEEPS).lower() == _KEEPS
            and LINES not in headers.get(b"accept", b"")  # nobody knows how long their answer will be
        )


class _Exchange:
    """What the application sees of one request."""

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
        head, self._head = self._head, b""  # with what follows it, so that the client is woken once
        await self._send(head + message["body"])


def _put(heads: dict[bytes, T], head: bytes, known: T) -> None:
    if len(heads) >= MOST_HEADS:
        heads.clear()
    heads[head] = known


def _lines(headers: Headers) -> bytes:
    lines = b"".join([b"%s: %s\r\n" % header for header in headers])
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers):
        raise RuntimeError("a header of an answer has more than one line")
    return lines


def _length(method: bytes, headers: dict[bytes, bytes]) -> int | None:
    """Bytes of a request's body; None where that is not for sure."""
    given = headers.get(b"content-length")
    if method == b"GET":
        return 0 if given is None else None
    announced = _LENGTH.fullmatch(given or b"")
    return None if announced is None else int(announced[0])


def _headers(lines: bytes) -> dict[bytes, bytes] | None:
    """By their names in lower case; None where one comes twice."""
    headers: dict[bytes, bytes] = {}
    for line in lines.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name in headers:
            return None
        headers[name] = value.strip(b" \t")
    return headers
