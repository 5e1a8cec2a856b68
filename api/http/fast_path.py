"""The fast path through HTTP/1.1, for a request that is whole, or soon is, and asks for nothing unusual.

Nearly every request is like that. The general path through Hypercorn takes longer for a few texts than all stages
together, and the event loop's time is taken from the forwards beside it: the cores and the interpreter's lock. Both
paths have one reader of heads (`StrictReader`, h11), one front door, and one application, which counts and logs.
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
from staged_pool.api.app.call import LINES, PATH_TAKEN, Answer
from staged_pool.api.asgi import Headers, Message, Scope
from staged_pool.api.http.protocol.bodies import Body
from staged_pool.api.http.protocol.strict_reader import StrictReader
from staged_pool.api.limits.connection_limit import CONNECTION, Member
from staged_pool.api.status import HttpError, Problem

_UNUSUAL: Final = frozenset({
    b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"http2-settings", b"origin",
})  # fmt: skip
"""Those that change what a request says, where it ends, what becomes of its connection, or who may read its answer."""

_KEEPS: Final = b"keep-alive"

_HEAD_END: Final = b"\r\n\r\n"

_OF_ONE: Final = frozenset({b"x-request-id", b"traceparent"})
"""Headers that belong to one request alone: no other head will be the same."""

MOST_HEADS: Final = 1024
"""Heads that are known again. Clients send the same few again and again, and h11 takes 30 microseconds for each."""

KNOWN_HEAD_BYTES: Final = 2**11
"""Size of such a head at most: enough for the keys that services give out."""


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
        head: What h11 has read.
        data: What has arrived, from the first byte of the head.
        client: Who sent it, as ASGI has it.
        connection: The one it came on, for the limit of connections.
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
        """Bytes of the body that are not here."""
        self.rest = data[end:]
        """What came behind it: of the next request."""
        self._start = data[: head.size]
        self.body: bytes | bytearray = data[head.size : end]
        """All of it, once nothing is missing and `join` has returned."""
        self._pieces = Body()
        self._pieces.add(self.body)

    def add(self, data: bytes) -> None:
        """Take what has arrived."""
        self._pieces.add(data[: self.missing])
        self.rest = data[self.missing :]
        self.missing = max(0, self.missing - len(data))

    async def join(self, *args: Any) -> None:
        """Make one piece of the body; arguments as of `Body.whole`."""
        self.body = await self._pieces.whole(*args)

    def give_up(self) -> Iterator[bytes]:
        """Give all that has arrived, the head and what came behind it too, for the general path to read.

        Piece by piece, and each is let go: in one, large bodies that many clients break off would be there twice.
        """
        self.body = b""
        yield self._start
        yield from self._pieces.give_up()
        yield self.rest


class FastPath:
    """FileReads, judges and answers usual requests of HTTP/1.1.

    Args:
        application: Answers, counts and logs; its front door decides.
        common: Makes the headers that every answer of the server has.
    """

    def __init__(self, application: Application, common: Callable[[], Headers]) -> None:
        self._application = application
        self._door = application.door
        self._limits = application.door.limits
        self._common = common
        self._common_lines = b""
        self._common_second = 0
        """The second that they were made in: the date among them has whole seconds."""
        self._heads: dict[bytes, _Head] = {}

    def read(self, data: bytes, client: Any = None, connection: Member | None = None) -> FastRequest | None:
        """Read the head of a request that `data` begins with; None where it is unusual or not all there."""
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
            return None  # the general path says what is wrong
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
        if len(data) <= KNOWN_HEAD_BYTES and _OF_ONE.isdisjoint(dict(request.headers)):
            if len(self._heads) >= MOST_HEADS:
                self._heads.clear()
            self._heads[data] = head
        return head

    def admit(self, request: FastRequest) -> bytes | Literal[False] | None:
        """Decide by the headers: None, and its body is to be received; False, it is left to the general path; or the
        answer to a request that is here already and has no key."""
        problem = self._door.reject(request.scope)
        if problem is None:
            limits, scope = self._limits, request.scope
            fits = request.length <= limits.body_limit_bytes(scope) and limits.has_room(request.length, scope)
            return None if fits else False
        if request.missing or problem.row is not status.UNAUTHORIZED or self._application.closes_connections:
            return False
        return self._answered_now(request, problem)

    @contextmanager
    def receiving(self, request: FastRequest) -> Iterator[Callable[[bytes], None]]:
        """Count a request while its body arrives; the block gives each part of that to the function that it gets."""
        with self._limits.hold(request.scope) as held:
            held.keep(request.length)  # it was found to have room
            yield request.add

    def decide(self, request: FastRequest) -> bytes | None:
        """Decide about a request whose body is here: the whole answer; None if it enters."""
        if self._application.closes_connections:
            return None  # there is more to do than to send an answer
        given = self._door.decide(request.scope, request.body)
        return None if given is None else self._answered_now(request, given)

    def _answered_now(self, request: FastRequest, given: Problem | Answer) -> bytes:
        answer, headers = self._application.answer_now(given, request.scope, len(request.body))
        return self._head(answer.status, headers) + b"".join(answer.pieces)

    async def answer(self, request: FastRequest, send: Callable[[bytes], Awaitable[None]]) -> bool:
        """Answer a request. Cancellation reaches the application.

        Args:
            request: One that may enter.
            send: Gets the bytes of the answer, in one piece or several.

        Returns:
            The connection is to be closed now.
        """
        exchange = _Exchange(request.body, send, self._head)
        with self._limits.hold(request.scope) as held:
            held.keep(request.length)
            await self._application(request.scope, exchange.receive, exchange.send)
        return exchange.closes

    def _head(self, code: int, headers: Headers) -> bytes:
        if (second := int(time.time())) != self._common_second:
            self._common_lines = _lines(self._common())
            self._common_second = second
        return b"HTTP/1.1 %d \r\n%s%s\r\n" % (code, _lines(headers), self._common_lines)


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


def _lines(headers: Headers) -> bytes:
    lines = b"".join([b"%s: %s\r\n" % header for header in headers])
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers):
        raise RuntimeError("a header of an answer has more than one line")
    return lines


def _length(request: h11.Request) -> int | None:
    """Bytes of a usual request's body; None where anything about the request is unusual."""
    headers = dict(request.headers)
    given = headers.get(b"content-length")
    is_usual = (
        request.http_version == b"1.1"
        and _UNUSUAL.isdisjoint(headers)
        and headers.get(b"connection", _KEEPS).lower() == _KEEPS
        and LINES not in headers.get(b"accept", b"")  # nobody knows how long their answer will be
    )
    if not is_usual or request.method not in (b"GET", b"POST") or (given is None) != (request.method == b"GET"):
        return None
    return int(given or 0)
