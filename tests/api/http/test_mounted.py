"""The mounted server: below any host, on any loop, it answers as `staged-pool serve` does."""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from fastapi import FastAPI
from hypercorn.utils import LifespanFailureError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount
from structlog.typing import EventDict

from staged_pool import asgi
from staged_pool.api.addresses import below_mount
from staged_pool.api.config import ServerConfig
from staged_pool.api.http.mounted import OF_CONNECTIONS, MountedServer
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.memory.governor import UNLIMITED_BYTES, MemoryGovernor
from staged_pool.stages.errors import ConfigError, EngineStopped
from tests.servers.byte_client import post, read_answer, statuses
from tests.servers.engines import engine_on
from tests.servers.hosts import HOSTS, hosting, log_of_hosts
from tests.servers.tiny_models import tiny_models
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.usefixtures("servers_may_import"),
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]

PATHS = {"root": "", "starlette": "/pool", "fastapi": "/services/pool"}
EVERYWHERE = pytest.mark.parametrize("where", PATHS)


def mounted(pool: MountedServer, where: str) -> Any:
    """The root application of a host: the mounted server itself, or one that has it below a path."""
    if where == "root":
        return pool
    if where == "starlette":
        return Starlette(routes=[Mount(PATHS[where], pool)], lifespan=pool.lifespan)
    host = FastAPI(lifespan=pool.lifespan)
    host.mount(PATHS[where], pool)
    return host


@asynccontextmanager
async def on_letters(
    kind: str, where: str, model: LetterModel | None = None, engine: EngineConfig | None = None, **config: Any
) -> AsyncIterator[tuple[int, Engine]]:
    """A host with a mounted server, on an engine that the test has open."""
    async with engine_on(model or LetterModel(), engine) as running:
        pool = asgi.app(running, server=ServerConfig(**config))
        async with hosting(kind, mounted(pool, where)) as port:
            yield port, running


def client_of(port: int, where: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}{PATHS[where]}", timeout=30)


