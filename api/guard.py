"""What stands between the HTTP server and the application: limits, deadlines, and no client that can wedge anything.

Hypercorn hands a request's body over in a queue of ten messages. If nobody reads it, the task that reads the socket
blocks, the task that ends the response blocks behind it, and over HTTP/2 so does every other stream of the connection.
Hence the rules here:

- A body is read to its end before the application is called, under a size cap and a deadline; it is never held beyond
  the cap plus one chunk. One that is compressed is undone under the same cap.
- A refusal is sent while the rest of the body is being read and dropped, and the client gets a moment to see the answer
  before the connection closes under it.
- While the application works on a request that had a body, a watcher waits for the client to leave, and then cancels
  the application. Once the last message of the answer is on its way, leaving is what clients do: it is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import anyio

from staged_pool.api import status
from staged_pool.api.asgi import App, Message, Receive, Scope, Send
from staged_pool.api.bodies import Body
from staged_pool.api.config import ServerConfig
from staged_pool.api.content_coding import coding_of, unpack
from staged_pool.api.status import HttpRefusal, Problem
from staged_pool.api.traffic import Traffic

LINGER_S = 2.0
"""How long a refused client may go on sending. Closing while its bytes are in flight resets the connection, and the
answer that it has not read yet is lost with it."""

TARGET_LIMIT_BYTES = 2**13
"""Of path and query. No route needs a hundredth of it."""

FREE_PIECES = 2**12
PIECE_BYTES = 8
"""A body may come in 4096 pieces and one more for each eight bytes. Each costs the event loop as much as a kilobyte
does, so a body in crumbs is a way to keep it busy."""


class Guard:
    """Wraps an ASGI application.

    Cancellation of `__call__` reaches the application. A client that leaves before the answer is on its way cancels
    the application too; the call then returns normally.

    Args:
        app: Receives each body as one message, `more_body` false. It need not read it.
        refuse: Makes the application that answers a request with a problem.
        config: The limits.
        traffic: Where the requests that are being handled, and their bodies, are counted.
        turn_away: Asked about each request that has a body of so many bytes, before the application: a problem that
            it can be answered with there and then. Under overload this is what most requests cost.
        admit: Asked about each request before its body is read: a problem that keeps it out.
    """

    def __init__(
        self,
        app: App,
        refuse: Callable[[Problem], App],
        config: ServerConfig,
        traffic: Traffic | None = None,
        *,
        turn_away: Callable[[Scope, int], Problem | None] = lambda scope, body_bytes: None,
        admit: Callable[[Scope], Problem | None] = lambda scope: None,
    ) -> None:
        self._app = app
        self._refuse = refuse
        self._admit = admit
        self._turn_away = turn_away
        self._traffic = traffic or Traffic()
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._traffic.requests += 1
            try:
                await self._http(scope, receive, send)
            finally:
                self._traffic.requests -= 1
        elif scope["type"] == "lifespan":
            await _lifespan(receive, send)
        else:  # a websocket: closing before accepting is answered 403
            await send({"type": "websocket.close", "code": 1000})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        intake = _Intake(receive)
        if problem := self._admit(scope):
            await self._decline(problem, scope, intake, send, linger_s=0 if self._is_full else LINGER_S)
            return
        if self._is_full:
            message = f"The server handles as many requests at once as it may: {self._config.max_http_requests}"
            problem = Problem(row=status.TOO_MANY_REQUESTS, message=message, retry_after_s=1.0)
            await self._decline(problem, scope, intake, send, linger_s=0)
            return
        with _Room(self._config, self._traffic) as room, _Room(self._config, self._traffic) as packed:
            try:
                coding = _check_head(scope, self._config)
                body = await self._read(intake, room if coding is None else packed)
                if coding is not None and not intake.client_left:
                    body = await unpack(body, coding, room.take, self._traffic)
                    packed.clear()
            except HttpRefusal as refusal:
                room.clear()
                packed.clear()
                await self._decline(refusal.problem, scope, intake, send, linger_s=LINGER_S)
                return
            if intake.client_left:
                return
            exchange = _Exchange(body, intake, send)
            if not body:  # nothing that is asked for without a body takes long enough to be worth a watcher
                await self._app(scope, exchange.receive, send)
                return
            if refused := self._turn_away(scope, len(body)):
                await self._refuse(refused)(scope, exchange.receive, send)
                return
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(exchange.watch, tasks.cancel_scope)
                await self._app(scope, exchange.receive, exchange.send)
                tasks.cancel_scope.cancel()

    @property
    def _is_full(self) -> bool:
        return self._traffic.requests > self._config.max_http_requests

    async def _read(self, intake: _Intake, room: _Room) -> bytes | bytearray:
        body = Body()
        pieces = 0
        with self._traffic.patience(self._config.body_timeout_s):
            while not intake.ended:
                chunk = await intake.next()
                room.take(len(chunk))
                pieces += 1
                if pieces > FREE_PIECES + body.size // PIECE_BYTES:
                    raise HttpRefusal(status.TOO_MANY_PIECES, "The body comes in too many pieces")
                body.add(chunk)
            return await body.whole(self._traffic)
        message = f"The body did not arrive in time; it has {self._config.body_timeout_s:g} s"
        raise HttpRefusal(status.SLOW_BODY, message)

    async def _decline(self, problem: Problem, scope: Scope, intake: _Intake, send: Send, *, linger_s: float) -> None:
        farewell = _Farewell(scope, intake, send, linger_s)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(farewell.drain)
            await self._refuse(problem)(scope, _Exchange(b"", intake, send).receive, farewell.send)
            tasks.cancel_scope.cancel()


class _Room:
    """What one request holds of the memory for bodies; given back on exit."""

    __slots__ = ("_bytes", "_config", "_traffic")

    def __init__(self, config: ServerConfig, traffic: Traffic) -> None:
        self._config = config
        self._traffic = traffic
        self._bytes = 0

    def __enter__(self) -> _Room:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def take(self, count: int) -> None:
        self._bytes += count
        self._traffic.body_bytes += count
        if self._bytes > self._config.body_limit_bytes:
            raise _body_too_large(self._config)
        if self._traffic.body_bytes > self._config.bodies_limit_bytes:
            message = "The server holds as many bytes of request bodies as it may"
            raise HttpRefusal(status.BODIES_TOO_LARGE, message, retry_after_s=1.0)

    def clear(self) -> None:
        self._traffic.body_bytes -= self._bytes
        self._bytes = 0


class _Intake:
    """The incoming messages of one request."""

    __slots__ = ("_receive", "client_left", "ended")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.ended = False
        """No more of the body will come."""
        self.client_left = False

    async def next(self) -> bytes:
        """The next piece of the body; empty when there is none."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = self.ended = True
            return b""
        self.ended = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk


