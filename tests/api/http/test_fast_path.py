"""The fast path: only for what Hypercorn would read in the same way, and with the same answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import h11
import pytest
from blockbuster import BlockBuster
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.api.app.app import Application
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.config import ServerConfig
from staged_pool.api.http import connections
from staged_pool.api.http.fast_path import CACHED_HEAD_BYTES, MAX_CACHED_HEADS, FastPath, FastRequest
from staged_pool.api.http.protocol.bodies import GATHERED_BYTES
from staged_pool.api.http.protocol.hypercorn_protocols import Http1
from staged_pool.api.http.transports import ARRIVAL_BYTES, READ_BYTES
from staged_pool.api.limits.server_state import ServerState
from staged_pool.api.openapi.operations import OPERATIONS
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.scheduling.entries import Priority
from tests.servers.byte_client import EMBED, post, read_answer
from tests.servers.on_socket import Served, serving
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

BODY = b'{"input":"a"}'


def request(*headers: bytes, body: bytes = BODY, first: bytes = b"POST /v1/embeddings HTTP/1.1") -> bytes:
    lines = (first, b"host: test", b"content-type: application/json", *headers)
    return b"\r\n".join(lines) + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def get(path: str, *headers: bytes) -> bytes:
    return b"\r\n".join([b"GET %s HTTP/1.1" % path.encode(), b"host: test", *headers, b"", b""])


def fast_path(**config: Any) -> FastPath:
    return FastPath(Application(EngineRegistry(), config=ServerConfig(**config)), lambda: [(b"date", b"today")])


def read(data: bytes) -> FastRequest | None:
    return fast_path().read(data)


def test_a_liveness_probe_is_answered_at_once() -> None:
    fast = fast_path()
    asks = fast.read(get("/health", b"x-request-id: its-id"))
    assert asks is not None
    assert fast.admit(asks) is None
    answer = fast.decide(asks)
    assert answer is not None
    assert answer.startswith(b"HTTP/1.1 200 \r\ncontent-type: application/json\r\n")
    assert b"\r\nx-request-id: its-id\r\ndate: today\r\n\r\n{" in answer


@pytest.mark.parametrize(
    "data",
    [
        b"",
        request()[:-20],
        request().replace(b"content-length: 13", b"content-length: %d" % (2**26 + 1)),
        request(first=b"GET /v1/embeddings HTTP/1.1"),
        request(first=b"GET /health HTTP/1.1", body=b""),
        request(first=b"HEAD /health HTTP/1.1", body=b""),
        get("/health")[:-2],
        get("/health", b"connection: close"),
        get("/health", b"upgrade: h2c"),
        get("/health", b"transfer-encoding: chunked"),
        get("/health", b"origin: https://test"),
        request(first=b"POST /v1/embeddings HTTP/1.0"),
        request(first=b"POST  /v1/embeddings HTTP/1.1"),
        request(b"transfer-encoding: chunked"),
        request(b"Transfer-Encoding : chunked"),
        request(b"expect: 100-continue"),
        request(b"upgrade: h2c"),
        request(b"connection: close"),
        request(b"content-encoding: gzip"),
        request(b"accept: application/x-ndjson"),
        request(b" folded: header"),
        request(b"name : blank"),
        request(b"n\x00me: value"),
        request(b"value: \x00"),
        request(b"no colon"),
        request(b"host: again"),
        request().replace(b"host: test\r\n", b""),
        request().replace(b"\r\n", b"\n"),
        request().replace(b"content-length: 13", b"content-length: +13"),
        request().replace(b"content-length: 13", b"content-length: 0x0d"),
        request(*(b"h%d: x" % n for n in range(100))),
        request(b"long: " + b"x" * 20_000),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_anything_unusual_is_left_to_the_usual_way(data: bytes) -> None:
    assert read(data) is None


@given(st.lists(st.integers(0, 200), max_size=5))
def test_what_has_arrived_and_the_rest_of_it_are_one_request(cuts: list[int]) -> None:
    data = request() + b"the next"
    size = len(data) - len(b"the next")
    first, *others = sorted({size - len(BODY), *(min(size - len(BODY) + cut, len(data)) for cut in cuts), len(data)})
    found = read(data[:first])
    assert found is not None
    for end in others:
        assert found.missing == size - first
        found.add(data[first:end])
        first = end
        if not found.missing:
            break
    anyio.run(found.join, ServerState())
    assert (found.body, b"".join(found.give_up())) == (BODY, data[:first])
    assert found.rest == data[size:first]
    assert found.scope["path"] == "/v1/embeddings"


_pieces = st.sampled_from(
    [b"POST", b"GET", b" ", b"/v1/embeddings", b"/", b"HTTP/1.1", b"\r\n", b"\n", b"\r", b"host: a", b"Host:b",
     b"content-length", b": 2", b":2", b"2", b"{}", b"transfer-encoding: chunked",
     b"x: y", b"\t", b":", b"\x00", b"\xff"]
)  # fmt: skip


def _mutated(data: bytes, cuts: list[tuple[int, int, bytes]]) -> bytes:
    for at, count, piece in cuts:
        place = at % (len(data) + 1)
        data = data[:place] + piece + data[place + count :]
    return data


@given(
    st.sampled_from([request(b"accept: */*"), get("/health", b"accept: */*")]),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 8), _pieces), max_size=4) | st.just([]),
)
def test_what_goes_the_short_way_is_one_request_to_a_strict_parser_too(
    sent: bytes, cuts: list[tuple[int, int, bytes]]
) -> None:
    data = _mutated(sent, cuts)
    if (found := read(data)) is None or found.missing:
        return
    parser = h11.Connection(h11.SERVER)
    while data.startswith(
        b"\r\n"
    ):  # empty lines before a request are ignored (RFC 9112, section 2.2), which h11 rejects
        data = data[2:]
    parser.receive_data(data)
    head = parser.next_event()
    assert isinstance(head, h11.Request)
    assert (head.method.decode(), head.target) == (found.scope["method"], found.scope["raw_path"])
    assert list(head.headers) == found.scope["headers"]
    body = b""
    while isinstance(event := parser.next_event(), h11.Data):
        body += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert body == found.body
    assert parser.trailing_data == (found.rest, False)


@asynccontextmanager
async def overloaded() -> AsyncIterator[Served]:
    """A server whose only place is taken by a request."""
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with serving(model, engine=EngineConfig(max_requests=1)) as served:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(served.engine.embed, "in flight")
            await until(lambda: served.in_flight == 1)
            try:
                yield served
            finally:
                gate.open()


@pytest.mark.anyio
async def test_it_gives_the_same_rejection_as_the_usual_way_and_the_connection_goes_on() -> None:
    async with overloaded() as served:
        async with await served.connect() as stream:
            answers = []
            for pieces in ([EMBED], [EMBED[:-1], EMBED[-1:]], [EMBED], [EMBED[:20], EMBED[20:]]):
                for piece in pieces:
                    await stream.send(piece)
                    await anyio.wait_all_tasks_blocked()
                answers.append(await read_answer(stream))
            await stream.send(get("/health"))
            assert (await read_answer(stream)).startswith(b"HTTP/1.1 200")
        rejected = served.engine.statistics().admission.refused
    heads = []
    for answer in answers:
        head, _, body = answer.partition(b"\r\n\r\n")
        status, *headers = head.split(b"\r\n")
        named = dict(header.split(b": ", 1) for header in headers)
        assert status == b"HTTP/1.1 429 "
        assert json.loads(body)["error"]["code"] == 429
        assert named.pop(b"x-request-id")
        assert named.pop(b"date").endswith(b"GMT")
        heads.append((named, body))
    assert all(head == heads[0] for head in heads)
    assert rejected == {"requests": 4}


@pytest.mark.anyio
async def test_it_answers_as_the_usual_way_does() -> None:
    async with serving() as served:
        async with await served.connect() as stream:
            answers = []
            for pieces in ([EMBED], [EMBED[:-1], EMBED[-1:]], [EMBED[:20], EMBED[20:]]):
                for piece in pieces:
                    await stream.send(piece)
                    await anyio.wait_all_tasks_blocked()
                answers.append(await read_answer(stream))
        await until(lambda: served.server.state.requests == served.server.state.body_bytes == 0)
    heads, bodies = [], []
    for answer in answers:
        head, _, body = answer.partition(b"\r\n\r\n")
        status, *headers = head.split(b"\r\n")
        assert status == b"HTTP/1.1 200 "
        heads.append([header.split(b": ")[0] for header in headers])
        bodies.append(json.loads(body)["data"])
    assert heads[0] == heads[1] == heads[2]
    assert bodies[0] == bodies[1] == bodies[2]


UNUSUAL = b"origin: https://test"
"""Sends a request the usual way, and changes nothing else about it."""


def told(answer: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """Status, headers and body of an answer, without values that differ each time.

    The header `connection` is left out too: the general path closes behind a rejection, because a body may follow.
    """
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    headers = dict(line.split(b": ", 1) for line in lines)
    assert headers.pop(b"x-request-id")
    assert headers.pop(b"date")
    headers.pop(b"connection", None)
    return status.split(b" ")[1], headers, body


@pytest.mark.anyio
async def test_the_first_request_that_is_unusual_has_a_protocol_made_for_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []

    class Counted(Http1):
        def __init__(self, *args: Any) -> None:
            made.append(self)
            super().__init__(*args)

    monkeypatch.setattr(connections, "Http1", Counted)
    counts = []
    async with serving() as served, await served.connect() as stream:
        for asked in (EMBED, get("/health"), get("/health", UNUSUAL), EMBED, get("/health", UNUSUAL), EMBED):
            await stream.send(asked)
            assert (await read_answer(stream)).startswith(b"HTTP/1.1 200 ")
            counts.append(len(made))
    assert counts == [0, 0, 1, 1, 1, 1]


@pytest.mark.anyio
@pytest.mark.parametrize("key", [None, "a-key-of-some-length"])
async def test_what_is_asked_with_get_is_answered_as_the_usual_way_does(
    key: str | None, monkeypatch: pytest.MonkeyPatch, nothing_blocks_the_event_loop: BlockBuster
) -> None:
    nothing_blocks_the_event_loop.deactivate()  # process metrics read /proc
    # The answer of /stages/live never ends, and takes the general path.
    paths = [path for path, operations in OPERATIONS.items() if "GET" in operations and path != "/stages/live"]
    moving = {"/metrics", "/stages", "/models", "/health", "/ping"}
    async with serving(api_keys=(key,) if key else ()) as served:
        for path in [*paths, "/", "/v1/embeddings", "/nowhere"]:
            async with await served.connect() as stream:
                await stream.send(get(path, UNUSUAL))
                usual = told(await read_answer(stream))
            with monkeypatch.context() as patch:
                patch.delattr(Http1, "_create_stream")
                async with await served.connect() as stream:
                    for _ in range(2):
                        await stream.send(get(path))
                        short = told(await read_answer(stream))
                        assert short[: 1 if path in moving else 3] == usual[: 1 if path in moving else 3]
        await until(lambda: served.server.state.requests == 0)


@pytest.mark.anyio
@pytest.mark.parametrize("asked", [get("/health"), get("/ping"), post(b"", path="/ping"), post(b"{}", path="/ping")])
async def test_that_it_is_alive_is_said_without_a_task(
    asked: bytes, monkeypatch: pytest.MonkeyPatch, nothing_blocks_the_event_loop: BlockBuster
) -> None:
    nothing_blocks_the_event_loop.deactivate()  # process metrics read /proc
    monkeypatch.delattr(Http1, "_create_stream")
    async with serving() as served, await served.connect() as stream:
        with monkeypatch.context() as patch:
            patch.delattr(FastPath, "answer")
            for _ in range(3):
                await stream.send(asked)
                assert (await read_answer(stream)).startswith(b"HTTP/1.1 200 ")
        await stream.send(get("/metrics"))
        metrics = await read_answer(stream)
    path = asked.split(b" ")[1]
    assert b'staged_pool_http_requests_total{model="",path_taken="fast",route="%s",status="200"} 3.0' % path in metrics


@pytest.mark.anyio
async def test_a_get_of_a_task_is_no_request_of_it() -> None:
    async with overloaded() as served, await served.connect() as stream:
        await stream.send(get("/v1/embeddings"))
        assert (await read_answer(stream)).startswith(b"HTTP/1.1 405")
        assert not served.engine.statistics().admission.refused


@pytest.mark.anyio
async def test_while_it_drains_it_is_alive_and_closes_its_connections() -> None:
    async with overloaded() as served, await served.connect() as stream:
        served.server.registry.close("the server is draining")
        await stream.send(get("/health"))
        answer = await read_answer(stream)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer
        with anyio.fail_after(30), pytest.raises(anyio.EndOfStream):
            await stream.receive()


@pytest.mark.anyio
async def test_a_rejection_that_stands_is_an_answer_of_its_own_each_time() -> None:
    gate = Gate()
    async with serving(LetterModel(on_forward=gate), engine=EngineConfig(max_requests=1)) as served:
        async with await served.connect() as first, await served.connect() as second:
            await first.send(EMBED)
            await until(lambda: served.in_flight == 1)
            heads, bodies = set(), set()
            for _ in range(3):
                await second.send(EMBED)
                head, _, body = (await read_answer(second)).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 429")
                assert b"retry-after: 1" in head
                heads.add(head)
                bodies.add(body)
            assert len(heads) == 3, "they have the same id"
            assert len(bodies) == 1
            assert served.engine.statistics().admission.refused == {"requests": 3}
            gate.open()
            await read_answer(first)
            await second.send(EMBED)
            assert (await read_answer(second)).startswith(b"HTTP/1.1 200")


async def rejected_ids(stream: anyio.abc.SocketStream, *requests: bytes) -> list[bytes]:
    """The request ids of the rejections of some requests, one after the other."""
    ids = []
    for sent in requests:
        await stream.send(sent)
        answer = await read_answer(stream)
        assert answer.startswith(b"HTTP/1.1 429")
        (found,) = re.findall(rb"x-request-id: (.*)\r\n", answer)
        ids.append(found)
    return ids


@pytest.mark.anyio
async def test_of_many_rejections_few_are_logged_and_all_are_counted(logged: list[dict[str, Any]]) -> None:
    async with overloaded() as served, await served.connect() as stream:
        await rejected_ids(stream, *[EMBED] * 20)
        lines = [line for line in logged if line["event"] == "request.finished" and line["status"] == 429]
        left_out = sum(line.get("rejections_left_out", 0) for line in lines)
        assert 1 <= len(lines) < 20
        assert len(lines) + left_out <= 20
        assert {line["path_taken"] for line in lines} == {"fast"}
        assert served.engine.statistics().admission.refused == {"requests": 20}


@pytest.mark.anyio
async def test_a_request_keeps_the_id_that_it_was_given() -> None:
    ids = [b"one", b"two", b"two", b"one"]
    requests = [post(b'{"input":"a"}', f"x-request-id: {given.decode()}") for given in ids]
    async with overloaded() as served, await served.connect() as stream:
        assert await rejected_ids(stream, *requests) == ids


@pytest.mark.anyio
async def test_a_head_that_is_known_may_have_its_body_later() -> None:
    async with overloaded() as served, await served.connect() as stream:
        await rejected_ids(stream, EMBED, EMBED)
        await stream.send(EMBED[:-1])
        await anyio.wait_all_tasks_blocked()
        assert served.engine.statistics().admission.refused == {"requests": 2}
        await rejected_ids(stream, EMBED[-1:], EMBED)


@pytest.mark.anyio
async def test_a_known_head_is_no_way_around_a_drain() -> None:
    async with overloaded() as served, await served.connect() as stream:
        await rejected_ids(stream, EMBED, EMBED)
        served.server.registry.close("the server is draining")
        await stream.send(EMBED)
        assert (await read_answer(stream)).startswith(b"HTTP/1.1 503")


@pytest.mark.anyio
async def test_a_rejection_of_bulk_work_is_not_one_of_interactive_work() -> None:
    requests = [post(b'{"input":"a"}', f"x-priority: {priority}") for priority in Priority] * 2
    async with overloaded() as served, await served.connect() as stream:
        await rejected_ids(stream, *requests)
        rejected = served.engine.statistics().admission.refused
        assert sum(rejected.values()) == 4


def test_heads_that_are_known_are_not_more_than_a_few() -> None:
    fast = fast_path()
    for number in range(2 * MAX_CACHED_HEADS):
        assert fast.read(request(b"number: %d" % number)) is not None
    assert 0 < len(fast._heads) <= MAX_CACHED_HEADS


@pytest.mark.parametrize(
    "header", [b"X-Request-Id: an-id", b"traceparent: 00-1-2-03", b"long: " + b"x" * CACHED_HEAD_BYTES]
)
def test_a_head_of_one_request_alone_or_a_long_one_is_not_kept(header: bytes) -> None:
    fast = fast_path()
    assert fast.read(request(header)) is not None
    assert not fast._heads


def test_a_head_that_was_read_says_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = fast_path()
    first = fast.read(request(b"accept: */*"), ("first", 1))
    assert first is not None
    first.scope["headers"].clear()  # an application's change of a scope must not reach the next request
    first.scope["path"] = "/elsewhere"
    wanted = read(request(b"accept: */*"))
    assert wanted is not None
    monkeypatch.delattr(FastPath, "_read_head")
    again = fast.read(request(b"accept: */*"), ("second", 2))
    assert again is not None
    assert (again.scope, again.body) == ({**wanted.scope, "client": ("second", 2)}, BODY)
    begun = fast.read(request(b"accept: */*")[:-3])
    assert begun is not None
    assert (begun.length, begun.missing) == (len(BODY), 3)


def padded(size: int) -> bytes:
    """A request for one letter, padded with `size` blanks."""
    return post(b'{"input":' + b" " * size + b'"a"}')


@pytest.mark.anyio
@pytest.mark.parametrize("size", [100, ARRIVAL_BYTES, READ_BYTES, 3 * READ_BYTES + 12_345])
async def test_a_large_body_goes_it_too(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Http1, "_create_stream")
    large = padded(size)
    cut = len(large) * 2 // 3
    async with serving() as served:
        async with await served.connect() as stream:
            for pieces in ([large], [large[:cut], large[cut:-1], large[-1:]]):
                for piece in pieces:
                    await stream.send(piece)
                    await anyio.wait_all_tasks_blocked()
                assert b'"embedding"' in await read_answer(stream)
        await until(lambda: served.server.state.requests == served.server.state.body_bytes == 0)


@pytest.mark.anyio
@pytest.mark.parametrize("begun", [200, 5000, READ_BYTES])
async def test_nothing_of_the_next_request_is_taken_for_a_body(begun: int) -> None:
    both = padded(2 * READ_BYTES) + EMBED
    async with serving() as served:
        async with await served.connect() as stream:
            await stream.send(both[:begun])
            await anyio.wait_all_tasks_blocked()
            await stream.send(both[begun:])
            received = b""
            with anyio.fail_after(30):
                while received.count(b"HTTP/1.1 200") < 2:
                    received += await stream.receive()


@pytest.mark.anyio
@pytest.mark.parametrize("timeout_s", [-1.0, 0.0])
async def test_a_body_that_takes_its_time_is_left_to_the_usual_way(
    timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FAST_BODY_S", timeout_s)
    monkeypatch.setattr(connections, "FAST_BODY_BYTES_PER_S", math.inf)
    large = padded(READ_BYTES)
    async with serving() as served:
        async with await served.connect() as stream:
            for _ in range(2):
                await stream.send(large[: READ_BYTES // 2])
                await until(lambda: served.server.state.requests > 0)
                await stream.send(large[READ_BYTES // 2 :])
                assert b'"embedding"' in await read_answer(stream)
        await until(lambda: served.server.state.requests == served.server.state.body_bytes == 0)


@pytest.mark.anyio
async def test_of_a_client_that_leaves_within_its_body_nothing_remains() -> None:
    async with serving() as served:
        for sent in (5000, READ_BYTES):
            async with await served.connect() as stream:
                await stream.send(padded(2 * READ_BYTES)[:sent])
                await until(lambda: served.server.state.body_bytes > 0)
            await until(lambda: served.server.state.connections == 0)
            assert served.server.state.requests == served.server.state.body_bytes == 0
        await served.assert_alive()


@pytest.mark.anyio
async def test_a_body_is_not_waited_for_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FAST_BODY_S", math.inf)
    async with serving(api_keys=("a-key-of-some-length",)) as served:
        async with await served.connect() as stream:
            await stream.send(padded(2 * READ_BYTES)[:5000])
            assert (await read_answer(stream)).startswith(b"HTTP/1.1 401")
        await until(lambda: served.server.state.connections == 0)


@pytest.mark.anyio
async def test_a_body_that_there_is_no_room_for_is_rejected_as_ever() -> None:
    async with serving(body_limit_bytes=100_000) as served:
        async with await served.connect() as stream:
            await stream.send(padded(READ_BYTES))
            assert (await read_answer(stream)).startswith(b"HTTP/1.1 413")
        await served.assert_alive()


@pytest.mark.anyio
async def test_a_client_that_leaves_takes_its_request_with_it() -> None:
    gate = Gate()
    async with serving(LetterModel(on_forward=gate)) as served:
        async with await served.connect() as stream:
            await stream.send(EMBED)
            await until(lambda: served.in_flight == 1)
        await until(lambda: served.in_flight == 0)
        await until(lambda: served.server.state.requests == served.server.state.connections == 0)
        gate.open()
        assert served.engine.statistics().cancelled


@pytest.mark.anyio
async def test_a_request_that_comes_too_early_waits_for_the_answer_of_the_one_before() -> None:
    gate = Gate()
    async with serving(LetterModel(on_forward=gate)) as served:
        async with await served.connect() as stream:
            await stream.send(EMBED)
            await until(lambda: served.in_flight == 1)
            await stream.send(get("/health"))
            await anyio.wait_all_tasks_blocked()
            gate.open()
            received = b""
            with anyio.fail_after(30):
                while received.count(b"HTTP/1.1 200") < 2:
                    received += await stream.receive()
    assert received.index(b'"embedding"') < received.index(b'"unix"')


def test_what_has_arrived_is_let_go_of_piece_by_piece() -> None:
    whole = request(body=bytes(3 * GATHERED_BYTES))
    begun = read(whole[:200])
    assert begun is not None
    places = range(200, len(whole), GATHERED_BYTES // 4)
    for place in places:
        begun.add(whole[place : place + GATHERED_BYTES // 4])
    kept = [len(begun._pieces.pieces)]
    assert kept[0] >= 3
    given: list[bytes] = []
    for part in begun.give_up():
        given.append(part)
        kept.append(len(begun._pieces.pieces))
    assert b"".join(given) == whole
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 0
    assert begun.body == b""
