"""The general path: requests of any kind and HTTP version, between the protocols and the application.

It takes what the fast path (`fast_path.py`) does not: HTTP/2 and HTTP/3, chunked or compressed bodies, slow bodies,
unusual headers, and malformed requests. It is the complete path. The fast path exists only because this one is slower
for the many small requests that need none of this.

Hypercorn passes a request's body on in a queue of ten messages. If nobody reads it, the task that reads the socket
blocks, and behind it the task that ends the response. Hence three rules:

- The application is called once the body is complete, under a size limit and a deadline. No more than the limit plus
  one chunk is ever held. A compressed body is decompressed under the same limit.
- A rejection is sent while the rest of the body is read and dropped. The client has a moment to read the response
  before the connection closes.
- An upload is the exception: its handler reads the body while it arrives, under the same limits.
- While the application works on a request with a body, a watcher waits for the client to leave, and then cancels the
  application. Once the last message of the response is sent, a client that leaves is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import anyio.abc

from staged_pool.api import status
from staged_pool.api.app.app import Application
from staged_pool.api.app.call import LIVE, PLUGINS, Answer
from staged_pool.api.asgi import App, Message, Receive, Scope, Send
from staged_pool.api.cors import cors
from staged_pool.api.http.protocol.bodies import Body
from staged_pool.api.http.protocol.content_coding import coding_of, unpack
from staged_pool.api.limits.connection_limit import at_work, on_idle
from staged_pool.api.limits.request_limits import (
    RequestAccount,
    RequestLimits,
    announced_bytes,
    body_too_large,
    is_open,
)
from staged_pool.api.limits.uploads import PROGRESS_BYTES
from staged_pool.api.status import HttpError, Problem
from staged_pool.stages.exhausted import exhausted, is_out_of_memory

LINGER_S = 2.0
"""Seconds that a rejected client may go on sending.

Closing while its bytes are in flight resets the connection, and the client loses a response that it has not read.
"""

FREE_PIECES = 2**12
MIN_PIECE_BYTES = 8
"""A body may arrive in `FREE_PIECES` pieces, and one more for each `MIN_PIECE_BYTES` bytes.

