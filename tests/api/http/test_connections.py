"""One client's connection on a real socket: how long it may take over what, how many there may be, and its end."""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import socket
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress

import anyio
import anyio.abc
import anyio.lowlevel
import h2.connection
import h2.errors
import h2.events
import h2.settings
import httpx
import pytest
import sniffio

from staged_pool.api.http.accept_loop import ACCEPTED_AT_ONCE
from staged_pool.api.http.connections import PIPELINED_BYTES
from staged_pool.api.http.listener import bind
from staged_pool.api.http.transports import UNSENT_BYTES
from staged_pool.api.limits.allowance import CLIENT_UNITS
from tests.servers.byte_client import EMBED, Http2, post, read_answer, read_to_end, statuses
from tests.servers.on_socket import server_on, serving
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]

LARGE = post(b'{"input":["%s"]}' % b'","'.join([b"a"] * 2000))
"""A small request with an answer of more than 100 KB."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


async def closed(stream: anyio.abc.SocketStream) -> bytes:
    """Wait until the server closes; what came before."""
    async with stream:
        return await read_to_end(stream)


# Limits before connections are accepted


def may_wait(listener: socket.socket) -> int:
    """Connections that the kernel keeps waiting: `tcpi_sacked` of its struct tcp_info, of a socket that listens."""
    return int.from_bytes(listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)[28:], sys.byteorder)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
async def test_as_many_wait_in_the_kernel_as_when_it_was_bound() -> None:
    listener = bind("127.0.0.1", 0)
    with listener.dup() as same:
        before = may_wait(same)
        async with serving(listener=listener) as served:
            async with await served.connect() as stream:
                await stream.send(EMBED)
                assert statuses(await read_answer(stream)) == [200]
            assert may_wait(same) == before > ACCEPTED_AT_ONCE


# Patience


PING = b"\x00\x00\x08\x06\x00\x00\x00\x00\x0012345678"
RESET_STREAM = (
    b"\x00\x00\x06\x01\x04\x00\x00\x00\x01\x82\x86\x84\x41\x01a"
    + b"\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x08"
)


@pytest.mark.parametrize("sent", [b"", PREFACE, EMBED, PREFACE + PING, PREFACE + RESET_STREAM])
async def test_a_connection_without_a_request_is_closed_when_it_has_been_idle_for_too_long(sent: bytes) -> None:
    async with serving(keep_alive_s=0.05) as served:
        stream = await served.connect()
        if sent:
            await stream.send(sent)
        await closed(stream)
        assert served.server.state.connections == 0


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (b"no request\r\n\r\n", 400, "request line is not valid"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "one Host"),
        (b"GET /health HTTP/1.1\nhost: x\n\n", 400, "CRLF"),
        (post(b"{}", "content-length: 2", "content-length: 3"), 400, "Content-Length is not valid; expected one"),
        (post(b"{}", "content-length: -2"), 400, "Content-Length is not valid; expected one"),
        (post(b"no size\r\n", "transfer-encoding: chunked"), 400, "well-formed chunks"),
        (post(b"{}", "transfer-encoding: gzip, chunked"), 501, "Transfer-Encoding is not supported"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"a" * 2**17, 431, "head of the request is larger"),
    ],
)
async def test_bytes_that_are_no_request_are_told_so(sent: bytes, status: int, said: str) -> None:
    async with serving() as served:
        head, _, body = (await served.talk(sent)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in head.lower()
        error = json.loads(body)["error"]
        assert (error["code"], said in error["message"]) == (status, True)
        await served.assert_alive()


async def test_http2_says_goodbye_to_an_idle_connection() -> None:
    async with serving(keep_alive_s=0.05) as served:
        received = await served.talk(PREFACE)
    frames = h2.connection.H2Connection()
    frames.initiate_connection()
    assert any(isinstance(event, h2.events.ConnectionTerminated) for event in frames.receive_data(received))


@pytest.mark.parametrize("first", [b"", EMBED])
async def test_a_head_that_comes_in_drops_is_cut_off(first: bytes) -> None:
    async with serving(head_timeout_s=0.1) as served:
        async with await served.connect() as stream:
            if first:
                await stream.send(first)
                assert statuses(await read_answer(stream)) == [200]
            await stream.send(b"POST / HTTP/1.1\r\n")
            with anyio.fail_after(30), suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                while True:
                    await stream.send(b"x: y\r\n")
                    with anyio.move_on_after(0.02):
                        await stream.receive()
        await served.assert_alive()


async def test_a_request_that_takes_long_is_not_idleness() -> None:
    gate = Gate()
    async with serving(LetterModel(on_preprocess=gate), keep_alive_s=0.05, head_timeout_s=0.05) as served:
        async with await served.connect() as stream:
            await stream.send(EMBED)
            await gate.arrived()
            await anyio.sleep(0.2)
            gate.open()
            assert statuses(await read_answer(stream)) == [200]


@pytest.fixture
def small_buffers() -> Iterator[socket.socket]:
    """A listener whose connections take little before the client reads: as a distant client, and not a local one."""
    listener = bind("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    yield listener
    listener.close()


def ask_without_reading(port: int, requests: bytes = LARGE) -> socket.socket:
    """A plain socket, because an event loop's stream reads ahead."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(requests)
    return client


