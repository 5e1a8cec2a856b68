"""A listener for peers that know a token: strangers are few, wait little, and keep no peer out."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress

import anyio
import pytest
from anyio.abc import SocketStream

from staged_pool.api.http import token_listener
from staged_pool.api.http.listener import bind
from staged_pool.api.http.token_listener import MOST_STRANGERS, TokenListener
from tests.api.http.test_accept_loop import connecting, descriptors
from tests.support.logs import captured_logs
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

TOKEN = bytes(range(32))


@asynccontextmanager
async def listening(listener: socket.socket) -> AsyncIterator[TokenListener]:
    """Run a listener for a block. It sends back all that a peer says behind its token."""

    async def echo(stream: SocketStream) -> None:
        async with stream:
            async for said in stream:
                await stream.send(said)

    tokens = TokenListener(listener, TOKEN, echo)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tokens.run)
        yield tokens
        tasks.cancel_scope.cancel()


async def answer_to(client: socket.socket, said: bytes) -> bytes:
    """Say something, and return what comes back."""
    async with await SocketStream.from_socket(client) as stream:
        await stream.send(said)
        with anyio.fail_after(30):
            try:
                return await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return b""


async def test_a_peer_is_known_by_its_token_however_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_listener, "PATIENCE_S", 600.0)
    listener = bind("127.0.0.1", 0)
    address = listener.getsockname()
    async with listening(listener) as tokens:
        assert await answer_to(connecting(address), TOKEN + b"at once") == b"at once"
        client = connecting(address)
        await anyio.wait_writable(client)
        for place in range(0, len(TOKEN), 8):
            client.send(TOKEN[place : place + 8])
            await anyio.wait_all_tasks_blocked()
        assert await answer_to(client, b"piece by piece") == b"piece by piece"
        assert tokens.strangers == 0


@pytest.mark.parametrize("said", [b"", TOKEN[:-1], bytes(32), TOKEN[:-1] + b"\x00rest", b"GET / HTTP/1.1\r\n\r\n" * 9])
async def test_whoever_says_something_else_gets_nothing(said: bytes) -> None:
    listener = bind("127.0.0.1", 0)
    async with listening(listener) as tokens:
        client = connecting(listener.getsockname())
        async with await SocketStream.from_socket(client) as stream:
            with suppress(anyio.BrokenResourceError):
                await stream.send(said)
                await stream.send_eof()
            with anyio.fail_after(30), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
        await until(lambda: tokens.strangers == 0)


async def test_a_connection_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_listener, "PATIENCE_S", 0.01)
    listener = bind("127.0.0.1", 0)
    async with listening(listener) as tokens:
        assert await answer_to(connecting(listener.getsockname()), TOKEN[:-1]) == b""
        assert tokens.strangers == 0


async def test_more_strangers_than_allowed_end_the_oldest() -> None:
    listener = bind("127.0.0.1", 0)
    with ExitStack() as stack:
        address = listener.getsockname()
        async with listening(listener) as tokens:
            oldest = stack.enter_context(connecting(address))
            for _ in range(MOST_STRANGERS):
                await until(lambda: tokens.strangers > 0)
                stack.enter_context(connecting(address))
            with anyio.fail_after(30):
                await anyio.wait_readable(oldest)
            assert oldest.recv(1) == b""
            assert tokens.strangers == MOST_STRANGERS


async def test_silent_connections_beyond_the_descriptors_keep_no_peer_out() -> None:
    listener = bind("127.0.0.1", 0)
    with ExitStack() as stack:
        address = listener.getsockname()
        for _ in range(100):
            stack.enter_context(connecting(address))
        peer = connecting(address)
        with captured_logs() as logs, descriptors(free=8):
            async with listening(listener):
                assert await answer_to(peer, TOKEN + b"I am one") == b"I am one"
        assert {entry["event"] for entry in logs} == {"connection.not_accepted"}
