"""Access: keys, pages of other origins, and the paths of a proxy."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from structlog.typing import EventDict

from staged_pool.api.addresses import below
from staged_pool.api.app.app import Application
from staged_pool.api.app.dialects import OLLAMA_PATHS, TEI_PATHS, WEAVIATE_PATHS
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.app.metrics import ServerMetrics
from staged_pool.api.app.pages import PAGES
from staged_pool.api.app.plugin_routes import PluginRoutes
from staged_pool.api.app.routes import Routes
from staged_pool.api.config import ServerConfig
from staged_pool.api.keys import OPEN, TENANT, Keys, read_keys
from staged_pool.api.limits.server_state import ServerState
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.errors import ConfigError
from tests.servers.byte_client import EMBED, Http2, post, read_answer, statuses
from tests.servers.on_socket import serving
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]

KEY = "the-first-key-of-all"
OTHER = "another-key"
WITH_KEY = {"authorization": f"Bearer {KEY}"}


def every_route() -> list[tuple[str, str]]:
    registry = EngineRegistry()
    table = Routes(registry, ServerMetrics(registry, ServerState()), PluginRoutes(registry)).table()
    return [(method, path) for path, handlers in table.items() for method in handlers]


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected client that goes on sending is cut off soon."""
    monkeypatch.setattr("staged_pool.api.http.general_path.LINGER_S", 0.05)


@asynccontextmanager
async def guarded(**config: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(api_keys=(KEY, OTHER), **config) as served:
        async with served.client() as client:
            yield client


def lines(logged: list[EventDict]) -> list[EventDict]:
    return [event for event in logged if event["event"] == "request.finished"]


# Keys


async def test_every_route_but_those_of_probes_needs_a_key() -> None:
    async with guarded() as client:
        for method, path in [*every_route(), ("GET", "/nothing"), ("GET", "/ready%2f")]:
            response = await client.request(method, path, content=b"{}" if method == "POST" else None)
            if path in OPEN:
                assert response.status_code in (200, 204), path
                continue
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            if path in PAGES and method in ("GET", "HEAD"):
                assert response.content == PAGES[path].body
            elif path in TEI_PATHS:
                assert response.json()["error_type"] == "Validation"
            elif path in OLLAMA_PATHS | WEAVIATE_PATHS:
                assert "API key" in response.json()["error"]
            elif path == "/v1/ranking":
                assert response.json()["type"] == "AuthenticationError"
            else:
                assert response.json()["error"]["type"] == "AuthenticationError"
                assert response.json()["error"]["code"] == 401
    probes = {"/.well-known/live", "/.well-known/ready", "/v1/health/live", "/v1/health/ready"}
    assert set(OPEN) == {"/health", "/ready", "/ping", *probes}


@pytest.mark.parametrize("method", ["OPTIONS", "HEAD", "PUT", "TRACE"])
async def test_no_method_is_a_way_around_the_key(method: str) -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with guarded() as client:
        assert (await client.request(method, "/v1/embeddings", headers=headers)).status_code == 401


@pytest.mark.parametrize("key", [KEY, OTHER])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER  "])
async def test_each_key_opens_the_server(key: str, scheme: str) -> None:
    headers = {"authorization": f"{scheme} {key}"}
    async with guarded() as client:
        response = await client.post("/v1/embeddings", json={"input": "a"}, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"Bearer",
        f"Basic {KEY}".encode(),
        KEY.encode(),
        f"Bearer {KEY[:-1]}".encode(),
        f"Bearer {KEY}x".encode(),
        f"Bearer {KEY.upper()}".encode(),
        f"Bearer {KEY} {OTHER}".encode(),
        f"Bearer {KEY},Bearer {OTHER}".encode(),
        "Bearer schlüssel".encode(),
        b"Bearer \xff\xfe",
        b"Bearer " + b"x" * 12_000,
    ],
)
async def test_anything_else_is_answered_401(given: bytes) -> None:
    async with guarded() as client:
        response = await client.post("/v1/embeddings", json={"input": "a"}, headers={b"authorization": given})
    assert response.status_code == 401