async def test_a_client_that_does_not_read_its_answer_is_cut_off(small_buffers: socket.socket) -> None:
    async with serving(listener=small_buffers, write_timeout_s=0.2) as served:
        with ask_without_reading(served.port):
            await until(lambda: served.server.state.requests == 1)
            await until(lambda: served.server.state.connections == 0)
            assert served.server.state.requests == 0
        await served.assert_alive()


async def test_a_client_that_reads_slowly_gets_all_of_its_answer(small_buffers: socket.socket) -> None:
    async with serving(listener=small_buffers, write_timeout_s=1) as served:
        with ask_without_reading(served.port, LARGE * 5) as client:
            received, started = b"", anyio.current_time()
            while received.count(b"prompt_tokens_details") < 5:
                await anyio.wait_readable(client)
                received += client.recv(4096)
                await anyio.sleep(0.01)
        assert statuses(received) == [200] * 5
        assert anyio.current_time() - started > 1


async def test_a_client_that_is_asked_for_its_place_may_read_its_answer_first(small_buffers: socket.socket) -> None:
    async with serving(listener=small_buffers, max_connections=1) as served:
        with ask_without_reading(served.port) as client:
            await until(lambda: served.server.state.requests == 1)
            await anyio.wait_readable(client)
            async with await served.connect() as other:
                await other.send(EMBED)
                assert statuses(await read_answer(other)) == [200]
            assert served.server.state.limit.evicted == 1
            received = b""
            while data := await read_some(client):
                received += data
        assert statuses(received) == [200]
        assert received.endswith(b"}")
        await until(lambda: served.server.state.connections == 0)


async def read_some(client: socket.socket) -> bytes:
    await anyio.wait_readable(client)
    return client.recv(2**16)


async def test_a_client_that_reads_while_the_event_loop_is_held_up_gets_all_of_its_answer(
    small_buffers: socket.socket,
) -> None:
    async with serving(listener=small_buffers, write_timeout_s=0.2) as served:
        with ask_without_reading(served.port) as client:
            await until(lambda: served.server.state.requests == 1)
            await anyio.wait_readable(client)
            received = b""

            def be_late() -> None:
                nonlocal received
                time.sleep(0.4)  # the time is over, and the client reads
                received += client.recv(2**16)
                time.sleep(0.05)

            await hold_the_loop(be_late)
            while b"prompt_tokens_details" not in received:
                await anyio.wait_readable(client)
                more = client.recv(4096)
                assert more, "it was cut off"
                received += more


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="the kernel cannot be told")
async def test_of_an_answer_that_nobody_reads_the_kernel_holds_little() -> None:
    async with serving() as served:
        with ask_without_reading(served.port, LARGE * 60):
            await until(lambda: bool(served.server.state.limit._members))
            [member] = served.server.state.limit._members
            await until(member._sending.locked)  # type: ignore[attr-defined]
            unsent = fcntl.ioctl(member._transport.socket.fileno(), termios.TIOCOUTQ, bytes(4))  # type: ignore[attr-defined]
            assert int.from_bytes(unsent, sys.byteorder) <= 4 * UNSENT_BYTES


