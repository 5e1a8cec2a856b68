"""Rows 20 to 28: clients that are slow, silent, gone, or in a hurry."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import anyio
import httpx
import pytest

from staged_pool.api.http.listener import bind
from staged_pool.runtime.config import EngineConfig
from tests.chaos.harness import UnderFire, eventually
from tests.chaos.test_framing import BODY, PREFACE, SETTINGS
from tests.servers.byte_client import EMBED, Http2, post, read_answer, statuses

pytestmark = pytest.mark.anyio

LARGE = post(json.dumps({"input": ["a"] * 2000}).encode())
"""A small request with an answer of more than 100 KB."""

MANY = 100
"""Clients, where the table wants a thousand: enough to see that nothing is left."""


@contextmanager
def plain_sockets(
    fire: UnderFire, count: int, sent: bytes = b"", *, receive_buffer: int = 0
) -> Iterator[list[socket.socket]]:
    """Open `count` blocking sockets to the server, outside the event loop."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for connection in sockets:
            if receive_buffer:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            connection.connect(("127.0.0.1", fire.served.port))
            connection.sendall(sent)
        yield sockets


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def finish(connection: socket.socket) -> None:
    connection.close()


def half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


async def read_some(connection: socket.socket) -> bytes:
    await anyio.wait_readable(connection)
    return connection.recv(4096)


@pytest.mark.parametrize("head", [b"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\nx: ", b"PRI * HTTP/2.0\r\n"])
async def test_row_20_a_hundred_heads_in_drops_are_cut_off_while_others_are_served(head: bytes) -> None:
    async with UnderFire.opened(head_timeout_s=0.3) as fire:
        with plain_sockets(fire, MANY, head) as slow:
            alive = set(slow)
            while alive:
                for connection in list(alive):
                    try:
                        connection.send(b"y")
                    except OSError:  # it was cut off
                        alive.discard(connection)
                assert (await fire.embed("a")).status_code == 200
            await eventually(lambda: fire.served.server.state.connections == 0)
        await fire.assert_unharmed()


@pytest.mark.parametrize("framing", ["content-length: 1000", "transfer-encoding: chunked"])
async def test_row_21_a_body_in_drops_is_answered_408_at_its_deadline(framing: str) -> None:
    async with UnderFire.opened(body_timeout_s=0.3) as fire:
        async with await fire.served.connect() as stream:
            await stream.send(post(b"", framing))
            started = anyio.current_time()
            drop = b"x" if "length" in framing else b"1\r\nx\r\n"
            received = b""
            while not received:
                await stream.send(drop)
                with anyio.move_on_after(0.02):
                    received = await stream.receive()
            assert statuses(received) == [408]
            assert 0.29 <= anyio.current_time() - started < 5
        assert fire.seen == []
        await fire.assert_unharmed()


