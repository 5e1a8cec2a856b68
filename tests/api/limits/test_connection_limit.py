"""One connection too many: another makes room, and probes are answered in any case."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack

import anyio
import pytest

from staged_pool.api.limits.connection_limit import RESERVE, ConnectionLimit
from tests.servers.byte_client import EMBED, Http2, post, read_answer, read_to_end, statuses
from tests.servers.on_socket import Served, serving
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
MOST = 7
"""Connections. One address may have all of so few."""


pytestmark = pytest.mark.usefixtures("servers_may_import")


class Member:
    """A connection that does nothing."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_evicted = False

    def evict(self) -> None:
        self.is_evicted = True

    def begin_work(self) -> None: ...

    def end_work(self) -> None: ...


def enter(limit: ConnectionLimit, *addresses: str) -> list[Member]:
    """Connections that were admitted, and count."""
    members = []
    for address in addresses:
        assert limit.admit(address)
        limit.enter(member := Member(address))
        members.append(member)
    return members


def test_the_longest_idle_one_makes_room_and_then_the_one_that_is_slow_for_longest() -> None:
    limit = ConnectionLimit(3)
    a, b, c = enter(limit, "a", "b", "c")
    limit.wait(b, idle=False)
    limit.wait(a, idle=False)
    limit.work(c)
    limit.wait(c, idle=True)
    limit.wait(b, idle=False)  # it is waited for since before
    (d,) = enter(limit, "d")
    assert [c.is_evicted, b.is_evicted, a.is_evicted] == [True, False, False]
    limit.work(d)
    (e,) = enter(limit, "e")
    assert [b.is_evicted, a.is_evicted, e.is_evicted] == [True, False, False]
    assert limit.evicted == 2


def test_a_client_that_has_just_connected_does_not_make_room_for_slow_ones() -> None:
    limit = ConnectionLimit(100)
    slow = []
    for _ in range(300):
        slow += enter(limit, "a")
        limit.wait(slow[-1], idle=False)
    (fresh,) = enter(limit, "a")
    for _ in range(50):
        slow += enter(limit, "a")
        limit.wait(slow[-1], idle=False)
    stayed = not fresh.is_evicted
    idle = enter(limit, *["a"] * 30)
    assert (stayed, fresh.is_evicted) == (True, True)  # it was the first of many, and loses least
    assert not idle[-1].is_evicted
    assert sum(each.is_evicted for each in slow) > 200


def test_one_of_the_newest_clients_makes_no_room_even_for_many_that_are_as_new() -> None:
    limit = ConnectionLimit(100)
    slow = enter(limit, *[f"{number}" for number in range(80)])
    for member in slow:
        limit.wait(member, idle=False)
    new = enter(limit, *[f"new {number}" for number in range(25)])
    assert [member.is_evicted for member in new] == [False] * 25, "20 found room, and the others took that of slow ones"
    assert [member.is_evicted for member in slow] == [True] * 5 + [False] * 75
    enter(limit, *[f"newer {number}" for number in range(10)])
    assert [member.is_evicted for member in new] == [True] * 9 + [False] * 16, "the first ones have sent nothing yet"
    assert [member.is_evicted for member in slow] == [True] * 6 + [False] * 74


def test_what_is_worked_on_makes_no_room_and_the_reserve_is_for_probes() -> None:
    limit = ConnectionLimit(3)
    busy = enter(limit, "a", "b", "c")
    for member in busy:
        limit.work(member)
    extra = []
    for _ in range(RESERVE):
        extra += enter(limit, "d")
        limit.work(extra[-1])
    assert all(limit.is_extra(member) for member in extra)
    assert not any(limit.is_extra(member) for member in busy)
    assert not limit.admit("e")
    for member in busy:
        limit.leave(member)
    for member in extra[: RESERVE - 2]:
        limit.leave(member)
    assert not limit.is_extra(extra[-1])
    assert not any(member.is_evicted for member in busy + extra)


def test_an_address_that_has_most_connections_makes_room_for_itself() -> None:
    limit = ConnectionLimit(100)
    (friend,) = enter(limit, "friend")
    flood = enter(limit, *["flood"] * 300)
    assert not friend.is_evicted
    left = [member for member in flood if not member.is_evicted]
    assert len(left) == 87  # seven times the free rest
    enter(limit, *[f"{number}" for number in range(12)])
    assert not friend.is_evicted
    assert [member for member in flood if not member.is_evicted] == left


def test_nothing_is_left_of_connections_that_have_left() -> None:
    limit = ConnectionLimit(3)
    for member in enter(limit, "a", "a", "b", "c", "a"):
        limit.leave(member)
        limit.leave(member)
        limit.wait(member, idle=True)
    assert not limit.make_room()
    assert not limit._members | limit._extra
    assert not limit._of
    assert not limit._addresses


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    """Holds plain sockets."""
    with ExitStack() as stack:
        yield stack