async def test_a_client_that_does_not_read_cannot_hold_the_servers_end(
    small_buffers: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staged_pool.api.limits.server_state.GRACE_S", 0.1)
    async with serving(listener=small_buffers) as served:
        client = ask_without_reading(served.port)
        await until(lambda: served.server.state.requests == 1)
        started = anyio.current_time()
    assert anyio.current_time() - started < 5
    client.close()


async def test_an_http2_stream_whose_window_stays_shut_is_reset_and_the_others_go_on() -> None:
    async with serving(write_timeout_s=0.2) as served:
        async with await served.connect() as stream:
            client = Http2(stream)
            client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 10})
            await client.request(1, path=b"/v1/embeddings", body=b'{"input":"a"}')
            assert await client.reset(1) == h2.errors.ErrorCodes.CANCEL
            client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**16 - 1})
            await client.request(3, path=b"/v1/embeddings", body=b'{"input":"a"}')
            assert await client.ends(3) == {3: "200"}
        await served.assert_alive()


# Limits of accepted connections


async def test_one_connection_too_many_has_the_longest_idle_one_closed_which_is_counted() -> None:
    async with serving(max_connections=2) as served:
        async with await served.connect() as first, await served.connect() as second:
            for stream in (first, second):
                await stream.send(EMBED)
                assert statuses(await read_answer(stream)) == [200]
            async with await served.connect() as third:
                assert await closed(first) == b""
                await third.send(post(b"", path="/metrics").replace(b"POST", b"GET"))
                metrics = await read_answer(third)
                await second.send(EMBED)
                assert statuses(await read_answer(second)) == [200]
        assert b"staged_pool_connections 2.0" in metrics
        assert b"staged_pool_connections_refused_total 0.0" in metrics
        assert b"staged_pool_connections_evicted_total 1.0" in metrics
        await until(lambda: served.server.state.connections == 0)
        await served.assert_alive()


async def test_requests_beyond_the_limit_on_all_connections_are_answered_503() -> None:
    gate = Gate()
    async with serving(LetterModel(on_preprocess=gate), max_http_requests=3) as served:
        async with await served.connect() as stream:
            client = Http2(stream)
            for before, stream_id in enumerate((1, 3, 5)):
                await until(lambda: served.server.state.requests == before)  # noqa: B023  # it is awaited here
                await client.request(stream_id, path=b"/v1/embeddings", body=b'{"input":"a"}')
            assert await client.ends(5) == {5: "503"}
            async with served.client() as other:
                rejected = await other.get("/v1/models")
                assert (await other.get("/health")).status_code == 200
            gate.open()
            assert await client.ends(1, 3) == {1: "200", 3: "200"}
        await served.assert_alive()
    assert (rejected.status_code, rejected.headers["retry-after"]) == (503, "1")


async def test_streams_that_are_reset_cancel_their_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staged_pool.api.limits.allowance.CLIENT_UNITS_PER_S", 1e-9)
    gate = Gate()
    most = number = 0
    async with serving(LetterModel(on_preprocess=gate), max_http_requests=50) as served:
        account = served.server.state.allowances.of(("127.0.0.1", 1))
        async with await served.connect() as stream:
            client = Http2(stream)
            while not account.owed_s:
                await client.request(2 * number + 1, path=b"/v1/embeddings", body=b'{"input":"a"}')
                client.h2.reset_stream(2 * number + 1)
                await client.flush()
                most = max(most, served.server.state.requests)
                number += 1
            assert number >= CLIENT_UNITS / 12
        assert most <= 50 + 10  # those beyond the limit are being rejected
        await until(lambda: served.server.state.requests == 0)
        await until(lambda: served.in_flight == 0)
        gate.open()
        await served.assert_alive()


