"""Hostile HTTP/2 clients: floods, windows that stay shut, streams that are left."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from h2.errors import ErrorCodes as Code
from hypercorn.events import RawData

from staged_pool.api.config import ServerConfig
from staged_pool.api.http.accept import Acceptor, HypercornLog
from staged_pool.api.http.connection_lifecycle import ConnectionConfig
from staged_pool.api.http.http2 import protocol as http2
from staged_pool.api.http.http2.connection import StrictConnection
from staged_pool.api.http.http2.frames import FRAME_BYTES, HEADERS_PRICE, TABLE_BYTES
from staged_pool.api.http.http2.protocol import SLICE_UNITS, Http2
from staged_pool.api.http.listener import bind
from staged_pool.api.limits import server_state
from staged_pool.api.limits.allowance import CLIENT_UNITS, Allowance
from staged_pool.api.limits.server_state import ServerState
from tests.servers.http2_client import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PRIORITY,
    REQUEST,
    RST_STREAM,
    SETTINGS,
    UPLOAD,
    WINDOW_UPDATE,
    block,
    frame,
    head,
    number,
    raw_http2,
    setting,
)
from tests.servers.on_socket import Served, serving
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

ALL = 2_000
"""Units of a client in the tests of floods: a fifth of `CLIENT_UNITS`, so that floods are soon over."""

OPEN = head(1, *UPLOAD, flags=END_HEADERS)


def _streams(*frames: str) -> bytes:
    """Open an eighth of the streams, and send frames on each."""
    sent = []
    for stream in range(3, ALL // 4, 2):
        sent.append(head(stream, *UPLOAD, flags=END_HEADERS))
        sent += [FRAMES[name](stream) for name in frames]
    return b"".join(sent)


FRAMES: dict[str, Any] = {
    "reset": lambda stream: frame(RST_STREAM, number(8), 0, stream),
    "window too large": lambda stream: frame(WINDOW_UPDATE, number(2**31 - 1), 0, stream),
    "window of zero": lambda stream: frame(WINDOW_UPDATE, number(0), 0, stream),
    "trailers that end nothing": lambda stream: head(stream, (b"x", b"y"), flags=END_HEADERS),
    "data beyond its length": lambda stream: frame(DATA, b"x", END_STREAM, stream),
}

FLOODS = {
    "rapid reset (CVE-2023-44487)": _streams("reset"),
    "resets by the server: windows (CVE-2025-8671)": _streams("window too large"),
    "resets by the server: trailers (CVE-2025-8671)": _streams("trailers that end nothing"),
    "malformed heads": b"".join(head(stream, (b":path", b"")) for stream in range(1, ALL // 4, 2)),
    "refused streams": b"".join(head(stream, *UPLOAD, flags=END_HEADERS) for stream in range(1, ALL // 4, 2)),
    "resets of a stream that is over": OPEN + frame(RST_STREAM, number(8), 0, 1) * (2 * ALL),
    "PING": frame(PING, b"12345678") * (2 * ALL),
    "SETTINGS": frame(SETTINGS) * ALL,
    "SETTINGS that change all windows": (setting(4, 1) + setting(4, 2)) * ALL,
    "SETTINGS of the table of headers": (setting(1, 0) + setting(1, 4096)) * ALL,
    "PRIORITY": frame(PRIORITY, number(0) + b"\x10", 0, 3) * (2 * ALL),
    "PRIORITY of many streams": b"".join(
        frame(PRIORITY, number(0) + b"\x10", 0, stream) for stream in range(3, 4 * ALL, 2)
    ),
    "WINDOW_UPDATE": frame(WINDOW_UPDATE, number(1)) * (2 * ALL),
    "WINDOW_UPDATE of a stream": OPEN + frame(WINDOW_UPDATE, number(1), 0, 1) * (2 * ALL),
    "empty DATA (CVE-2019-9518)": OPEN + frame(DATA, b"", 0, 1) * (2 * ALL),
    "padding alone": OPEN + frame(DATA, b"\0", 8, 1) * (2 * ALL),
    "empty CONTINUATION": (frame(HEADERS, block(*REQUEST), 0, 1) + frame(CONTINUATION, b"", 0, 1) * 60) * 1
    + frame(CONTINUATION, b"", END_HEADERS, 1)
    + b"".join(
        frame(HEADERS, block(*UPLOAD), 0, stream)
        + frame(CONTINUATION, b"", 0, stream) * 60
        + frame(CONTINUATION, b"", END_HEADERS, stream)
        for stream in range(3, ALL // 30, 2)
    ),
    "unknown frames": frame(0x77, b"x") * (2 * ALL),
}


@pytest.fixture
def time_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give clients `ALL` units, and let debtors wait for ever: a slow machine would forgive some of it."""
    monkeypatch.setattr("staged_pool.api.limits.allowance.CLIENT_UNITS", ALL)
    monkeypatch.setattr("staged_pool.api.limits.allowance.CLIENT_UNITS_PER_S", 1e-9)
    monkeypatch.setattr(http2, "OWING_S", 3600)
    monkeypatch.setattr(server_state, "GRACE_S", 0.05)  # clients who owe are all that the end of the server waits for