async def test_two_keys_in_one_request_are_rejected() -> None:
    headers = [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")]
    async with guarded() as client:
        response = await client.post("/v1/embeddings", json={"input": "a"}, headers=headers)
    assert response.status_code == 401


async def test_a_request_without_a_key_is_rejected_before_its_body_is_read() -> None:
    async with serving(api_keys=(KEY,), body_limit_bytes=2**20) as served:
        async with await served.connect() as stream:
            await stream.send(post(b"", "content-length: 1000000"))
            answer = await read_answer(stream)
        assert statuses(answer) == [401]
        assert served.server.state.body_bytes == 0
        assert served.engine.statistics().admission.admitted == 0


async def test_http2_asks_for_the_key_of_each_stream() -> None:
    async with serving(api_keys=(KEY,)) as served:
        async with await served.connect() as stream:
            client = Http2(stream)
            await client.request(1, path=b"/v1/embeddings", body=b'{"input":"a"}')
            await client.request(3, path=b"/health", method=b"GET")
            assert await client.ends(1, 3) == {1: "401", 3: "200"}


async def test_under_overload_a_request_without_a_key_learns_nothing_of_it(logged: list[EventDict]) -> None:
    gate = Gate()
    model = LetterModel(on_preprocess=gate)
    with_key = post(b'{"input":"a"}', f"authorization: Bearer {KEY}")
    async with serving(model, engine=EngineConfig(max_requests=1), api_keys=(KEY,)) as served:
        async with await served.connect() as inside, await served.connect() as outside:
            await inside.send(with_key)
            await gate.arrived()
            for request, status in [(EMBED, 401), (with_key, 429), (EMBED, 401)]:
                await outside.send(request)
                answer = await read_answer(outside)
                assert statuses(answer) == [status]
                assert (b"retry-after" in answer) is (status == 429)
            gate.open()
            assert statuses(await read_answer(inside)) == [200]


async def test_one_rejection_in_a_while_is_logged_and_says_how_many_were_not(logged: list[EventDict]) -> None:
    async with guarded() as client:
        for _ in range(5):
            await client.get("/v1/models")
    assert [line["status"] for line in lines(logged)] == [401]


async def test_logs_name_the_owner_of_a_key_and_never_the_key(logged: list[EventDict]) -> None:
    async with guarded() as client:
        for key in (KEY, OTHER, KEY, "wrong-key"):
            body = {"input": "a", "model": "letters"}
            await client.post("/v1/embeddings?api_key=q", json=body, headers={"authorization": f"Bearer {key}"})
    tenants = [line.get("tenant") for line in lines(logged)]
    assert tenants[0] == tenants[2] != tenants[1]
    assert all(len(str(tenant)) == 8 for tenant in tenants[:3])
    assert tenants[3] is None
    for secret in (KEY, OTHER, "wrong-key", "api_key"):
        assert secret not in str(logged)


def test_a_setting_does_not_print_its_keys() -> None:
    assert KEY not in repr(ServerConfig(api_keys=(KEY,)))


def test_the_scope_says_whose_request_it_is() -> None:
    scope: dict[str, Any] = {"path": "/x", "headers": [(b"authorization", f"Bearer {KEY}".encode())]}
    assert Keys([KEY]).admit(scope) is None
    tenant = scope[TENANT]
    assert Keys([OTHER, KEY]).admit(scope) is None
    assert scope[TENANT] == tenant


def test_without_keys_everyone_may_ask() -> None:
    assert not Keys()
    assert Keys().admit({"path": "/x", "headers": []}) is None


def test_all_keys_are_compared_whichever_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((len(first), len(second)))
        return first == second

    monkeypatch.setattr("hmac.compare_digest", compare)
    keys = Keys(["a", "bb", "ccc"])
    for key in (b"a", b"ccc", b"no", b"x" * 5000):
        compared.clear()
        keys.admit({"path": "/x", "headers": [(b"authorization", b"Bearer " + key)]})
        assert compared == [(32, 32)] * 3


@pytest.mark.parametrize("key", ["", " ", "a b", "ä", "a\n", "x" * 5000])
def test_a_key_that_no_client_can_send_is_rejected_at_start_and_not_printed(key: str) -> None:
    with pytest.raises(ConfigError, match=r"number 2") as rejected:
        ServerConfig(api_keys=(KEY, key))
    assert KEY not in str(rejected.value)
    assert not key.strip() or key not in str(rejected.value)


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# of the team\n{KEY}\n\n  {OTHER}  \r\n")
    assert read_keys(path) == [KEY, OTHER]


@pytest.mark.parametrize("content", [None, b"", b"# none\n\n", b"\xff\xfe"])
def test_a_file_without_keys_does_not_open_the_server(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="api_key_file="):
        read_keys(path)


# Pages of other origins


PREFLIGHT = {
    "origin": "https://page.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


async def test_a_page_of_an_allowed_origin_may_ask_and_read() -> None:
    async with guarded(cors_origins=("https://page.example",)) as client:
        allowed = await client.options("/v1/embeddings", headers=PREFLIGHT)
        answer = await client.post(
            "/v1/embeddings", json={"input": "a"}, headers=WITH_KEY | {"origin": "https://page.example"}
        )
        rejected = await client.post("/v1/embeddings", json={}, headers={"origin": "https://page.example"})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    assert "x-stainless-lang" in allowed.headers["access-control-allow-headers"]
    assert (answer.status_code, rejected.status_code) == (200, 401)
    for response in (answer, rejected):
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        assert "access-control-allow-credentials" not in response.headers
        assert response.headers["vary"] == "Origin"
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "metadata", "x-total-time", "x-compute-tokens"} <= set(exposed)


async def test_a_page_of_another_origin_may_not() -> None:
    async with guarded(cors_origins=("https://page.example",)) as client:
        rejected = await client.options("/v1/embeddings", headers=PREFLIGHT | {"origin": "https://page.example.org"})
        answer = await client.get("/health", headers={"origin": "https://other.example"})
    assert rejected.status_code == 400
    for response in (rejected, answer):
        assert "access-control-allow-origin" not in response.headers


async def test_rejections_under_overload_can_be_read_by_pages_too() -> None:
    gate = Gate()
    config = {"cors_origins": ("*",), "engine": EngineConfig(max_requests=1)}
    model = LetterModel(on_preprocess=gate)
    async with serving(model, **config) as served, served.client() as client:  # type: ignore[arg-type]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.post("/v1/embeddings", json={"input": "a"}))
            await gate.arrived()
            full = await client.post("/v1/embeddings", json={"input": "a"}, headers={"origin": "https://a.example"})
            gate.open()
    assert full.status_code == 429
    assert full.headers["access-control-allow-origin"] == "*"


async def test_the_root_asks_browsers_for_the_key_and_tells_clients_that_it_is_missing() -> None:
    async with guarded() as client:
        page = await client.get("/")
        asked = await client.post("/", json={"inputs": "a"})
        answered = await client.post("/", json={"inputs": "a"}, headers=WITH_KEY)
    assert (page.status_code, page.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert (asked.status_code, asked.headers["content-type"]) == (401, "application/json")
    assert set(asked.json()) == {"error", "error_type"}
    assert answered.status_code == 200


async def test_without_origins_nothing_is_said_of_them() -> None:
    async with serving() as served, served.client() as client:
        preflight = await client.options("/v1/embeddings", headers=PREFLIGHT)
        answer = await client.get("/health", headers={"origin": "https://a.example"})
    assert preflight.status_code == 405
    assert "--cors-origin" in preflight.json()["error"]["message"]
    assert not [name for name in {**preflight.headers, **answer.headers} if name.startswith("access-control")]


async def test_a_preflight_with_a_body_does_not_hold_the_connection() -> None:
    async with serving(cors_origins=("*",)) as served:
        headers = [f"{name}: {value}" for name, value in PREFLIGHT.items()]
        preflight = post(b"x" * 2**20, *headers).replace(b"POST", b"OPTIONS", 1)
        last = post(b'{"input":"a"}', "connection: close")
        assert statuses(await served.talk(preflight + preflight + last)) == [200] * 3


ORIGINS = (
    "https://page.example", "http://localhost:3000", "http://[::1]:8080", "chrome-extension://abcdefghijklmnopabcdefgh",
    "moz-extension://6cc2ad2d-6d0b-4a4c-8f36-7ff9c3f4a3a6", "app://obsidian.md", "tauri://localhost",
    "vscode-webview://1a2b", "file://", "null",
)  # fmt: skip


@pytest.mark.parametrize("origin", ORIGINS)
async def test_an_origin_is_allowed_by_its_own_name_alone(origin: str) -> None:
    async with guarded(cors_origins=(origin,)) as client:
        found = {
            each: await client.options("/v1/embeddings", headers=PREFLIGHT | {"origin": each})
            for each in (*ORIGINS, f"{origin}.example", origin.upper())
        }
        read = await client.get("/health", headers={"origin": origin})
    assert [each for each, answer in found.items() if answer.status_code == 200] == [origin]
    for answer in (found[origin], read):
        assert answer.headers["access-control-allow-origin"] == origin


async def test_an_origin_of_the_web_may_be_written_as_a_person_does() -> None:
    async with guarded(cors_origins=("https://Page.Example:443",)) as client:
        allowed = await client.options("/v1/embeddings", headers=PREFLIGHT)
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"


@pytest.mark.parametrize("origins", [("https://page.example",), ("*",)])
async def test_an_allowed_page_may_reach_a_private_network(origins: tuple[str, ...]) -> None:
    asking = PREFLIGHT | {"access-control-request-private-network": "true"}
    async with guarded(cors_origins=origins) as client:
        allowed = await client.options("/v1/embeddings", headers=asking)
        plain = await client.options("/v1/embeddings", headers=PREFLIGHT)
        put = await client.options("/v1/embeddings", headers=asking | {"access-control-request-method": "PUT"})
        other = await client.options("/v1/embeddings", headers=asking | {"origin": "https://other.example"})
    assert (allowed.status_code, allowed.headers["access-control-allow-private-network"]) == (200, "true")
    assert allowed.headers["access-control-allow-origin"] == ("*" if origins == ("*",) else origins[0])
    assert (plain.status_code, put.status_code) == (200, 400)
    assert other.status_code == (200 if origins == ("*",) else 400)
    for answer in (plain, put, *([other] if other.status_code == 400 else [])):
        assert "access-control-allow-private-network" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    ["", "page.example", "https://page.example/", "https://a b", "https://", "://a", "file:///a", "Null", "a:b"],
)
def test_an_invalid_origin_is_rejected_at_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origin="):
        ServerConfig(cors_origins=(origin,))


# Behind a proxy


async def test_requests_are_answered_with_the_prefix_of_a_proxy_and_without(logged: list[EventDict]) -> None:
    async with guarded(root_path="/proxy/a") as client:
        for prefix in ("", "/proxy/a"):
            assert (await client.get(f"{prefix}/health")).status_code == 200
            assert (await client.get(f"{prefix}/v1/models")).status_code == 401
            answer = await client.post(f"{prefix}/v1/embeddings", json={"input": "a"}, headers=WITH_KEY)
            assert answer.status_code == 200
        for path in ("/proxy", "/proxy/ahealth", "/proxy/a/proxy/a/health"):
            assert (await client.get(path, headers=WITH_KEY)).status_code == 404
    paths = [line["path"] for line in lines(logged) if line["status"] == 200 and "tenant" in line]
    assert paths == ["/v1/embeddings"] * 2


def test_a_prefix_is_one_of_whole_segments() -> None:
    assert [below("/a", path) for path in ("/a/b", "/a", "/ab", "/b/a", "/a/")] == ["/b", "/", "/ab", "/b/a", "/"]
    assert below("", "/a") == "/a"


@pytest.mark.parametrize("root_path", ["a", "/a/", "/a//b", "/a?b", "/ü", "/a b", "/"])
def test_an_invalid_prefix_is_rejected_at_start(root_path: str) -> None:
    with pytest.raises(ConfigError, match="root_path="):
        ServerConfig(root_path=root_path)


async def test_what_a_proxy_is_said_to_have_said_is_not_believed(logged: list[EventDict]) -> None:
    spoofed = {"x-forwarded-for": "203.0.113.9", "forwarded": "for=203.0.113.9", "x-forwarded-prefix": "/x"}
    async with serving(log_clients=True) as served, served.client() as client:
        await client.get("/v1/models", headers=spoofed)
    [line] = lines(logged)
    assert line["client"] == "127.0.0.1"
    assert "203.0.113.9" not in str(logged)


# The line in the log


async def test_a_line_names_model_trace_and_sizes_and_no_address(logged: list[EventDict]) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    body = json.dumps({"input": "a"})
    async with serving() as served, served.client() as client:
        response = await client.post(
            "/v1/embeddings",
            content=body,
            headers={"content-type": "application/json", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"},
        )
    [line] = lines(logged)
    assert (line["model"], line["trace_id"]) == ("letters", trace)
    assert (line["body_bytes"], line["answer_bytes"]) == (len(body), len(response.content))
    assert "client" not in line
    assert "127.0.0.1" not in str(line)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
    ],
)
async def test_an_invalid_trace_is_not_logged(given: str, logged: list[EventDict]) -> None:
    async with serving() as served, served.client() as client:
        await client.get("/v1/models", headers={"traceparent": given})
    [line] = lines(logged)
    assert "trace_id" not in line


async def test_an_unknown_path_is_logged_in_short(logged: list[EventDict]) -> None:
    async with serving() as served, served.client() as client:
        await client.get("/" + "x" * 5000)
    [line] = lines(logged)
    assert len(line["path"]) < 100


async def test_the_lines_can_be_left_out(logged: list[EventDict]) -> None:
    async with serving(access_log=False) as served, served.client() as client:
        await client.post("/v1/embeddings", json={"input": "a"})
        await until(lambda: served.in_flight == 0)
        numbers = (await client.get("/metrics")).text
    assert not lines(logged)
    assert (
        'staged_pool_http_requests_total{model="letters",path_taken="fast",route="/v1/embeddings",status="200"} 1.0'
        in numbers
    )


def test_an_application_without_settings_is_open() -> None:
    assert (
        Application(EngineRegistry()).front_door.reject({"type": "http", "method": "GET", "path": "/x", "headers": []})
        is None
    )