async def test_many_requests_on_one_http2_connection_lose_no_stream() -> None:
    answered = 0

    async def ask(client: httpx.AsyncClient) -> None:
        nonlocal answered
        for _ in range(20):
            response = await client.post("/v1/embeddings", json={"input": "a"})
            answered += response.status_code == 200

    async with serving() as served:
        limits = httpx.Limits(max_connections=1)
        async with served.client(http1=False, http2=True, limits=limits) as client:
            await client.get("/health")
            async with anyio.create_task_group() as tasks:
                for _ in range(16):
                    tasks.start_soon(ask, client)
            assert served.server.state.connections == 1
    assert answered == 16 * 20


# Interim and final responses


async def test_a_client_that_may_send_its_body_is_told_so() -> None:
    async with serving() as served:
        async with await served.connect() as stream:
            await stream.send(post(b"", "expect: 100-continue", "content-length: 13"))
            assert statuses(await stream.receive()) == [100]
            await stream.send(b'{"input":"a"}')
            assert statuses(await read_answer(stream)) == [200]


# Bytes that have arrived at a timeout, or behind the present request


GENERAL = post(b'{"input":"a"}', "origin: https://page.example")
"""Takes the general path, for its origin."""


async def read_of(client: socket.socket) -> bytes:
    """Return the next bytes of the server; nothing at its end."""
    with anyio.fail_after(30):
        await anyio.wait_readable(client)
    return client.recv(2**16)


async def hold_the_loop(work: Callable[[], None]) -> None:
    """Do something in the event loop's thread; on asyncio where its sockets are looked at, behind which timers are."""
    if sniffio.current_async_library() == "trio":
        work()
        return
    loop, done = asyncio.get_running_loop(), anyio.Event()
    here, there = socket.socketpair()

    def called() -> None:
        loop.remove_reader(here)
        work()
        done.set()

    with here, there:
        loop.add_reader(here, called)
        there.send(b"x")
        await done.wait()


@pytest.mark.parametrize("sent", [EMBED, GENERAL, EMBED + GENERAL])
@pytest.mark.parametrize("begun", [0, 40])
async def test_a_request_that_is_here_when_its_connections_time_is_over_is_answered(sent: bytes, begun: int) -> None:
    async with serving(keep_alive_s=0.2, head_timeout_s=0.2) as served:
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.sendall(EMBED)
            assert statuses(await read_of(client)) == [200]
            client.sendall(sent[:begun])
            for _ in range(5):  # it may be received
                await anyio.lowlevel.checkpoint()

            def be_late() -> None:
                time.sleep(0.21)  # the time is over, and the request is here: both are seen at once
                client.sendall(sent[begun:])

            await hold_the_loop(be_late)
            answers = b""
            while answers.count(b"prompt_tokens_details") < sent.count(b"POST"):
                received = await read_of(client)
                assert received, "it was closed without an answer"
                answers += received
            assert set(statuses(answers)) == {200}


@pytest.mark.parametrize("sent", [GENERAL, EMBED])
async def test_requests_sent_ahead_are_answered_however_late_the_event_loop_is(sent: bytes) -> None:
    async with serving(keep_alive_s=0.001) as served:

        async def be_late() -> None:
            while True:
                time.sleep(0.005)  # noqa: ASYNC251  # each iteration takes longer than a connection may be idle
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(be_late)
            answers = await served.talk(sent * 3)
            tasks.cancel_scope.cancel()
        assert statuses(answers) == [200] * 3