def account(served: Served) -> Allowance:
    return served.server.state.allowances.of(("127.0.0.1", 1))


def spent(served: Served) -> float:
    return served.server.state.allowances._spent.get("127.0.0.1", (0, 0))[0]


@pytest.mark.usefixtures("time_pays_nothing")
@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
async def test_a_flood_waits_on_all_connections_of_its_client_and_delays_nobody(flood: bytes) -> None:
    async with serving() as served:
        async with raw_http2(served) as client, raw_http2(served) as another, anyio.create_task_group() as tasks:
            for flooding in (client, another):
                tasks.start_soon(flooding.send, flood)
                tasks.start_soon(flooding.until_closed)
            await until(lambda: account(served).owed_s > 0)
            await served.assert_alive()
            await anyio.wait_all_tasks_blocked()
            assert spent(served) <= ALL + 2 * (SLICE_UNITS + HEADERS_PRICE)
            assert client.seen.goaway is another.seen.goaway is None
            tasks.cancel_scope.cancel()
    assert served.server.state.requests == 0


async def test_a_connection_that_waits_for_its_client_to_pay_for_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "OWING_S", 0.05)
    async with serving() as served:
        async with raw_http2(served) as client, anyio.create_task_group() as tasks:
            account(served).spend(2 * CLIENT_UNITS)
            tasks.start_soon(client.send, FLOODS["PING"])
            seen = await client.until_closed()
            assert seen.goaway in (Code.ENHANCE_YOUR_CALM, None)  # None: our reset was quicker than its reading
        await served.assert_alive()


async def test_who_owes_goes_on_when_time_has_paid() -> None:
    async with serving() as served, raw_http2(served) as client:
        account(served).spend(CLIENT_UNITS)
        await client.send(frame(PING, b"12345678") * 2 * SLICE_UNITS, head(1))
        assert (await client.until_settled(1)).statuses == {1: b"200"}


async def test_frames_are_taken_in_slices_with_an_iteration_of_the_event_loop_between() -> None:
    iterations = 0

    class Counting(ServerState):
        async def wait_for_iteration(self) -> None:
            nonlocal iterations
            iterations += 1
            await super().wait_for_iteration()

    class Config:
        server_state = Counting()

    async def send(event: object) -> None:
        pass

    connection = Http2(_App, Config, None, None, None, False, None, None, send)
    data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS) + frame(PING, b"12345678") * (10 * SLICE_UNITS)
    await connection.initiate()
    await connection.handle(RawData(data))
    assert iterations == 10


class _App:
    app = None


async def test_many_answered_requests_and_as_many_that_are_cancelled_are_no_flood() -> None:
    count = ALL // 20
    async with serving() as served, raw_http2(served) as client:
        for stream in range(1, 4 * count, 4):
            await client.send(head(stream), head(stream + 2, *UPLOAD, flags=END_HEADERS), FRAMES["reset"](stream + 2))
            await client.until_settled(stream)
        assert client.seen.goaway is None
        assert spent(served) < CLIENT_UNITS / 100


