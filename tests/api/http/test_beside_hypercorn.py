"""Hypercorn's protocols are used as its subclasses: nothing of it, of h11 or of h2 is changed for anybody else."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import h2.connection
import h11
import httpx
import hypercorn.protocol
import hypercorn.protocol.h11
import pytest
import sniffio
from hypercorn.config import Config

from staged_pool.api.asgi import Receive, Scope, Send
from staged_pool.api.http.listener import bind
from staged_pool.api.http.protocol.hypercorn_protocols import missing_names
from tests.servers.on_socket import NO_TLS, serving

pytestmark = pytest.mark.usefixtures("servers_may_import")


async def _hosts_app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    body = b""
    while (message := await receive()).get("more_body"):
        body += message["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"host:" + body})


@asynccontextmanager
async def _hosts_server() -> AsyncIterator[httpx.AsyncClient]:
    """A host's own app, served by Hypercorn itself in this process and event loop."""
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    end = anyio.Event()
    backend: Any = importlib.import_module(f"hypercorn.{sniffio.current_async_library()}")

    async def serve() -> None:
        await backend.serve(_hosts_app, config, shutdown_trigger=end.wait)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=NO_TLS, timeout=30) as client:
                yield client
        finally:
            end.set()


async def _ask(client: httpx.AsyncClient) -> None:
    for version in ({}, {"http1": False, "http2": True}):
        async with httpx.AsyncClient(base_url=client.base_url, verify=NO_TLS, timeout=30, **version) as own:  # type: ignore[arg-type]
            for body in (b"", b"x" * 100_000):
                answer = await own.post("/any", content=body)
                assert (answer.status_code, answer.content) == (200, b"host:" + body)


@pytest.mark.anyio
async def test_a_hosts_own_hypercorn_app_works_before_while_and_after_a_server_of_ours_runs() -> None:
    async with _hosts_server() as host:
        await _ask(host)
        async with serving() as served:
            await _ask(host)
            await served.assert_alive()
            await _ask(host)
        await _ask(host)
    async with _hosts_server() as host:
        await _ask(host)


@pytest.mark.anyio
async def test_the_modules_of_hypercorn_are_as_it_made_them_after_a_server_of_ours_has_run() -> None:
    async with serving() as served:
        await served.assert_alive()
    for holder, name in (
        (hypercorn.protocol, "H11Protocol"),
        (hypercorn.protocol, "H2Protocol"),
        (hypercorn.protocol.h11, "HTTPStream"),
        (importlib.import_module("hypercorn.asyncio.run"), "TCPServer"),
        (importlib.import_module("hypercorn.trio.run"), "TCPServer"),
    ):
        assert getattr(holder, name).__module__.startswith("hypercorn.")


def test_what_is_needed_of_h11_and_h2_beyond_their_interfaces_is_there_or_named() -> None:
    assert missing_names(h11.Connection(h11.SERVER), h2.connection.H2Connection()) == []
    without = SimpleNamespace(_cstate=SimpleNamespace())
    assert missing_names(without, without) == [
        "h11.Connection._cstate.keep_alive",
        "h11.Connection._reader",
        "h11.Connection._receive_buffer._data",
        "h2.connection.H2Connection._receive_frame",
    ]
    assert len(missing_names(SimpleNamespace(), SimpleNamespace())) == 4