@pytest.mark.parametrize("first", [EMBED, GENERAL])
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_client_that_pipelines_and_leaves_is_noticed_while_its_request_is_worked_on(
    first: bytes, at_once: bool
) -> None:
    gate = Gate()
    async with serving(LetterModel(on_forward=gate)) as served:
        async with await served.connect() as stream:
            await stream.send(first + EMBED if at_once else first)
            await until(lambda: served.in_flight == 1)
            if not at_once:
                await stream.send(EMBED)
                await anyio.wait_all_tasks_blocked()
        await until(lambda: served.in_flight == 0)
        await until(lambda: served.server.state.connections == 0)
        assert (served.in_flight, served.server.state.connections) == (0, 0)
        gate.open()


@pytest.mark.parametrize("first", [EMBED, GENERAL])
async def test_what_is_pipelined_is_answered_in_its_order_however_it_is_cut(first: bytes) -> None:
    other = post(b'{"input":["b","c"]}')
    sent = first + other + GENERAL + other * 3
    async with serving() as served:
        for cut in (1, len(first) - 1, len(first) + 1, len(first + other) + 30, len(sent) - 1):
            async with await served.connect() as stream:
                await stream.send(sent[:cut])
                await anyio.wait_all_tasks_blocked()
                await stream.send(sent[cut:])
                received = b""
                with anyio.fail_after(30):
                    while received.count(b"prompt_tokens_details") < 6:
                        received += await stream.receive()
            answers = received.split(b"HTTP/1.1 200 ")[1:]
            assert [answer.count(b'"index"') for answer in answers] == [1, 2, 1, 2, 2, 2]


async def test_more_than_is_received_ahead_waits_and_is_answered() -> None:
    gate = Gate()
    large = post(b'{"input":"a"' + b" " * PIPELINED_BYTES + b"}")
    async with serving(LetterModel(on_forward=gate)) as served, await served.connect() as stream:
        await stream.send(EMBED)
        await until(lambda: served.in_flight == 1)
        async with anyio.create_task_group() as sending:
            sending.start_soon(stream.send, large * 3)
            await anyio.wait_all_tasks_blocked()
            gate.open()
            received = b""
            with anyio.fail_after(30):
                while received.count(b"prompt_tokens_details") < 4:
                    received += await stream.receive()
    assert statuses(received) == [200] * 4


@pytest.mark.parametrize("framing", ["content-length: 1000000", "transfer-encoding: chunked"])
async def test_a_body_that_is_waited_for_takes_no_iteration(framing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staged_pool.api.http.connections.FAST_BODY_S", math.inf)  # none is left to the general path
    head = post(b"", framing)
    body = b" " * 999_999 + b"{"
    silent = list[anyio.abc.SocketStream]()
    async with serving() as served:
        state = served.server.state
        async with AsyncExitStack() as stack:
            for _ in range(10):
                stream = await stack.enter_async_context(await served.connect())
                silent.append(stream)
                await stream.send(head)
                await until(lambda: state.requests == len(silent))
                await stream.send(b"3\r\n123\r\n")
            await until(lambda: state.body_bytes >= 30)
            for _ in range(10):
                await anyio.wait_all_tasks_blocked()
                lock = state._iterations.statistics()
                assert (lock.locked, lock.tasks_waiting) == (False, 0)
            async with await served.connect() as stream:
                await stream.send(post(body))
                assert statuses(await read_answer(stream)) == [400]
        await until(lambda: state.connections == state.body_bytes == 0)


async def test_a_server_that_is_cancelled_lets_its_connections_go() -> None:
    gate = Gate()
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = server_on(LetterModel(on_forward=gate))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run, listener)
        await until(lambda: not server.registry.not_ready)
        async with (
            await anyio.connect_tcp("127.0.0.1", port) as idle,
            await anyio.connect_tcp("127.0.0.1", port) as busy,
        ):
            await idle.send(EMBED[:10])
            await busy.send(EMBED)
            await until(lambda: server.state.requests == 1)
            gate.open()
            tasks.cancel_scope.cancel()
    assert server.state.connections == 0