async def test_a_long_upload_and_its_windows_are_no_flood() -> None:
    body = json.dumps({"input": ["a" * 500] * 200}).encode()
    async with serving() as served, raw_http2(served) as client:
        pieces = [body[at : at + 5] for at in range(0, len(body), 5)]
        assert len(pieces) > ALL
        await client.send(OPEN)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.until_settled, 1)
            for at in range(0, len(pieces), 1000):
                await client.send(*(frame(DATA, piece, 0, 1) for piece in pieces[at : at + 1000]))
            await client.send(frame(DATA, b"", END_STREAM, 1))
        assert client.seen.statuses == {1: b"200"}


# The peer's settings that our encoder follows


async def test_an_answer_costs_no_more_whatever_table_the_client_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Counting(StrictConnection):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(http2, "StrictConnection", Counting)
    async with serving() as served, raw_http2(served, setting(1, 2**30)) as client:
        await client.send(setting(1, 2**31))
        for stream in range(1, 601, 2):
            await client.send(head(stream, *REQUEST, (b"x-request-id", b"%d" % stream)))
            await client.until_settled(stream)
        (connection,) = made
        assert connection.encoder.header_table_size == TABLE_BYTES
        assert connection.encoder.header_table._current_size <= TABLE_BYTES


async def test_frames_of_an_answer_are_no_longer_than_usual_whatever_the_client_allows() -> None:
    settings = frame(SETTINGS, setting(5, 2**24 - 1)[9:] + setting(4, 2**31 - 1)[9:])
    body = json.dumps({"input": ["x"] * 2000}).encode()
    async with serving() as served, raw_http2(served, settings) as client:
        await client.send(frame(WINDOW_UPDATE, number(2**30)), OPEN)
        await client.send(*(frame(DATA, body[at : at + 9000], 0, 1) for at in range(0, len(body), 9000)))
        await client.send(frame(DATA, b"", END_STREAM, 1))
        seen = await client.until_settled(1)
        assert len(seen.bodies[1]) > 2 * FRAME_BYTES
        assert max(answer.body_len for answer in seen.frames if answer.type == DATA) == FRAME_BYTES


# Answers that are not read


class Answering:
    """An application that answers with many parts, and counts those that it is rid of."""

    def __init__(self, parts: int, part: bytes) -> None:
        self.parts, self.part = parts, part
        self.taken: list[int] = []
        """Number of streams of each request."""
        self.ended = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        index = len(self.taken)
        self.taken.append(0)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(self.parts):
                await send({"type": "http.response.body", "body": self.part, "more_body": True})
                self.taken[index] += 1
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.ended += 1


@asynccontextmanager
async def _serving_app(app: Any, write_timeout_s: float = 30.0) -> AsyncIterator[Served]:
    config = ConnectionConfig()
    config.limits = ServerConfig(write_timeout_s=write_timeout_s)
    config.server_state = ServerState()
    config.logger_class = HypercornLog
    listener = bind("127.0.0.1", 0)
    end = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Acceptor(app, None, config, None).run, listener, end.wait, 5)
        yield cast(
            "Served",
            SimpleNamespace(
                connect=partial(anyio.connect_tcp, "127.0.0.1", listener.getsockname()[1]),
                server=SimpleNamespace(state=config.server_state),
            ),
        )
        end.set()