class _Exchange:
    """What the application sees of a request whose body is here."""

    __slots__ = ("_answered", "_body", "_intake", "_send")

    def __init__(self, body: bytes | bytearray, intake: _Intake, send: Send) -> None:
        self._body: bytes | bytearray | None = body
        self._intake = intake
        self._send = send
        self._answered = False

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if not self._answered:
            await anyio.sleep_forever()  # until the watcher cancels: who waits here waits for the client to leave
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._answered = True
        await self._send(message)

    async def watch(self, application: anyio.CancelScope) -> None:
        while not self._intake.client_left:
            await self._intake.next()
        if not self._answered:
            application.cancel()


class _Farewell:
    """Sends a refusal to a client that may still be sending."""

    def __init__(self, scope: Scope, intake: _Intake, send: Send, linger_s: float) -> None:
        self._closes = scope["http_version"].startswith("1")
        self._intake = intake
        self._send = send
        self._linger_s = linger_s
        self._drained = anyio.Event()

    async def drain(self) -> None:
        while not self._intake.ended:
            await self._intake.next()
        self._drained.set()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._closes:
            message["headers"] = [*message["headers"], (b"connection", b"close")]
        if message["type"] != "http.response.body" or message.get("more_body", False):
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        with anyio.move_on_after(self._linger_s):
            await self._drained.wait()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _check_head(scope: Scope, config: ServerConfig) -> bytes | None:
    """The content coding of the body, if it has one.

    Raises:
        HttpRefusal: The headers alone show something to be wrong, before any of the body is read.
    """
    headers = scope["headers"]
    if len(scope.get("raw_path", b"")) + len(scope.get("query_string", b"")) > TARGET_LIMIT_BYTES:
        message = f"The path and query are longer than {TARGET_LIMIT_BYTES} bytes"
        raise HttpRefusal(status.TARGET_TOO_LONG, message)
    header_bytes = 0
    length: bytes | None = None
    chunked = False
    for name, value in headers:
        header_bytes += len(name) + len(value)
        if name == b"content-length":
            length = value
        elif name == b"transfer-encoding":
            chunked = True
    if len(headers) > config.header_limit or header_bytes > config.header_limit_bytes:
        message = f"More than {config.header_limit} headers, or {config.header_limit_bytes} bytes of them"
        raise HttpRefusal(status.HEADERS_TOO_LARGE, message)
    coding = coding_of(headers)
    if length is None:
        return coding
    if chunked:  # two servers in a row may disagree on where such a body ends: the way requests are smuggled
        message = "Transfer-Encoding and Content-Length exclude each other"
        raise HttpRefusal(status.BAD_FRAMING, message)
    if not length.isdigit():
        raise HttpRefusal(status.BAD_FRAMING, "Content-Length is not a number")
    if len(length) > 18 or int(length) > config.body_limit_bytes:
        raise _body_too_large(config)
    return coding


def _body_too_large(config: ServerConfig) -> HttpRefusal:
    message = f"The body is larger than this server's limit of {config.body_limit_bytes} bytes"
    return HttpRefusal(status.BODY_TOO_LARGE, message)


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
