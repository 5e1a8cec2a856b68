"""Faults of one connection end it, with an answer where possible, and reach no other."""

from __future__ import annotations

import os
import socket
import ssl
from contextlib import suppress

import anyio
import pytest
import sniffio

from staged_pool.api.config import ServerConfig
from staged_pool.api.http.accept import Acceptor
from staged_pool.api.http.asyncio_transport import AsyncioTransport
from staged_pool.api.http.connection_lifecycle import ConnectionConfig
from staged_pool.api.http.connections import Connection
from staged_pool.api.http.protocol.bodies import Body
from staged_pool.api.http.transports import Transport
from staged_pool.api.http.trio_transport import TrioTransport
from staged_pool.api.limits.server_state import ServerState
from tests.servers.byte_client import EMBED, post, read_answer, read_to_end, statuses
from tests.servers.on_socket import serving
from tests.support.logs import captured_logs
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]

BODY = b'{"input": "a"}'
CHUNKED = post(b"e\r\n" + BODY + b"\r\n0\r\n\r\n", "transfer-encoding: chunked")
CONTENT = {"fast": post(BODY), "general": CHUNKED, "with a coding": post(BODY, "content-encoding: identity")}


# No memory


@pytest.mark.parametrize("cut", [None, -8], ids=["whole", "in two parts"])
@pytest.mark.parametrize("sent", CONTENT.values(), ids=CONTENT)
async def test_no_memory_for_a_body_is_answered_503_and_logged(
    sent: bytes, cut: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(body: Body, chunk: bytes) -> None:
        raise MemoryError

    async with serving() as served:
        with captured_logs() as logs, monkeypatch.context() as patched:
            patched.setattr(Body, "add", add)
            async with await served.connect() as stream:
                await stream.send(sent[:cut])
                if cut is not None:
                    await anyio.wait_all_tasks_blocked()
                    with suppress(anyio.BrokenResourceError):  # it is answered already
                        await stream.send(sent[cut:])
                received = await read_to_end(stream)
        assert statuses(received) == [503]
        assert b"memory" in received
        assert {entry["event"] for entry in logs} & {"connection.no_memory", "memory.exhausted"}
        await served.assert_alive()
        state = served.server.state
        await until(lambda: state.connections == state.body_bytes == state.requests == 0)


async def test_no_memory_for_a_later_part_of_a_body_is_answered_503_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Body.add

    def add(body: Body, chunk: bytes) -> None:
        if body.size:
            raise MemoryError
        real(body, chunk)

    async with serving() as served:
        with captured_logs() as logs, monkeypatch.context() as patched:
            patched.setattr(Body, "add", add)
            async with await served.connect() as stream:
                await stream.send(post(BODY)[:-8])
                await until(lambda: served.server.state.requests == 1)
                await stream.send(post(BODY)[-8:])
                received = await read_to_end(stream)
        assert statuses(received) == [503]
        assert [entry["event"] for entry in logs if "memory" in entry["event"]] == ["connection.no_memory"]
        await served.assert_alive()


# Sockets that are closed


def acceptor() -> Acceptor:
    async def app(*_: object) -> None: ...

    config = ConnectionConfig()
    config.limits, config.server_state = ServerConfig(), ServerState()
    return Acceptor(app, None, config, None)


async def test_a_socket_that_is_closed_already_is_no_warning() -> None:
    service = acceptor()._service
    accepted, client = socket.socketpair()
    client.close()
    accepted.close()
    with captured_logs() as logs:
        await Connection(service).run(accepted)
    assert logs == []
    assert service.config.server_state.connections == 0


async def test_a_closed_connection_reads_nothing_of_the_next_one_with_its_descriptor() -> None:
    kind = AsyncioTransport if sniffio.current_async_library() == "asyncio" else TrioTransport
    no_tls: ssl.SSLContext | None = None
    accepted, client = socket.socketpair()
    accepted.setblocking(False)
    descriptor = accepted.fileno()
    transport: Transport = await kind.open(accepted, no_tls, lambda data: False)
    await transport.close()
    accepted.close()
    client.close()
    with suppress(OSError):
        os.close(descriptor)
    theirs, other = socket.socketpair()
    with theirs, other:
        if theirs.fileno() != descriptor:
            os.dup2(theirs.fileno(), descriptor)
        other.send(b"secret")
        assert transport.read_now(100) == b""
        assert theirs.recv(100) == b"secret"
        if theirs.fileno() != descriptor:
            os.close(descriptor)


# Evictions

UNFINISHED = {
    "a body of a known length": post(b"{", "content-length: 1000"),
    "a body in chunks": post(b"5\r\nab", "transfer-encoding: chunked"),
    "half a head": EMBED[:30],
    "nothing": b"",
}


@pytest.mark.parametrize("sent", UNFINISHED.values(), ids=UNFINISHED)
async def test_a_connection_that_makes_room_is_told_nothing(sent: bytes) -> None:
    async with serving(max_connections=1) as served, await served.connect() as stream:
        if sent:
            await stream.send(sent)
        await until(lambda: served.server.state.connections == 1)
        await anyio.wait_all_tasks_blocked()
        async with await served.connect() as other:
            await other.send(EMBED)
            assert statuses(await read_answer(other)) == [200]
        received = b""
        with suppress(anyio.BrokenResourceError, anyio.EndOfStream):  # a reset is as good as an end
            received = await stream.receive()
        assert received == b""
        assert served.server.state.limit.evicted == 1