async def test_row_22_answers_that_nobody_reads_are_dropped_and_hold_nothing() -> None:
    """Eight connections that each want a megabyte of answers, of which they read none."""
    listener = bind("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    async with UnderFire.opened(listener=listener, write_timeout_s=0.3) as fire:
        state, admission = fire.served.server.state, fire.served.engine.statistics
        with plain_sockets(fire, 8, LARGE * 8, receive_buffer=4096):
            await eventually(lambda: admission().admission.admitted >= 1 + 8)
            await eventually(lambda: state.connections == 0)
            assert state.requests == 0
        assert admission().admission.admitted == 1 + 8  # further requests of a client are not begun
        await fire.assert_unharmed()


@pytest.mark.parametrize("sent", [b"", PREFACE + SETTINGS], ids=["nothing sent", "HTTP/2 without a request"])
async def test_row_23_a_hundred_connections_that_ask_nothing_are_closed(sent: bytes) -> None:
    async with UnderFire.opened(keep_alive_s=0.3) as fire:
        with plain_sockets(fire, MANY, sent) as sockets:
            await eventually(lambda: fire.served.server.state.connections > 0)
            assert (await fire.embed("a")).status_code == 200
            for connection in sockets:
                with anyio.fail_after(15):
                    while await read_some(connection):
                        pass
        await fire.assert_unharmed()


@pytest.mark.parametrize("leave", [finish, reset, half_close])
@pytest.mark.parametrize("stage", ["preprocess", "forward"])
async def test_rows_24_and_25_a_client_that_leaves_gives_its_room_back_at_once(
    stage: Any, leave: Callable[[socket.socket], None], fire: UnderFire
) -> None:
    """Closing only the sending side is leaving too: Hypercorn cannot tell the two apart."""
    gate = fire.gate(stage)
    with plain_sockets(fire, 1, EMBED) as [connection]:
        await gate.arrived()
        assert fire.served.in_flight == 1
        started = time.perf_counter()
        leave(connection)
        await eventually(lambda: fire.served.in_flight == 0)
        assert time.perf_counter() - started < 5
    assert sum(fire.served.engine.statistics().cancelled.values()) == 1


async def test_row_24_leaving_during_the_body_reaches_no_stage(fire: UnderFire) -> None:
    with plain_sockets(fire, 5, post(b'{"inp', "content-length: 100")):
        await eventually(lambda: fire.served.server.state.requests == 5)
    await eventually(lambda: fire.served.server.state.requests == 0)
    assert fire.seen == []


async def test_row_24_leaving_in_a_queue_spares_the_device_the_work(fire: UnderFire) -> None:
    gate = fire.gate("forward")
    answers: list[httpx.Response] = []

    async def ask() -> None:
        answers.append(await fire.embed("stays"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await gate.arrived()
        with plain_sockets(fire, 10, post(b'{"input":"leaves"}')):
            await eventually(lambda: fire.seen.count("leaves") == 10)
        await eventually(lambda: fire.served.in_flight == 1)
        gate.open()
    assert [answer.status_code for answer in answers] == [200]
    assert fire.computed == ["stays"]


async def test_row_24_those_in_the_same_batch_as_a_client_who_left_are_answered(fire: UnderFire) -> None:
    first, batch = fire.gate("forward"), []

    async def ask(text: str) -> None:
        batch.append((await fire.embed(text)).status_code)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, "first")
        await first.arrived()
        with plain_sockets(fire, 1, post(b'{"input":"leaves"}')):
            for text in ("b", "c"):
                tasks.start_soon(ask, text)
            await eventually(lambda: len(fire.seen) == 4)
            second = fire.gate("forward")
            first.open()
            await second.arrived()
        await eventually(lambda: fire.served.in_flight == 2)
        second.open()
    assert batch == [200, 200, 200]
    assert sorted(fire.computed) == ["b", "c", "first", "leaves"]


@pytest.mark.parametrize("leave", [finish, reset])
async def test_row_24_leaving_while_the_answer_is_sent_harms_nobody(
    leave: Callable[[socket.socket], None], fire: UnderFire
) -> None:
    with plain_sockets(fire, 5, LARGE) as sockets:
        for connection in sockets:
            await anyio.wait_readable(connection)
            leave(connection)
        await eventually(lambda: fire.served.server.state.connections == 0)
    assert (fire.served.in_flight, fire.served.server.state.connections) == (0, 0)


async def test_row_24_a_reset_stream_cancels_its_request_and_no_other(fire: UnderFire) -> None:
    gate = fire.gate()
    async with await fire.served.connect() as stream:
        client = Http2(stream)
        for stream_id in (1, 3):
            await client.request(stream_id, path=b"/v1/embeddings", body=BODY)
        await eventually(lambda: fire.served.in_flight == 2)
        client.h2.reset_stream(1)
        await client.flush()
        await eventually(lambda: fire.served.in_flight == 1)
        gate.open()
        assert (await client.ends(3))[3] == "200"


async def test_row_26_a_storm_of_resets_on_a_full_engine_frees_every_place() -> None:
    async with UnderFire.opened(EngineConfig(max_requests=20)) as fire:
        gate = fire.gate()
        for _ in range(3):
            with plain_sockets(fire, 40, EMBED) as sockets:
                await eventually(lambda: fire.served.in_flight == 20)
                await eventually(lambda: fire.served.server.state.requests == 20)
                for connection in sockets:
                    reset(connection)
                await eventually(lambda: fire.served.in_flight == 0)
        gate.open()
        await fire.assert_unharmed()


@pytest.mark.parametrize(
    ("timeout", "status"),
    [
        ("0", 400),
        ("-1", 400),
        ("nan", 400),
        ("inf", 400),
        ("1e308", 400),
        ("1e-320", 504),
        ("x", 400),
        ("9" * 400, 400),
    ],
)
@pytest.mark.parametrize("header", ["x-request-timeout", "prefer"])
async def test_row_27_an_invalid_timeout_is_rejected(header: str, timeout: str, status: int, fire: UnderFire) -> None:
    value = timeout if header == "x-request-timeout" else f"wait={timeout}"
    response = await fire.embed("a", **{header: value})
    assert response.status_code == status
    assert fire.computed == []


async def test_row_28_a_deadline_shorter_than_the_queue_is_answered_504_without_the_device(fire: UnderFire) -> None:
    gate = fire.gate("forward")
    statuses_: list[int] = []

    async def ask() -> None:
        statuses_.append((await fire.embed("long")).status_code)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await gate.arrived()
        response = await fire.embed("short", **{"x-request-timeout": "0.05"})
        gate.open()
    assert (response.status_code, statuses_) == (504, [200])
    assert "short" not in fire.computed


async def test_row_24_an_answer_that_came_before_the_client_left_is_whole(fire: UnderFire) -> None:
    async with await fire.served.connect() as stream:
        await stream.send(EMBED)
        assert statuses(await read_answer(stream)) == [200]
