"""Targets lead to one place, however they are spelled, in every version of HTTP."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import anyio
import httpx
import pytest

from staged_pool.api.addresses import MODEL, ONE_MODEL, Addresses
from staged_pool.api.wire.dialects.pooling import POOLING_TASKS
from staged_pool.runtime.requests import Output
from tests.servers.byte_client import post, read_answer
from tests.servers.in_memory import serving_in_memory
from tests.servers.on_socket import Served, serving
from tests.support.cards import CARD, CLASSIFIER, CROSS_ENCODER, EMBEDDER
from tests.support.model import LetterModel

BGE_M3: Final = (Output.DENSE, Output.SPARSE, Output.MULTI_VECTOR, Output.TOKEN_WEIGHTS)
ROUTES: Final = (
    "/",
    "/embed",
    "/embeddings",
    "/v1/embeddings",
    "/v1/models",
    "/models",
    "/health",
    "/rerank",
    ONE_MODEL,
)
NAMES: Final = ("small", "org/model", "a/embed")


def placed(target: str, *, root_path: str = "", names: Sequence[str] = NAMES) -> tuple[str, str | None]:
    scope: dict[str, Any] = {"path": "unread", "raw_path": target.encode()}
    Addresses(ROUTES, lambda: names, root_path).place(scope)
    return scope["path"], scope[MODEL]


@pytest.mark.parametrize(
    ("target", "route", "model"),
    [
        ("/embed", "/embed", None),
        ("/embed/", "/embed", None),
        ("//embed", "/embed", None),
        ("/v1//embeddings//", "/v1/embeddings", None),
        ("http://host/v1/embeddings", "/v1/embeddings", None),
        ("HTTPS://host:8000/embed/", "/embed", None),
        ("http://host", "/", None),
        ("/v1/models/small", ONE_MODEL, "small"),
        ("/v1/models/org/model", ONE_MODEL, "org/model"),
        ("/v1/models/org%2Fmodel", ONE_MODEL, "org/model"),
        ("/models/small/", ONE_MODEL, "small"),
        ("/m/small/embed", "/embed", "small"),
        ("/m/small/embed/", "/embed", "small"),
        ("/m/small", "/", "small"),
        ("/m/small/", "/", "small"),
        ("/m/org/model/v1/embeddings", "/v1/embeddings", "org/model"),
        ("/m/org%2fmodel/v1/embeddings", "/v1/embeddings", "org/model"),
        ("/m/org/model/v1/models/org/model", ONE_MODEL, "org/model"),
        ("/m/a/embed/embed", "/embed", "a/embed"),
        ("/m/a/embed", "/", "a/embed"),
        ("/m/nobody/embed", "/embed", "nobody"),
        ("/m/no/body/v1/embeddings", "/v1/embeddings", "no/body"),
        ("/openai/deployments/small/embeddings", "/v1/embeddings", "small"),
        ("/openai/deployments/org%2Fmodel/embeddings", "/v1/embeddings", "org/model"),
        ("/openai/v1/embeddings", "/v1/embeddings", None),
        ("/openai/models", "/models", None),
        ("/openai/v1/models/small", ONE_MODEL, "small"),
        # not routes, and left as they were sent
        ("/%65mbed", "/%65mbed", None),
        ("/v1/%65mbeddings", "/v1/%65mbeddings", None),
        ("/m/small/%65mbed", "/m/small/%65mbed", None),
        ("/m/%ff/embed", "/m/%ff/embed", None),
        ("/m//embed", "/", "embed"),
        ("/nothing/", "/nothing/", None),
        ("/openai/deployments/small/nothing", "/openai/deployments/small/nothing", None),
        ("/openai/health", "/openai/health", None),
        ("embed", "embed", None),
        ("*", "*", None),
    ],
)
def test_a_target_leads_to_a_route_and_a_model(target: str, route: str, model: str | None) -> None:
    assert placed(target) == (route, model)


def test_a_name_with_slashes_is_taken_as_short_as_can_be_while_models_load() -> None:
    assert placed("/m/org/model/v1/embeddings", names=()) == ("/v1/embeddings", "org/model")
    assert placed("/m/a/embed/embed", names=()) == ("/embed", "a/embed")


def test_the_prefix_of_a_proxy_goes_first() -> None:
    assert placed("/api/m/small/embed", root_path="/api") == ("/embed", "small")
    assert placed("http://host/api/embed/", root_path="/api") == ("/embed", None)
    assert placed("/embed", root_path="/api") == ("/embed", None)


def test_placing_again_changes_nothing() -> None:
    scope: dict[str, Any] = {"path": "/v1/models/small", "raw_path": b"/v1/models/small"}
    addresses = Addresses(ROUTES, lambda: NAMES)
    addresses.place(scope)
    addresses.place(scope)
    assert (scope["path"], scope[MODEL]) == (ONE_MODEL, "small")


# Several models


MODELS: Final = (
    LetterModel(),
    LetterModel(replace(EMBEDDER, name="org/many")),
    LetterModel(replace(CLASSIFIER, name="labels")),
    LetterModel(replace(CROSS_ENCODER, name="ranks")),
)


@asynccontextmanager
async def several(*models: LetterModel) -> AsyncIterator[httpx.AsyncClient]:
    async with serving_in_memory(*(models or MODELS), api_keys=("key",)) as served:
        headers = {"authorization": "Bearer key"}
        async with served.client(served.behind_front_door, headers=headers) as client:
            yield client


several_models = pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning")  # the client's, on trio


@pytest.mark.anyio
@several_models
async def test_a_request_without_a_model_goes_to_the_one_that_was_made_for_it() -> None:
    async with several() as client:
        ranking = await client.post("/v1/rerank", json={"query": "a", "documents": ["b", "a"]})
        scores = await client.post("/score", json={"queries": "a", "documents": ["b", "a"]})
        labels = await client.post("/classify", json={"input": "abc"})
        predicted = await client.post("/predict", json={"inputs": "abc"})
        sparse = await client.post("/embed_sparse", json={"inputs": "abc"})
        tokens = await client.post("/pooling", json={"input": "abc", "task": "token_embed"})
        invoked = await client.post("/invocations", json={"input": "abc", "task": "classify", "model": "labels"})
        pooled = await client.post("/pooling", json={"input": "abc", "task": "classify"})
        again = await client.post("/invocations", json={"input": "abc", "task": "classify"})
        unknown = await client.post("/pooling", json={"input": "abc", "task": ["embed", "sing"]})
        both = await client.post("/pooling", json={"input": "abc", "task": ["embed", "classify"]})
    assert [pooled.json()["model"], again.json()["model"]] == ["labels", "labels"]
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "task")
    assert "'sing' Supported tasks: ('embed'," in unknown.json()["error"]["message"]
    assert (both.status_code, "labels (classify)" in both.text) == (404, True)
    assert [ranking.json()["model"], scores.json()["model"], labels.json()["model"]] == ["ranks", "ranks", "labels"]
    assert {entry["label"] for entry in predicted.json()} == {"a", "b", "c"}
    assert sparse.status_code == 200
    assert (tokens.json()["model"], invoked.json()["model"]) == ("org/many", "labels")


@pytest.mark.anyio
@several_models
async def test_a_path_names_the_model_for_clients_that_cannot() -> None:
    async with several() as client:
        for prefix, name in (("/m/org/many", "org/many"), ("/m/org%2Fmany", "org/many"), ("/m/letters", "letters")):
            vectors = await client.post(f"{prefix}/v1/embeddings", json={"input": "abc", "model": "gpt"})
            info = (await client.get(f"{prefix}/info")).json()
            listed = (await client.get(f"{prefix}/v1/models")).json()["data"]
            ready = (await client.get(f"{prefix}/ready")).json()["models"]
            assert vectors.json()["model"] == info["model_id"] == name
            assert [each["id"] for each in listed] == [each["name"] for each in ready] == [name]
            assert (await client.post(f"{prefix}/embed", json={"inputs": "abc"})).status_code == 200
            assert (await client.get(f"{prefix}/health")).status_code == 200
        cannot = await client.post("/m/letters/predict", json={"inputs": "abc"})
        other = await client.post("/m/letters/v1/embeddings", json={"input": "abc", "model": "labels"})
        azure = await client.post("/openai/deployments/letters/embeddings?api-version=1", json={"input": "a"})
        twice = await client.post("/m/letters/openai/deployments/letters/embeddings", json={"input": "a"})
        at_odds = await client.post("/m/letters/openai/deployments/labels/embeddings", json={"input": "a"})
    assert (cannot.status_code, cannot.json()["error_type"]) == (501, "Backend")
    assert "`letters` gives no labels" in cannot.json()["error"]
    assert other.status_code == 400
    assert azure.json()["model"] == twice.json()["model"] == "letters"
    assert at_odds.status_code == 404


@pytest.mark.anyio
@several_models
@pytest.mark.parametrize("outputs", [*((output,) for output in Output if output != Output.LABELS), BGE_M3])
async def test_a_rejection_says_what_a_model_of_each_kind_can_do(outputs: tuple[Output, ...]) -> None:
    async with several(LetterModel(replace(CARD, outputs=outputs, scoring=None))) as client:
        rejected = await client.post("/predict", json={"inputs": "a"})
    told = ", ".join(dict.fromkeys(POOLING_TASKS[output] for output in outputs))
    assert rejected.status_code == 404
    assert rejected.json()["error"] == f"No served model gives labels; served: letters ({told})"


@pytest.mark.anyio
@several_models
async def test_what_ollama_has_and_a_pooling_server_has_not_is_told_in_its_words() -> None:
    async with several(LetterModel()) as client:
        missing = await client.post("/api/chat", json={"model": "letters"})
    assert missing.status_code == 404
    assert missing.json() == {
        "error": "There is no route POST /api/chat. GET /openapi.json lists the routes.",
    }


@pytest.mark.anyio
@several_models
@pytest.mark.parametrize("path", ["/embed", "/health", "/ready", "/info", "/v1/embeddings", "/flush_cache", "/"])
async def test_a_path_of_a_model_that_is_not_there_is_404_and_lists_those_that_are(path: str) -> None:
    async with several() as client:
        method = "GET" if path in ("/health", "/ready", "/info", "/") else "POST"
        response = await client.request(method, f"/m/nobody{path}", json={"inputs": "a"} if method == "POST" else None)
    assert response.status_code == 404
    assert "`nobody` does not exist. Served: letters, org/many, labels, ranks" in response.text


@pytest.mark.anyio
@several_models
async def test_one_model_is_told_by_its_name() -> None:
    async with several() as client:
        listed = {each["id"]: each for each in (await client.get("/v1/models")).json()["data"]}
        for path, name in (("/v1/models/org/many", "org/many"), ("/models/org%2Fmany", "org/many")):
            assert (await client.get(path)).json() == listed[name]
        missing = await client.get("/v1/models/nobody")
        head = await client.head("/v1/models/labels")
        wrong = await client.post("/v1/models/labels")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
    assert (head.status_code, wrong.status_code) == (200, 405)


@pytest.mark.anyio
@several_models
async def test_clients_of_azure_send_the_key_in_a_header_of_its_own() -> None:
    async with several(LetterModel()) as client:
        del client.headers["authorization"]
        path = "/openai/deployments/letters/embeddings"
        right = await client.post(path, json={"input": "a"}, headers={"api-key": "key"})
        wrong = await client.post(path, json={"input": "a"}, headers={"api-key": "no"})
        both = await client.post(path, json={"input": "a"}, headers={"api-key": "key", "authorization": "Bearer no"})
        without = await client.post(path, json={"input": "a"})
        probes = [(await client.get(path)).status_code for path in ("/m/letters/health", "/health/", "/ready/")]
    assert [each.status_code for each in (right, wrong, both, without)] == [200, 401, 401, 401]
    assert probes == [200, 200, 200]


# Every way of HTTP

WAYS: Final = ("fast", "general", "http2")
BODY: Final = json.dumps({"input": "abc"}).encode()


async def ask(served: Served, way: str, method: str, target: str, body: bytes = b"", *headers: str) -> httpx.Response:
    """The answer to a request that goes the way through the server."""
    given = dict(header.split(": ", 1) for header in headers)
    kind = {"content-type": "application/json"} if body else {}
    if way == "general":
        kind["upgrade"] = "nothing"  # is not for the fast path
    http2 = way == "http2"
    async with httpx.AsyncClient(http1=not http2, http2=http2, timeout=30, verify=False) as client:
        url = f"http://127.0.0.1:{served.port}{target}"
        return await client.request(method, url, content=body or None, headers=kind | given)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    param: str = request.param
    return param


@pytest.mark.anyio
@several_models
async def test_every_way_of_http_answers_alike(way: str) -> None:
    async with serving() as served:
        for target in ("/v1/embeddings/", "//v1/embeddings", "/m/letters/v1/embeddings", "/openai/v1/embeddings"):
            found = await ask(served, way, "POST", target, BODY)
            assert (found.status_code, found.json()["model"]) == (200, "letters"), target
        wrong = await ask(served, way, "GET", "/v1/embeddings")
        missing = await ask(served, way, "POST", "/v1/embedings", BODY)
        unknown = await ask(served, way, "POST", "/m/nobody/embed", b'{"inputs":"a"}')
        unable = await ask(served, way, "POST", "/predict", b'{"inputs":"a"}')
        cohere = await ask(served, way, "GET", "/v2/embed")
        marked = await ask(served, way, "POST", "/v1/embeddings", b"\xef\xbb\xbf" + BODY)
        text = await ask(served, way, "POST", "/v1/embeddings", BODY, "content-type: text/plain")
        charset = await ask(
            served, way, "POST", "/v1/embeddings", BODY, "content-type: application/json; charset=UTF-8"
        )
        packed = await ask(served, way, "POST", "/v1/embeddings", BODY, "content-encoding: br")
        zipped = await ask(served, way, "POST", "/v1/embeddings", gzip.compress(BODY), "content-encoding: gzip")
        head = await ask(served, way, "HEAD", "/v1/models")
        options = await ask(served, way, "OPTIONS", "/v1/embeddings")
        alive = [(await ask(served, way, "GET", path)).status_code for path in ("/health/", "/m/letters/health")]
        dead = await ask(served, way, "GET", "/m/nobody/health")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["message"] == "/v1/embeddings does not support GET; it supports: POST"
    assert (missing.status_code, missing.json()["detail"]) == (404, "Not Found")
    assert "Did you mean /v1/embeddings" in missing.json()["error"]["message"]
    assert unknown.json() == {"error": "The model `nobody` does not exist. Served: letters", "error_type": "Validation"}
    assert (unable.status_code, unable.json()["error_type"]) == (404, "Validation")
    assert unable.json()["error"].startswith("No served model gives labels; served: letters (embed")
    assert cohere.json()["message"] == cohere.json()["error"]["message"]
    assert (marked.status_code, charset.status_code) == (200, 200)
    assert (text.status_code, packed.status_code, zipped.status_code) == (415, 415, 200)
    assert packed.headers["accept-encoding"] == "gzip, deflate"
    assert zipped.json()["data"] == marked.json()["data"]
    assert "application/json" in text.json()["error"]["message"]
    assert (head.status_code, head.content) == (200, b"")
    assert (options.status_code, options.headers["allow"], options.content) == (204, "POST", b"")
    assert (alive, dead.status_code) == ([200, 200], 404)


@pytest.mark.anyio
async def test_a_target_in_absolute_form_is_understood() -> None:
    request = post(BODY, "connection: close", path="http://other.example/v1/embeddings")
    star = b"OPTIONS * HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    async with serving() as served:
        found = await served.talk(request)
        options = await served.talk(star)
    assert found.startswith(b"HTTP/1.1 200")
    assert options.startswith(b"HTTP/1.1 204")
    assert b"allow: GET, HEAD, POST" in options


@pytest.mark.anyio
async def test_a_client_of_http_10_keeps_its_connection_if_it_asks() -> None:
    """As `ab -k` does."""
    lines = b"POST /v1/embeddings HTTP/1.0\r\nContent-type: application/json\r\nContent-length: %d\r\n" % len(BODY)
    kept = lines + b"Connection: Keep-Alive\r\nHost: a\r\n\r\n" + BODY
    async with serving() as served:
        async with await served.connect() as stream:
            for _ in range(3):
                await stream.send(kept)
                answer = await read_answer(stream)
                assert answer.startswith(b"HTTP/1.1 200")
                assert b"connection: keep-alive" in answer.lower()
            await stream.send(lines + b"\r\n" + BODY)
            answer = await read_answer(stream)
            assert b"connection: close" in answer.lower()
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
        health = b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
        async with await served.connect() as stream:
            for _ in range(2):
                await stream.send(health)
                assert b"connection: keep-alive" in (await read_answer(stream)).lower()
        lines_wanted = kept.replace(b"Host: a", b"Accept: application/x-ndjson\r\nHost: a")
        streamed = await served.talk(lines_wanted)
    assert b"transfer-encoding" not in streamed.lower()
    assert b"connection: close" in streamed.lower()
    assert streamed.rstrip().endswith(b"}")


@pytest.mark.anyio
async def test_a_client_that_asks_whether_to_go_on_is_told() -> None:
    head = post(BODY, "expect: 100-continue", "connection: close")[: -len(BODY)]
    async with serving() as served, await served.connect() as stream:
        await stream.send(head)
        assert (await stream.receive()).startswith(b"HTTP/1.1 100")
        await stream.send(BODY)
        assert (await read_answer(stream)).startswith(b"HTTP/1.1 200")