def in_memory(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


# Each host, at its root and below a path


@HOSTS
@EVERYWHERE
async def test_a_model_is_loaded_served_and_closed_by_the_lifespan_of_the_host(kind: str, where: str) -> None:
    pool = asgi.app(*tiny_models("embedder", "ranker"))
    async with hosting(kind, mounted(pool, where)) as port, client_of(port, where) as client:
        assert (await client.get("/health")).status_code == 200
        ready = (await client.get("/ready")).raise_for_status().json()
        assert [model["name"] for model in ready["models"]] == ["embedder", "ranker"] == [*pool.engines]
        answer = await client.post("/v1/embeddings", json={"input": ["a", "b"], "model": "embedder"})
        assert len(answer.raise_for_status().json()["data"]) == 2
        own = await pool.engines["embedder"].embed(["a", "b"])  # the program's own use of the same engine
        assert answer.json()["data"][0]["embedding"] == pytest.approx(own.embeddings[0].tolist(), abs=1e-6)
        answer = await client.post("/m/ranker/rerank", json={"query": "a", "documents": ["a", "b"]})
        assert len(answer.raise_for_status().json()["results"]) == 2
        with pytest.raises(RuntimeError, match="several engines, by name in `engines`: embedder, ranker"):
            _ = pool.engine
        engine = pool.engines["embedder"]
    with pytest.raises(EngineStopped):
        await engine.embed("a")
    with pytest.raises(RuntimeError, match=r"lifespan=pool\.lifespan"):
        _ = pool.engines


@HOSTS
@EVERYWHERE
async def test_errors_and_limits_are_those_of_the_server(kind: str, where: str) -> None:
    async with on_letters(kind, where, body_limit_bytes=2000, api_keys=("key",)) as (port, _):
        async with client_of(port, where) as client:
            answer = await client.post("/v1/embeddings", json={"input": "a"})
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            client.headers["authorization"] = "Bearer key"
            assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200
            answer = await client.post("/v1/embeddings", json={"input": []})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
            assert (await client.post("/v1/embeddings", json={"input": "a" * 3000})).status_code == 413
            chunks = [b"x" * 1000] * 3
            assert (await client.post("/v1/embeddings", content=iterated(chunks))).status_code == 413
            answer = await client.get("/nowhere")
            assert answer.status_code == 404
            assert "There is no route GET /nowhere." in answer.json()["error"]["message"]
            answer = await client.get("/embed")
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
            described = (await client.get("/openapi.json")).raise_for_status().json()
            assert described["servers"] == [{"url": PATHS[where] or "/"}]


async def iterated(chunks: list[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


@HOSTS
@EVERYWHERE
async def test_overload_is_rejected_at_once(kind: str, where: str) -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with on_letters(kind, where, model, EngineConfig(max_requests=1)) as (port, engine):
        async with client_of(port, where) as client, anyio.create_task_group() as tasks:
            try:
                tasks.start_soon(partial(client.post, "/v1/embeddings", json={"input": "held"}))
                await gate.arrived()
                answer = await client.post("/v1/embeddings", json={"input": "a"})
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
            finally:
                gate.open()
        assert engine.statistics().admission.requests == 0


@HOSTS
@EVERYWHERE
async def test_a_client_that_leaves_cancels_its_request_in_the_engine(kind: str, where: str) -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with on_letters(kind, where, model) as (port, engine):
        try:
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                await stream.send(post(b'{"input": "left"}', path=f"{PATHS[where]}/v1/embeddings"))
                await gate.arrived()
                assert engine.statistics().admission.requests == 1
            await until(lambda: engine.statistics().admission.requests == 0)  # while its forward still runs
            assert sum(engine.statistics().cancelled.values()) == 1
        finally:
            gate.open()


@HOSTS
async def test_neither_signals_nor_loggers_are_touched(kind: str) -> None:
    numbers = [
        number for number in signal.Signals if number not in (signal.SIGINT, signal.SIGTERM)
    ]  # uvicorn has these
    handlers = {number: signal.getsignal(number) for number in numbers}
    root = logging.getLogger()
    before = (root.level, [*root.handlers])
    async with hosting(kind, asgi.app(*tiny_models("embedder"))) as port, client_of(port, "root") as client:
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200
        assert {number: signal.getsignal(number) for number in numbers} == handlers
        assert (root.level, root.handlers) == before


@HOSTS
async def test_a_model_that_cannot_be_loaded_stops_the_start_of_its_host(kind: str) -> None:
    pool = asgi.app(EngineConfig(model="/no/such/folder", offline=True))
    failures: list[str] = []
    with log_of_hosts() as logged:
        try:
            async with hosting(kind, pool):
                with anyio.fail_after(30):  # Hypercorn on trio calls its trigger before it ends
                    await anyio.sleep_forever()
        except* (RuntimeError, LifespanFailureError) as group:
            failures.append(repr(group))
    assert "/no/such/folder" in "".join([*failures, *logged])


# Any host, in memory


async def passed_on(request: Any, call_next: Callable[[Any], Any]) -> Any:
    answer = await call_next(request)
    answer.headers["x-seen"] = request.url.path
    return answer


MIDDLEWARE = [
    Middleware(CORSMiddleware, allow_origins=["https://page"]),
    Middleware(GZipMiddleware, minimum_size=100),
    Middleware(BaseHTTPMiddleware, dispatch=passed_on),
]


@asynccontextmanager
async def behind_middleware(pool: MountedServer, *engines: Engine) -> AsyncIterator[Starlette]:
    async with pool.running(*engines):
        yield Starlette(routes=[Mount("/pool", pool)], middleware=MIDDLEWARE)


async def test_middleware_of_a_host_sees_requests_and_answers() -> None:
    async with engine_on(LetterModel()) as engine, behind_middleware(asgi.app(engine)) as host:
        async with in_memory(host) as client:
            answer = await client.post(
                "/pool/v1/embeddings", json={"input": ["a"] * 20}, headers={"origin": "https://page"}
            )
            assert len(answer.raise_for_status().json()["data"]) == 20
            assert answer.headers["access-control-allow-origin"] == "https://page"
            assert answer.headers["content-encoding"] == "gzip"
            assert answer.headers["x-seen"] == "/pool/v1/embeddings"
            lines = await client.post(
                "/pool/v1/embeddings", json={"input": ["a", "b"]}, headers={"accept": "application/x-ndjson"}
            )
            assert len(lines.text.splitlines()) == 3


@HOSTS
async def test_behind_middleware_a_client_that_leaves_is_no_error(kind: str, logged: list[EventDict]) -> None:
    gate = Gate()
    async with engine_on(LetterModel(on_forward=gate)) as engine, behind_middleware(asgi.app(engine)) as host:
        with log_of_hosts() as faults:
            async with hosting(kind, host) as port:
                try:
                    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                        await stream.send(post(b'{"input": "left"}', path="/pool/v1/embeddings"))
                        await gate.arrived()
                    await until(lambda: engine.statistics().admission.requests == 0)
                finally:
                    gate.open()
                async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                    await stream.send(post(b'{"input": "a"}', path="/pool/v1/embeddings"))
                    assert statuses(await read_answer(stream)) == [200]
        assert not faults
        assert [event["status"] for event in logged if event["event"] == "request.finished"] == [499, 200]


# Its own life


async def test_a_server_whose_lifespan_nobody_runs_says_how_to_start_it() -> None:
    pool = asgi.app(*tiny_models("embedder"))
    async with in_memory(Starlette(routes=[Mount("/pool", pool)])) as client:
        for path in ("/v1/embeddings", "/embed", "/health"):
            answer = await client.post(f"/pool{path}", json={"input": "a"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert "`lifespan=pool.lifespan`" in str(answer.json()["error"])


async def test_a_host_may_open_the_engine_in_its_own_lifespan() -> None:
    (config,) = tiny_models("embedder")
    pool = asgi.app()
    async with open_engine(config) as engine, pool.running(engine) as engines, in_memory(pool) as client:
        assert pool.engine is engine is engines["embedder"]
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200


async def test_it_runs_once_at_a_time_and_may_run_again() -> None:
    memory = MemoryGovernor(UNLIMITED_BYTES)
    async with engine_on(LetterModel(), memory=memory) as engine:
        pool, listeners = asgi.app(engine), len(memory._listeners)
        for _ in range(2):
            async with pool.running(), in_memory(pool) as client:
                with pytest.raises(RuntimeError, match="runs already"):
                    await pool.running().__aenter__()
                assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200
                assert (await client.get("/ready")).status_code == 200
        assert len(memory._listeners) == listeners


async def test_one_task_may_start_it_and_another_end_it() -> None:
    async with engine_on(LetterModel()) as engine:
        pool = asgi.app(engine)
        running = pool.running()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.__aenter__)
        async with in_memory(pool) as client:
            assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200
        await running.__aexit__(None, None, None)


async def test_at_its_end_it_answers_what_it_has_begun() -> None:
    gate = Gate()
    async with engine_on(LetterModel(on_forward=gate)) as engine:
        pool = asgi.app(engine)
        answers: list[httpx.Response] = []

        async def ask(client: httpx.AsyncClient) -> None:
            answers.append(await client.post("/v1/embeddings", json={"input": "a"}))

        async with in_memory(pool) as client, anyio.create_task_group() as tasks:
            async with pool.running():
                tasks.start_soon(ask, client)
                await gate.arrived()
            assert (await client.get("/ready")).status_code == 503
            gate.open()
    assert [answer.status_code for answer in answers] == [200]


async def test_a_model_is_needed_and_names_are_unique() -> None:
    with pytest.raises(ConfigError, match="no model: give the server an EngineConfig"):
        async with asgi.app().running():
            pass
    async with engine_on(LetterModel()) as one, engine_on(LetterModel()) as other:
        pool = asgi.app(one, other)
        with pytest.raises(ConfigError, match="two models have the same name"):
            async with pool.running():
                pass


@pytest.mark.parametrize("name", sorted(OF_CONNECTIONS - {"tls_cert", "tls_key", "tls_ca", "quic_port"}))
async def test_settings_of_connections_are_rejected(name: str) -> None:
    value: Any = {"host": "0.0.0.0", "unix_socket": Path("/run/pool")}.get(name, 7)
    with pytest.raises(ConfigError, match=f"^{name}=.*a mounted server has no connections"):
        asgi.app(server=ServerConfig(**{name: value}))


async def test_a_web_socket_is_closed() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await asgi.app()({"type": "websocket", "path": "/"}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


# Paths


@pytest.mark.parametrize(
    ("root_path", "raw_path", "path"),
    [
        ("", b"/embed", "/embed"),
        ("/pool", b"/pool/embed", "/embed"),
        ("/pool/", b"/pool/embed", "/embed"),
        ("/pool", b"/pool", "/"),
        ("/pool", b"/pool/pool/embed", "/pool/embed"),
        ("/pool", b"/poolish/embed", "/poolish/embed"),
        ("/my pool", b"/my%20pool/embed", "/embed"),
        ("/caf\u00e9", b"/caf%C3%A9/m/a%2Fb/embed", "/m/a%2Fb/embed"),
        ("/caf\u00e9", b"/caf%c3%a9/embed", "/embed"),
        ("/A", b"/a/embed", "/a/embed"),
        ("/a.b", b"/axb/embed", "/axb/embed"),
        ("/a/b", b"/a%2fb/embed", "/embed"),
    ],
)
async def test_the_path_of_the_mount_is_cut_off(root_path: str, raw_path: bytes, path: str) -> None:
    whole = {"path": raw_path.decode(), "raw_path": raw_path, "root_path": root_path}
    given = dict(whole)
    assert below_mount(given)["raw_path"] == path.encode()
    assert given == whole  # it is its host's
    without = below_mount({"path": f"{root_path.rstrip('/')}/embed", "root_path": root_path})
    assert (without["path"], "raw_path" in without) == ("/embed", False)


async def test_models_and_prefixes_are_found_below_a_mount() -> None:
    async with engine_on(LetterModel()) as engine:
        pool = asgi.app(engine, server=ServerConfig(root_path="/proxy"))
        host = Starlette(routes=[Mount("/teams/{team}", Starlette(routes=[Mount("/pool", pool)]))])
        async with pool.running(), in_memory(host) as client:
            for path in (
                "/v1/embeddings",
                f"/m/{engine.card.name}/v1/embeddings",
                "/proxy/v1/embeddings",
                "//v1//embeddings/",
            ):
                answer = await client.post(f"/teams/a%20b/pool{path}", json={"input": "a"})
                assert answer.status_code == 200, path
