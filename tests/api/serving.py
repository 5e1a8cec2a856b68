"""A server on a real socket in the test's event loop, and a byte client."""

from __future__ import annotations

import json
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import anyio.abc
import h2.config
import h2.connection
import h2.events
import httpx

from staged_pool.api.config import ServerConfig
from staged_pool.api.http.listener import bind
from staged_pool.api.http.server import OpenEngines, Server
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engines
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.memory.governor import MemoryGovernor
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.stage import StageOptions
from tests.support.model import LetterModel
from tests.support.waiting import until

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of plain sockets: by itself each one reads the certificates of all authorities, which takes longer than
what most tests do."""


class OpenEngine(Protocol):
    """Opens an engine of the test's own."""

    def __call__(
        self, config: EngineConfig, memory: MemoryGovernor | None = None, /
    ) -> AbstractAsyncContextManager[Engine]: ...


def engine_on(model: LetterModel, options: StageOptions | None = None) -> OpenEngine:
    """Opens a real engine on a model that the test holds in its hand."""

    @asynccontextmanager
    async def open_(config: EngineConfig, memory: MemoryGovernor | None = None, /) -> AsyncIterator[Engine]:
        async with DeviceThreads("test device", watchdog_s=config.watchdog_s).running() as device:
            async with run_engine(config, model, device=device, options=options, memory=memory) as engine:
                yield engine

    return open_


def opens(make: Callable[[], AbstractAsyncContextManager[Engine]]) -> OpenEngine:
    """Opens an engine that takes nothing of the server's settings."""

    def open_(config: EngineConfig, memory: MemoryGovernor | None = None, /) -> AbstractAsyncContextManager[Engine]:
        return make()

    return open_


def only(open_engine: OpenEngine) -> OpenEngines:
    """For a server of a single model."""

    @asynccontextmanager
    async def open_(configs: Sequence[EngineConfig], memory: MemoryGovernor) -> AsyncIterator[dict[str, Engine]]:
        (config,) = configs
        async with open_engine(config, memory) as engine:
            yield {engine.card.name: engine}

    return open_


@dataclass
class Served:
    server: Server
    port: int

    @property
    def engine(self) -> Engine:
        (engine,) = self.server.registry.engines
        return engine

    @property
    def in_flight(self) -> int:
        """Requests in flight."""
        return self.engine.statistics().admission.requests

    def client(self, **settings: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=30, verify=NO_TLS, **settings)

    async def connect(self) -> anyio.abc.SocketStream:
        return await anyio.connect_tcp("127.0.0.1", self.port)

    async def talk(self, request: bytes) -> bytes:
        """Send bytes, and read until the server closes the connection."""
        async with await self.connect() as stream:
            await stream.send(request)
            return await read_to_end(stream)

    async def assert_alive(self) -> None:
        """It answers a request, and nothing of earlier ones is left in flight."""
        async with self.client() as client:
            response = await client.post("/v1/embeddings", json={"input": "alive"})
        assert response.status_code == 200
        await until(lambda: self.in_flight == 0)


@asynccontextmanager
async def serving(
    open_engine: OpenEngine | None = None,
    *,
    engine: EngineConfig | None = None,
    listener: socket.socket | None = None,
    quic_listener: socket.socket | None = None,
    **config: Any,
) -> AsyncIterator[Served]:
    listener = listener or bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    engines = open_engines if open_engine is None else only(open_engine)
    server = Server(ServerConfig(**config), [engine or EngineConfig()], open_engines=engines)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run, listener, quic_listener)
        try:
            await until(lambda: not server.registry.not_ready, within_s=120)  # models are loaded
            yield Served(server, port)
        finally:
            with anyio.CancelScope(shield=True):
                await server.close()


async def read_to_end(stream: anyio.abc.ByteReceiveStream) -> bytes:
    received = b""
    with anyio.fail_after(30):
        try:
            while True:
                received += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return received


async def read_answer(stream: anyio.abc.ByteReceiveStream) -> bytes:
    """One complete answer with a `Content-Length`, or of the status 204, which has no content."""
    received = b""
    with anyio.fail_after(30):
        while True:
            received += await stream.receive()
            head, end, body = received.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            if end and (head.startswith(b"HTTP/1.1 204 ") or (length and len(body) >= int(length[1]))):
                return received


def post(body: bytes, *headers: str, path: str = "/v1/embeddings") -> bytes:
    """An HTTP/1.1 request; `Content-Length` is among `headers`, or is added."""
    lines = [f"POST {path} HTTP/1.1", "host: test", "content-type: application/json", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


EMBED = post(json.dumps({"input": "a"}).encode())


def statuses(received: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]


class Http2:
    """An HTTP/2 connection of which the test decides every frame."""

    def __init__(self, stream: Any) -> None:
        settings = h2.config.H2Configuration(
            validate_outbound_headers=False, normalize_outbound_headers=False, header_encoding=None
        )
        self.h2 = h2.connection.H2Connection(settings)
        self.h2.initiate_connection()
        self._stream = stream

    async def request(
        self, stream_id: int, *, path: bytes | None, method: bytes = b"POST", body: bytes = b"", ends: bool = True
    ) -> None:
        headers = [(b":method", method), (b":authority", b"test")]
        headers += [(b":scheme", b"http"), (b":path", path)] if path is not None else []
        self.h2.send_headers(stream_id, [*headers, (b"content-type", b"application/json")])
        await self.send(stream_id, body, ends=ends)

    async def send(self, stream_id: int, body: bytes, *, ends: bool) -> None:
        self.h2.send_data(stream_id, body, end_stream=ends)
        await self.flush()

    async def flush(self) -> None:
        await self._stream.send(self.h2.data_to_send())

    async def reset(self, stream_id: int) -> int:
        """Wait until the server resets the stream; its reason."""
        with anyio.fail_after(30):
            while True:
                for event in self.h2.receive_data(await self._stream.receive()):
                    if isinstance(event, h2.events.StreamReset) and event.stream_id == stream_id:
                        return int(event.error_code)

    async def ends(self, *stream_ids: int) -> dict[int, str]:
        """Wait until each stream is answered or reset; the status, or `reset`."""
        outcome: dict[int, str] = {}
        with anyio.fail_after(30):
            while not set(stream_ids) <= set(outcome):
                await self._stream.send(self.h2.data_to_send())
                for event in self.h2.receive_data(await self._stream.receive()):
                    if isinstance(event, h2.events.ResponseReceived):
                        outcome[event.stream_id] = dict(event.headers)[b":status"].decode()
                    elif isinstance(event, h2.events.StreamReset):
                        outcome.setdefault(event.stream_id, "reset")
                    elif isinstance(event, h2.events.DataReceived):
                        self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        return outcome