A piece costs the event loop as much as a kilobyte does, so tiny pieces could keep it busy.
"""


class GeneralPath:
    """An ASGI application around another one, which gets complete bodies only.

    Cancellation of `__call__` reaches the application. So does a client that leaves before the response is sent; the
    call then returns normally.

    Args:
        app: Receives each body as one message with `more_body` false; it may ignore it.
        respond_with: Makes an application that sends a given problem or answer.
        limits: Limits of the server.
        reject: Called before a body is read; returns the problem of a request that is rejected.
        decide: Called with a complete body; returns an answer that needs no engine, or the problem of a rejection.
    """

    def __init__(
        self,
        app: App,
        respond_with: Callable[[Problem | Answer], App],
        limits: RequestLimits,
        *,
        reject: Callable[[Scope], Problem | None],
        decide: Callable[[Scope, bytes | bytearray], Problem | Answer | None],
    ) -> None:
        self._app = app
        self._respond_with = respond_with
        self._limits = limits
        self._server_state = limits.server_state
        self._reject = reject
        self._decide = decide

    @classmethod
    def before(cls, application: Application, cors_origins: Sequence[str] = ()) -> GeneralPath:
        """Make the general path of an application, with CORS if origins are allowed."""

        def with_cors(app: App) -> App:
            return cors(app, cors_origins) if cors_origins else app

        front_door = application.front_door
        return cls(
            with_cors(application),
            lambda decision: with_cors(application.answering_with(decision)),
            front_door.limits,
            reject=front_door.reject,
            decide=front_door.decide,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        receiver = _Receiver(receive)
        problem = self._reject(scope)
        with self._limits.hold(scope) as held:
            if problem is not None:
                is_full = problem.kind in (status.TOO_MANY_REQUESTS, status.TOO_MANY_CONNECTIONS)
                linger_s = 0 if is_full else LINGER_S
                await self._send_rejection(problem, scope, receiver, send, linger_s=linger_s)
                return
            try:
                self._limits.check_head(scope)
                if self._limits.is_upload(scope):
                    await self._pass_on(scope, receiver, send)
                    return
                held.announce(announced_bytes(scope))
                body = await self._read(scope, receiver, held)
            except HttpError as rejection:
                problem = rejection.problem
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                problem = status.problem(exhausted(error, "http"))
            if problem is not None:
                held.give_back()
                await self._send_rejection(problem, scope, receiver, send, linger_s=LINGER_S)
                return
            if not receiver.client_left:
                await self._answer(body, scope, receiver, send)

    async def _answer(self, body: bytes | bytearray, scope: Scope, receiver: _Receiver, send: Send) -> None:
        exchange = _GeneralExchange(scope, body, receiver, send)
        if not body and PLUGINS not in scope["path"] and not scope["path"].endswith(LIVE):
            # All other routes without a body are quick: they need no watcher.
            with at_work(scope):
                await self._app(scope, exchange.receive, exchange.send)
            return
        if (decision := self._decide(scope, body)) is not None:
            await self._respond_with(decision)(scope, exchange.receive, send)
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.watch, tasks.cancel_scope)
            with at_work(scope):
                await self._app(scope, exchange.receive, exchange.send)
            tasks.cancel_scope.cancel()

    async def _pass_on(self, scope: Scope, receiver: _Receiver, send: Send) -> None:
        """Let the application read the body of an upload while it arrives."""
        if coding_of(scope["headers"]) is not None:
            raise HttpError(status.UNSUPPORTED_CODING, "An upload must not have a Content-Encoding")
        exchange = _UploadExchange(scope, receiver, send, self._limits)
        with at_work(scope):
            async with anyio.create_task_group() as exchange.draining:
                await self._app(scope, exchange.receive, exchange.send)
                exchange.draining.cancel_scope.cancel()

    async def _read(self, scope: Scope, receiver: _Receiver, held: RequestAccount) -> bytes | bytearray:
        coding = coding_of(scope["headers"])
        packed = await self._receive(scope, receiver, held)
        if coding is None or receiver.client_left:
            return packed
        held.begin_to_unpack()
        body = await unpack(packed, coding, held.take, self._server_state)
        held.give_back(packed_only=True)
        return body

    async def _receive(self, scope: Scope, receiver: _Receiver, held: RequestAccount) -> bytes | bytearray:
        body = Body()
        pieces = 0
        timeout_s = self._limits.config.body_timeout_s
        with self._server_state.timeout(timeout_s):
            while not receiver.ended:
                if pieces and is_open(scope) and (problem := self._limits.too_many(scope)) is not None:
                    raise HttpError(problem.kind, problem.message, retry_after_s=problem.retry_after_s)
                chunk = await receiver.next()
                held.take(len(chunk))
                pieces += 1
                if pieces > FREE_PIECES + body.size // MIN_PIECE_BYTES:
                    raise _too_many_pieces()
                body.add(chunk)
        if not receiver.ended:
            raise HttpError(status.SLOW_BODY, f"The body did not arrive within {timeout_s:g} s")
        return await body.whole(self._server_state)

    async def _send_rejection(
        self, problem: Problem, scope: Scope, receiver: _Receiver, send: Send, *, linger_s: float
    ) -> None:
        sender = _RejectionSender(scope, receiver, send, linger_s)
        exchange = _GeneralExchange(scope, b"", receiver, send)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sender.drain)
            await self._respond_with(problem)(scope, exchange.receive, sender.send)
            tasks.cancel_scope.cancel()


class _Receiver:
    """Receives the body of one request, message by message."""

    __slots__ = ("_receive", "client_left", "ended")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.ended = False
        """True once the last message of the body is here."""
        self.client_left = False

    async def next(self) -> bytes:
        """Receive the next piece of the body; it is empty if the client has left."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = self.ended = True
            return b""
        self.ended = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk


