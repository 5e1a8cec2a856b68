"""What stands between Hypercorn and the application: limits, deadlines, and no client that can wedge anything.

Hypercorn hands a request's body over in a queue of ten messages. If nobody reads it, the task that reads the socket
blocks, the task that ends the response blocks behind it, and over HTTP/2 so does every other stream of the connection.
Hence the rules here:

- A body is read to its end before the application is called, under a size cap and a deadline; it is never held beyond
  the cap plus one chunk. One that is compressed is undone under the same cap.
- A rejection is sent while the rest of the body is being read and dropped, and the client gets a moment to see the
  answer before the connection closes under it.
- While the application works on a request that had a body, a watcher waits for the client to leave, and then cancels
  the application. Once the last message of the answer is on its way, leaving is what clients do: it is ignored.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from staged_pool.api import status
from staged_pool.api.app.call import Answer
from staged_pool.api.asgi import App, Message, Receive, Scope, Send
from staged_pool.api.http.protocol.bodies import Body
from staged_pool.api.http.protocol.content_coding import coding_of, unpack
from staged_pool.api.limits.connection_limit import at_work, on_idle
from staged_pool.api.limits.request_limits import Held, RequestLimits, announced_bytes, is_open
from staged_pool.api.status import HttpError, Problem
from staged_pool.stages.exhausted import exhausted, is_out_of_memory

LINGER_S = 2.0
"""How long a rejected client may go on sending. Closing while its bytes are in flight resets the connection, and the
answer that it has not read yet is lost with it."""

FREE_PIECES = 2**12
PIECE_BYTES = 8
"""A body may come in 4096 pieces and one more for each eight bytes. Each costs the event loop as much as a kilobyte
does, so a body in crumbs is a way to keep it busy."""


class GeneralPath:
    """Wraps an ASGI application.

    Cancellation of `__call__` reaches the application. A client that leaves before the answer is on its way cancels
    the application too; the call then returns normally.

    Args:
        app: Receives each body as one message, `more_body` false. It need not read it.
        say: Makes the application that answers a request with a problem, or with an answer.
        limits: Those of the server.
        reject: Asked about each request before its body is read: a problem that keeps it out.
        decide: Asked about each request that has a body, when that is here: what it is answered with at once.
    """

    def __init__(
        self,
        app: App,
        say: Callable[[Problem | Answer], App],
        limits: RequestLimits,
        *,
        reject: Callable[[Scope], Problem | None],
        decide: Callable[[Scope, bytes | bytearray], Problem | Answer | None],
    ) -> None:
        self._app = app
        self._say = say
        self._limits = limits
        self._server_state = limits.server_state
        self._reject = reject
        self._decide = decide

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        intake = _Intake(receive)
        problem = self._reject(scope)
        with self._limits.hold(scope) as held:
            if problem is not None:
                is_full = problem.row in (status.TOO_MANY_REQUESTS, status.TOO_MANY_CONNECTIONS)
                linger_s = 0 if is_full else LINGER_S
                await self._decline(problem, scope, intake, send, linger_s=linger_s)
                return
            try:
                self._limits.check_head(scope)
                held.announce(announced_bytes(scope))
                body = await self._read(scope, intake, held)
            except HttpError as rejection:
                problem = rejection.problem
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                problem = status.problem(exhausted(error, "http"))
            if problem is not None:
                held.give_back()
                await self._decline(problem, scope, intake, send, linger_s=LINGER_S)
                return
            if not intake.client_left:
                await self._pass_on(body, scope, intake, send)

    async def _pass_on(self, body: bytes | bytearray, scope: Scope, intake: _Intake, send: Send) -> None:
        exchange = _Exchange(scope, body, intake, send)
        if not body:  # nothing that is asked for without a body takes long enough to be worth a watcher
            with at_work(scope):
                await self._app(scope, exchange.receive, exchange.send)
            return
        if (given := self._decide(scope, body)) is not None:
            await self._say(given)(scope, exchange.receive, send)
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.watch, tasks.cancel_scope)
            with at_work(scope):
                await self._app(scope, exchange.receive, exchange.send)
            tasks.cancel_scope.cancel()

    async def _read(self, scope: Scope, intake: _Intake, held: Held) -> bytes | bytearray:
        coding = coding_of(scope["headers"])
        packed = await self._receive(scope, intake, held)
        if coding is None or intake.client_left:
            return packed
        held.begin_to_unpack()
        body = await unpack(packed, coding, held.take, self._server_state)
        held.give_back(packed_only=True)
        return body

    async def _receive(self, scope: Scope, intake: _Intake, held: Held) -> bytes | bytearray:
        body = Body()
        pieces = 0
        timeout_s = self._limits.config.body_timeout_s
        with self._server_state.timeout(timeout_s):
            while not intake.ended:
                if pieces and is_open(scope) and (problem := self._limits.too_many(scope)) is not None:
                    raise HttpError(problem.row, problem.message, retry_after_s=problem.retry_after_s)
                chunk = await intake.next()
                held.take(len(chunk))
                pieces += 1
                if pieces > FREE_PIECES + body.size // PIECE_BYTES:
                    raise HttpError(status.TOO_MANY_PIECES, "The body comes in too many pieces")
                body.add(chunk)
        if not intake.ended:
            raise HttpError(status.SLOW_BODY, f"The body did not arrive in time; it has {timeout_s:g} s")
        return await body.whole(self._server_state)

    async def _decline(self, problem: Problem, scope: Scope, intake: _Intake, send: Send, *, linger_s: float) -> None:
        farewell = _Farewell(scope, intake, send, linger_s)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(farewell.drain)
            await self._say(problem)(scope, _Exchange(scope, b"", intake, send).receive, farewell.send)
            tasks.cancel_scope.cancel()


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

    __slots__ = ("_answered", "_body", "_intake", "_scope", "_send")

    def __init__(self, scope: Scope, body: bytes | bytearray, intake: _Intake, send: Send) -> None:
        self._scope = scope
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
        with on_idle(self._scope):
            await self._send(message)

    async def watch(self, application: anyio.CancelScope) -> None:
        while not self._intake.client_left:
            await self._intake.next()
        if not self._answered:
            application.cancel()


class _Farewell:
    """Sends a rejection to a client that may still be sending."""

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