def connect(served: Served, clients: ExitStack, sent: bytes) -> socket.socket:
    client = clients.enter_context(socket.create_connection(("127.0.0.1", served.port)))
    client.sendall(sent)
    return client


async def fill(served: Served, clients: ExitStack, sent: bytes) -> None:
    """Have clients send this on as many connections as there may be."""
    for _ in range(MOST):
        client = connect(served, clients, sent)
        if sent == EMBED:
            await anyio.wait_readable(client)
    await until(lambda: served.server.state.connections >= MOST)


WAITING = {
    "nothing": b"",
    "an answered request": EMBED,
    "half a head": EMBED[:30],
    "a head without its body": post(b"", "content-length: 1000"),
    "half a body": post(b"{", "content-length: 1000", "connection: close"),
    "a chunk that does not end": post(b"5\r\nab", "transfer-encoding: chunked"),
    "HTTP/2 without a request": PREFACE,
}


@pytest.mark.anyio
@pytest.mark.parametrize("sent", WAITING.values(), ids=WAITING)
async def test_clients_that_are_waited_for_shut_nobody_out(sent: bytes, clients: ExitStack) -> None:
    async with serving(max_connections=MOST) as served:
        await fill(served, clients, sent)
        await served.assert_alive()
        for request in (
            EMBED,
            post(b'{"input": "a"}', "connection: close"),
            b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n",
        ):
            for _ in range(2 * MOST):
                async with await served.connect() as stream:
                    await stream.send(request)
                    assert statuses(await read_answer(stream)) == [200]
        assert served.server.state.connections_rejected == 0
        clients.close()


@pytest.mark.anyio
async def test_http2_streams_without_their_bodies_shut_nobody_out() -> None:
    async with serving(max_connections=MOST) as served, AsyncExitStack() as streams:
        for _ in range(MOST):
            stream = await streams.enter_async_context(await served.connect())
            await Http2(stream).request(1, path=b"/v1/embeddings", body=b"{", ends=False)
        await until(lambda: served.server.state.requests == MOST)
        await served.assert_alive()


@pytest.mark.anyio
async def test_a_connection_of_http2_makes_no_room_while_its_request_is_worked_on() -> None:
    gate = Gate()
    async with serving(LetterModel(on_preprocess=gate), max_connections=1) as served:
        async with await served.connect() as stream:
            client = Http2(stream)
            await client.request(1, path=b"/v1/embeddings", body=b'{"input": "a"}')
            await until(lambda: served.in_flight == 1)
            assert statuses(await served.talk(post(b'{"input": "a"}'))) == [503]
            gate.open()
            assert await client.ends(1) == {1: "200"}
            await until(lambda: served.server.state.requests == 0)
            assert statuses(await served.talk(post(b'{"input": "a"}', "connection: close"))) == [200]


@pytest.mark.anyio
async def test_while_all_connections_are_at_work_probes_are_answered_and_others_told_why_not() -> None:
    gate = Gate()
    async with serving(LetterModel(on_preprocess=gate), max_connections=MOST) as served:
        statuses_: list[int] = []

        async def ask() -> None:
            async with await served.connect() as stream:
                await stream.send(EMBED)
                statuses_.extend(statuses(await read_answer(stream)))

        async with anyio.create_task_group() as tasks:
            for _ in range(MOST):
                tasks.start_soon(ask)
            await until(lambda: served.in_flight == MOST)
            for path in ("/health", "/ready", "/ping"):
                async with await served.connect() as stream:
                    await stream.send(f"GET {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
                    assert statuses(await read_answer(stream)) == [200]
            for request in (EMBED, post(b'{"input": "a"}', "connection: close")):
                answer = await served.talk(request)
                assert statuses(answer) == [503]
                assert b"only probes are answered" in answer
                assert b"connection: close" in answer.lower()
            async with await served.connect() as waits:
                await waits.send(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
                await read_answer(waits)
                gate.open()
                await until(lambda: len(statuses_) == MOST and served.server.state.connections == 1)
                await waits.send(EMBED)  # there is room again
                assert statuses(await read_answer(waits)) == [200]
        assert statuses_ == [200] * MOST


@pytest.mark.anyio
async def test_a_client_that_never_asks_anything_has_as_long_as_for_a_head() -> None:
    async with serving(head_timeout_s=0.05, keep_alive_s=60) as served:
        for sent in (b"", PREFACE):
            async with await served.connect() as stream:
                await stream.send(sent) if sent else None
                await read_to_end(stream)
        async with await served.connect() as stream:
            await stream.send(EMBED)
            assert statuses(await read_answer(stream)) == [200]
            await anyio.sleep(0.2)  # time that passes is the subject of the test
            await stream.send(EMBED)
            assert statuses(await read_answer(stream)) == [200]