class _GeneralExchange:
    """ASGI's `receive` and `send` for a request whose body is complete."""

    __slots__ = ("_answered", "_body", "_receiver", "_scope", "_send")

    def __init__(self, scope: Scope, body: bytes | bytearray, receiver: _Receiver, send: Send) -> None:
        self._scope = scope
        self._body: bytes | bytearray | None = body
        self._receiver = receiver
        self._send = send
        self._answered = False

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if not self._answered:
            await anyio.sleep_forever()  # the application waits for the client to leave; then the watcher cancels it
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._answered = True
        with on_idle(self._scope):
            await self._send(message)

    async def watch(self, application: anyio.CancelScope) -> None:
        while not self._receiver.client_left:
            await self._receiver.next()
        if not self._answered:
            application.cancel()


class _UploadExchange:
    """ASGI's `receive` and `send` for a request whose body is still arriving."""

    def __init__(self, scope: Scope, receiver: _Receiver, send: Send, limits: RequestLimits) -> None:
        self.draining: anyio.abc.TaskGroup
        self._scope = scope
        self._receiver = receiver
        self._send = send
        self._sender: Send | None = None
        self._limits = limits
        self._arrived = 0
        self._pieces = 0
        self._progress = 0
        """Bytes that have arrived since the body timeout began last."""
        self._waited_s = 0.0
        """Seconds that it has waited for these; the time in which the application works does not count."""

    async def receive(self) -> Message:
        """Receive the next piece of the body.

        Raises:
            HttpError: The body is too large, too slow, or in too small pieces.
        """
        if self._receiver.ended:
            return {"type": "http.disconnect"}
        chunk = await self._next()
        if self._receiver.client_left:
            return {"type": "http.disconnect"}
        self._arrived += len(chunk)
        self._progress += len(chunk)
        self._pieces += 1
        if self._progress >= PROGRESS_BYTES:
            self._progress, self._waited_s = 0, 0.0
        if self._arrived > (limit_bytes := self._limits.body_limit_bytes(self._scope)):
            raise body_too_large(limit_bytes)
        if self._pieces > FREE_PIECES + self._arrived // MIN_PIECE_BYTES:
            raise _too_many_pieces()
        return {"type": "http.request", "body": chunk, "more_body": not self._receiver.ended}

    async def _next(self) -> bytes:
        timeout_s, began = self._limits.config.body_timeout_s, anyio.current_time()
        chunk = b""
        with on_idle(self._scope), self._limits.server_state.timeout(timeout_s - self._waited_s) as waiting:
            chunk = await self._receiver.next()
        if waiting.cancelled_caught:
            raise HttpError(
                status.SLOW_BODY, f"{PROGRESS_BYTES} bytes of the body did not arrive within {timeout_s:g} s"
            )
        self._waited_s += anyio.current_time() - began
        return chunk

    async def send(self, message: Message) -> None:
        """Send the response; the rest of the body is read and dropped meanwhile."""
        if self._sender is None:
            self._sender = self._send
            if not self._receiver.ended:
                rejection = _RejectionSender(self._scope, self._receiver, self._send, LINGER_S)
                self.draining.start_soon(rejection.drain)
                self._sender = rejection.send
        with on_idle(self._scope):
            await self._sender(message)


class _RejectionSender:
    """Sends a rejection to a client that may still be sending its body."""

    def __init__(self, scope: Scope, receiver: _Receiver, send: Send, linger_s: float) -> None:
        self._closes = scope["http_version"].startswith("1")
        self._receiver = receiver
        self._send = send
        self._linger_s = linger_s
        self._drained = anyio.Event()

    async def drain(self) -> None:
        while not self._receiver.ended:
            await self._receiver.next()
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


def _too_many_pieces() -> HttpError:
    return HttpError(status.TOO_MANY_PIECES, "The body arrives in too many small pieces")
