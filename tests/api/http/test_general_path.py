"""The general path, with the test as the ASGI server, message by message."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from staged_pool.api.app.call import Answer
from staged_pool.api.asgi import App, Message, Receive, Scope, Send
from staged_pool.api.config import ServerConfig
from staged_pool.api.http import general_path
from staged_pool.api.http.general_path import FREE_PIECES, MIN_PIECE_BYTES, GeneralPath
from staged_pool.api.limits.request_limits import RequestLimits
from staged_pool.api.limits.server_state import ServerState
from staged_pool.api.status import Problem

pytestmark = pytest.mark.anyio

END = {"type": "http.request", "body": b"", "more_body": False}
DISCONNECT = {"type": "http.disconnect"}


def chunk(body: bytes) -> Message:
    return {"type": "http.request", "body": body, "more_body": True}


async def answer(send: Send, status: int, body: bytes = b"") -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


def say(given: Problem | Answer) -> App:
    assert isinstance(given, Problem)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, given.status, given.kind.word.encode())

    return app


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    assert not message["more_body"]
    await answer(send, 200, bytes(message["body"]))


class Client:
    """One request. What the server would hand over is queued without a bound; what the general path sends is kept."""

    def __init__(self, headers: dict[str, str] | None = None, *, http_version: str = "1.1", **scope: Any) -> None:
        raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "http_version": http_version,
            "headers": raw,
            **scope,
        }
        self._put, self._get = anyio.create_memory_object_stream[Message](10_000)
        self.sent: list[Message] = []

    def feed(self, *messages: Message) -> Client:
        for message in messages:
            self._put.send_nowait(message)
        return self

    @property
    def unread(self) -> int:
        return self._get.statistics().current_buffer_used

    async def receive(self) -> Message:
        return await self._get.receive()

    async def send(self, message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        self.sent.append(message)

    async def call(self, path: GeneralPath) -> Client:
        with self._put, self._get, anyio.fail_after(30):
            await path(self.scope, self.receive, self.send)
        return self

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def closes(self) -> bool:
        return (b"connection", b"close") in self.sent[0]["headers"]

    @property
    def complete(self) -> bool:
        return bool(self.sent) and not self.sent[-1].get("more_body", False)


def general(app: App = echo, state: ServerState | None = None, **config: Any) -> GeneralPath:
    limits = RequestLimits(ServerConfig(**config), state or ServerState())
    return GeneralPath(app, say, limits, reject=limits.too_many, decide=lambda scope, body: None)


@asynccontextmanager
async def during(client: Client, path: GeneralPath) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.call, path)
        yield


async def test_the_application_gets_the_body_as_one_message() -> None:
    client = await Client().feed(chunk(b"a"), chunk(b"b"), chunk(b""), chunk(b"c"), END).call(general())
    assert (client.status, client.body) == (200, b"abc")


async def test_a_request_without_a_body_is_passed_on() -> None:
    client = await Client(method="GET").feed(END).call(general())
    assert (client.status, client.body) == (200, b"")


async def test_a_declared_length_over_the_limit_is_rejected_before_a_byte_is_read() -> None:
    client = Client({"content-length": "11"}).feed(END)
    await client.call(general(body_limit_bytes=10))
    assert (client.status, client.body, client.closes) == (413, b"body_too_large", True)


@pytest.mark.parametrize("length", ["9" * 5000, "9" * 18])
async def test_an_absurd_length_is_rejected(length: str) -> None:
    client = await Client({"content-length": length}).feed(END).call(general())
    assert client.status == 413


async def test_a_chunked_body_is_counted_and_the_rest_of_it_is_read_and_dropped() -> None:
    client = Client().feed(*[chunk(b"x" * 10)] * 50, END)
    await client.call(general(body_limit_bytes=25))
    assert (client.status, client.body) == (413, b"body_too_large")
    assert client.unread == 0
    assert client.complete


async def test_no_more_than_the_limit_and_one_chunk_is_held() -> None:
    held: list[int] = []

    async def watch(scope: Scope, receive: Receive, send: Send) -> None:
        held.append(state.body_bytes)
        await echo(scope, receive, send)

    state = ServerState()
    protected = general(watch, state, body_limit_bytes=30)
    await Client().feed(*[chunk(b"x" * 10)] * 3, END).call(protected)
    await Client().feed(*[chunk(b"x" * 10)] * 4, END).call(protected)
    assert held == [30]
    assert state.body_bytes == 0


async def test_all_bodies_together_are_limited_too() -> None:
    entered, leave = anyio.Event(), anyio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        entered.set()
        await leave.wait()
        await answer(send, 200)

    state = ServerState()
    state.memory.budget.bodies.limit_bytes = 15
    protected = general(wait, state, body_limit_bytes=10)
    first = Client().feed(chunk(b"x" * 10), END)
    async with during(first, protected):
        await entered.wait()
        second = await Client().feed(chunk(b"x" * 10), END).call(protected)
        leave.set()
    third = await Client().feed(chunk(b"x" * 10), END).call(protected)
    assert (first.status, second.status, third.status) == (200, 429, 200)
    assert state.memory.budget.bodies.rejected == 1


async def test_no_more_requests_are_handled_at_once_than_allowed() -> None:
    entered, leave = anyio.Event(), anyio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        entered.set()
        await leave.wait()
        await answer(send, 200)

    protected = general(wait, max_http_requests=1)
    first = Client().feed(END)
    async with during(first, protected):
        await entered.wait()
        second = await Client().feed(chunk(b"x")).call(protected)
        leave.set()
    third = await Client().feed(END).call(protected)
    assert (first.status, second.status, second.body, third.status) == (200, 503, b"too_many_requests", 200)


async def test_a_body_in_crumbs_is_rejected() -> None:
    crumbs = [chunk(b"x")] * (FREE_PIECES * MIN_PIECE_BYTES // (MIN_PIECE_BYTES - 1) + 2)
    client = await Client().feed(*crumbs, END).call(general())
    assert (client.status, client.body, client.unread) == (400, b"too_many_pieces", 0)


async def test_a_body_in_small_pieces_is_read() -> None:
    client = await Client().feed(*[chunk(b"x" * MIN_PIECE_BYTES)] * (2 * FREE_PIECES), END).call(general())
    assert (client.status, len(client.body)) == (200, 2 * FREE_PIECES * MIN_PIECE_BYTES)


@pytest.mark.parametrize("scope", [{"raw_path": b"/" + b"x" * 10_000}, {"query_string": b"x" * 10_000}])
async def test_a_long_target_is_rejected(scope: Any) -> None:
    client = await Client(**scope).feed(END).call(general())
    assert (client.status, client.body, client.closes) == (414, b"target_too_long", True)


async def test_a_body_that_does_not_arrive_in_time_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general_path, "LINGER_S", 0.01)
    client = await Client().feed(chunk(b"half")).call(general(body_timeout_s=0.01))
    assert (client.status, client.body, client.closes) == (408, b"slow_body", True)


async def test_a_rejected_client_may_finish_sending_before_the_connection_closes() -> None:
    client = Client({"content-length": "99"})
    async with during(client, general(body_limit_bytes=10)):
        with anyio.fail_after(30):
            while not client.body:
                await anyio.lowlevel.checkpoint()
        assert not client.complete
        client.feed(chunk(b"x" * 99), END)
    assert client.complete


async def test_a_rejected_client_that_never_stops_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general_path, "LINGER_S", 0.01)
    client = await Client({"content-length": "99"}).call(general(body_limit_bytes=10))
    assert (client.status, client.complete) == (413, True)


async def test_a_client_that_leaves_cancels_the_application() -> None:
    entered, cancelled = anyio.Event(), anyio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        entered.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    client = Client().feed(chunk(b"x"), END)
    async with during(client, general(wait)):
        await entered.wait()
        client.feed(DISCONNECT)
        with anyio.fail_after(30):
            await cancelled.wait()
    assert not client.sent


async def test_an_application_that_waits_for_the_client_to_leave_is_cancelled_with_it() -> None:
    entered = anyio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        entered.set()
        await receive()

    client = Client().feed(chunk(b"x"), END)
    async with during(client, general(wait)):
        await entered.wait()
        client.feed(DISCONNECT)
    assert not client.sent


async def test_a_client_that_leaves_before_its_body_is_complete_never_reaches_the_application() -> None:
    client = await Client().feed(chunk(b"x"), DISCONNECT).call(general())
    assert not client.sent


async def test_leaving_while_the_last_of_the_answer_is_being_sent_cancels_nothing() -> None:
    """Hypercorn on trio says `http.disconnect` from inside that very send."""
    finished = anyio.Event()

    class Leaving(Client):
        async def send(self, message: Message) -> None:
            if message["type"] == "http.response.body":
                self.feed(DISCONNECT)
                await anyio.lowlevel.checkpoint()
            await super().send(message)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await echo(scope, receive, send)
        assert (await receive())["type"] == "http.disconnect"
        finished.set()

    client = await Leaving().feed(chunk(b"x"), END).call(general(app))
    assert client.complete
    assert finished.is_set()


@pytest.mark.parametrize(
    ("headers", "status", "word"),
    [
        ({"content-encoding": "br"}, 415, b"unsupported_coding"),
        ({"content-encoding": "gzip"}, 400, b"bad_coding"),
        ({"content-length": "3", "transfer-encoding": "chunked"}, 400, b"bad_framing"),
        ({"transfer-encoding": "chunked", "content-length": "3"}, 400, b"bad_framing"),
        ({"content-length": "+3"}, 400, b"bad_framing"),
        ({f"x-{i}": "y" for i in range(101)}, 431, b"headers_too_large"),
        ({"x-large": "y" * 20_000}, 431, b"headers_too_large"),
    ],
)
async def test_a_bad_head_is_rejected_and_the_connection_closes(
    headers: dict[str, str], status: int, word: bytes
) -> None:
    client = await Client(headers).feed(chunk(b"abc"), END).call(general())
    assert (client.status, client.body, client.closes, client.unread) == (status, word, True, 0)


async def test_a_compressed_body_is_unpacked_and_its_limit_is_that_of_what_comes_out() -> None:
    body = bytes(3 * 2**20)
    gzipped = {"content-encoding": "gzip"}
    for size, status in ((len(body), 200), (len(body) - 1, 413)):
        state = ServerState()
        passes = general(echo, state, body_limit_bytes=size)
        client = await Client(gzipped).feed(chunk(gzip.compress(body)), END).call(passes)
        assert client.status == status
        assert client.body == (body if status == 200 else b"body_too_large")
        assert state.body_bytes == 0
    state = ServerState()
    bodies = state.memory.budget.bodies
    bodies.limit_bytes = 2**23
    with bodies.hold("another") as held:
        held.add(2**23 - 2**20)
        full = await Client(gzipped).feed(chunk(gzip.compress(body)), END).call(general(echo, state))
    assert (full.status, full.body) == (429, b"bodies_too_large")
    nothing = await Client(gzipped).feed(END).call(general())
    assert (nothing.status, nothing.body) == (200, b"")


@pytest.mark.parametrize("headers", [{"content-encoding": "identity"}, {f"x-{i}": "y" for i in range(100)}])
async def test_what_is_just_within_the_limits_passes(headers: dict[str, str]) -> None:
    client = await Client(headers).feed(END).call(general())
    assert client.status == 200


async def test_http2_has_no_connection_header() -> None:
    client = await Client({"content-length": "99"}, http_version="2").feed(END).call(general(body_limit_bytes=10))
    assert client.status == 413
    assert not client.closes