@pytest.mark.parametrize("part", [100, 5000, 200_000])
async def test_an_answer_waits_for_its_windows_part_by_part(part: int) -> None:
    app = Answering(400_000 // part, b"x" * part)
    async with _serving_app(app) as served, raw_http2(served) as client:
        await client.send(*map(head, (1, 3, 5)))
        window = 2**16 - 1
        await client.until(lambda: sum(map(len, client.seen.bodies.values())) == window)
        await client.until_answered_ping()
        assert sum(app.taken) <= window // part  # the application's data waits for the client's window
        await client.send(frame(WINDOW_UPDATE, number(2**24)))
        await client.send(*(frame(WINDOW_UPDATE, number(2**24), 0, stream) for stream in (1, 3, 5)))
        await client.until_settled(1, 3, 5)
        assert {stream: len(body) for stream, body in client.seen.bodies.items()} == dict.fromkeys((1, 3, 5), 400_000)


async def test_streams_have_their_turns() -> None:
    app = Answering(10, bytes(10 * FRAME_BYTES))
    async with _serving_app(app) as served, raw_http2(served, setting(4, 2**30)) as client:
        await client.send(*map(head, range(1, 9, 2)))
        await client.until(lambda: sum(map(len, client.seen.bodies.values())) == 2**16 - 1)
        await client.send(frame(WINDOW_UPDATE, number(16 * FRAME_BYTES)))
        await client.until(lambda: sum(map(len, client.seen.bodies.values())) == 2**16 - 1 + 16 * FRAME_BYTES)
        lengths = [len(client.seen.bodies.get(stream, b"")) for stream in range(1, 9, 2)]
        assert max(lengths) - min(lengths) <= 3 * FRAME_BYTES


async def test_a_stream_that_is_reset_gives_its_answer_back_at_once_whatever_was_left_of_it() -> None:
    app = Answering(1, bytes(2**20))
    async with _serving_app(app) as served, raw_http2(served, setting(4, 0)) as client:
        await client.send(*map(head, range(1, 41, 2)))
        await client.until(lambda: len(client.seen.statuses) == 20)
        assert app.ended == 0
        await client.send(*(frame(RST_STREAM, number(8), 0, stream) for stream in range(1, 41, 2)))
        await until(lambda: app.ended == 20)
        assert app.taken == [1] * 20
        await client.send(setting(4, 2**20), frame(WINDOW_UPDATE, number(2**20)), head(41))
        await client.until_settled(41)
        assert len(client.seen.bodies[41]) == 2**20


async def test_a_stream_that_holds_the_window_of_the_connection_and_is_reset_lets_the_others_go_on() -> None:
    app = Answering(1, bytes(2**17))
    async with _serving_app(app) as served, raw_http2(served, setting(4, 2**20)) as client:
        await client.send(head(1))
        await client.until(lambda: len(client.seen.bodies.get(1, b"")) == 2**16 - 1)
        await client.send(head(3))
        await client.until(lambda: 3 in client.seen.statuses)
        await client.send(frame(RST_STREAM, number(8), 0, 1), frame(WINDOW_UPDATE, number(2**17)))
        await client.until_settled(3)
        assert len(client.seen.bodies[3]) == 2**17


async def test_a_client_that_leaves_gives_all_answers_back() -> None:
    app = Answering(1, bytes(2**20))
    async with _serving_app(app) as served:
        async with raw_http2(served) as client:
            await client.send(*map(head, range(1, 21, 2)))
            await client.until(lambda: len(client.seen.statuses) == 10)
        await until(lambda: app.ended == 10)
        assert (app.ended, len(app.taken)) == (10, 10)


@pytest.mark.parametrize("window", [0, 3])
async def test_streams_that_take_nothing_are_reset_after_their_time(window: int) -> None:
    app = Answering(1, bytes(2**17))
    async with _serving_app(app, write_timeout_s=0.1) as served, raw_http2(served, setting(4, window)) as client:
        await client.send(*map(head, range(1, 11, 2)))
        seen = await client.until_settled(*range(1, 11, 2))
        assert seen.resets == dict.fromkeys(range(1, 11, 2), Code.CANCEL)
        await until(lambda: app.ended == 5)


@pytest.mark.usefixtures("time_pays_nothing")
async def test_a_window_opened_byte_by_byte_is_paid_for() -> None:
    app = Answering(1, bytes(2**20))
    async with _serving_app(app) as served, raw_http2(served, setting(4, 0)) as client:
        await client.send(head(1))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.send, frame(WINDOW_UPDATE, number(1), 0, 1) * (2 * ALL))
            tasks.start_soon(client.until_closed)
            await until(lambda: account(served).owed_s > 0)
            tasks.cancel_scope.cancel()
    assert app.ended == 1
