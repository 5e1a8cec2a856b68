"""Errors in the words of text-embeddings-inference, on its routes."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest

from staged_pool.api import status
from staged_pool.api.status import Problem
from staged_pool.api.wire.dialects.tei_tokens import tei_error
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages import errors
from tests.servers.byte_client import post
from tests.servers.in_memory import InMemory, serving_in_memory
from tests.servers.on_socket import serving
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]

TYPES = {"Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"}

CASES: list[tuple[type[BaseException], int, str]] = [
    (errors.InvalidInput, 422, "Validation"),
    (errors.UrlNotAllowed, 422, "Validation"),
    (errors.NoInputs, 400, "Empty"),
    (errors.TooLarge, 413, "Validation"),
    (errors.UnusableMedia, 422, "Validation"),
    (errors.UnsupportedMedia, 415, "Validation"),
    (errors.ModelFailed, 424, "Backend"),
    (errors.Overloaded, 429, "Overloaded"),
    (errors.StageFailed, 500, "Backend"),
    (errors.Unsupported, 501, "Backend"),
    (errors.EngineStopped, 503, "Unhealthy"),
    (errors.DeviceLost, 503, "Unhealthy"),
    (errors.DeadlineExceeded, 504, "Backend"),
]


@pytest.mark.parametrize(("cls", "wanted", "kind"), CASES)
def test_every_error_has_a_word_of_theirs(cls: type[BaseException], wanted: int, kind: str) -> None:
    code, body = tei_error(Problem(kind=status.TABLE[cls], message="m"))
    assert (code, body) == (wanted, b'{"error":"m","error_type":"%s"}' % kind.encode())


def test_every_kind_of_error_has_one() -> None:
    kinds = [*status.TABLE.values(), status.UNEXPECTED, status.SLOW_BODY, status.BODY_TOO_LARGE, status.BAD_FRAMING]
    for kind in kinds:
        _, body = tei_error(Problem(kind=kind, message="m"))
        assert body.split(b'"error_type":"')[1][:-2].decode() in TYPES


async def ask(served: InMemory, path: str, body: Any, **headers: str) -> httpx.Response:
    async with served.client() as client:
        return await client.post(path, json=body, headers={name.replace("_", "-"): v for name, v in headers.items()})


async def test_a_model_that_fails_on_an_input_is_a_backend_error() -> None:
    async with serving_in_memory() as served:
        response = await ask(served, "/embed", {"inputs": ["a", "NaN"]})
    assert (response.status_code, response.json()["error_type"]) == (424, "Backend")


async def test_a_server_that_loads_is_unhealthy_and_one_that_is_full_overloaded() -> None:
    gate = Gate()
    loading = await ask(InMemory(), "/embed", {"inputs": "a"})
    async with serving_in_memory(LetterModel(on_preprocess=gate), engine=EngineConfig(max_requests=1)) as served:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(served.engine.embed, "a")
            await gate.arrived()
            full = await ask(served, "/embed", {"inputs": "a"})
            other = await ask(served, "/v1/embeddings", {"input": "a"})
            gate.open()
    assert (loading.status_code, loading.json()["error_type"]) == (503, "Unhealthy")
    assert (full.status_code, full.json()["error_type"]) == (429, "Overloaded")
    assert "retry-after" in full.headers
    assert "retry-after" in loading.headers
    assert other.json()["error"]["type"] == "RateLimitError"


async def test_a_deadline_that_passes_is_504_in_both_shapes() -> None:
    gate = Gate()
    async with serving_in_memory(LetterModel(on_forward=gate)) as served:
        theirs = await ask(served, "/embed", {"inputs": "a"}, x_request_timeout="0.1")
        ours = await ask(served, "/v2/embed", {"texts": ["a"]}, x_request_timeout="0.1")
        gate.open()
    assert (theirs.status_code, set(theirs.json())) == (504, {"error", "error_type"})
    assert (ours.status_code, ours.json()["error"]["type"]) == (504, "TimeoutError")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", b'{"inputs":"a"}'),
        ("/embeddings", b'{"input":"a"}'),
        ("/invocations", b'{"input":"a"}'),
        ("/v1/score", b'{"queries":"a","documents":"b"}'),
        ("/v2/embed", b'{"texts":["a"]}'),
    ],
)
async def test_a_client_of_any_route_who_leaves_frees_its_room(path: str, body: bytes) -> None:
    gate = Gate()
    async with serving(LetterModel(on_preprocess=gate)) as served:
        async with await served.connect() as stream:
            await stream.send(post(body, path=path))
            await gate.arrived()
            assert served.in_flight == 1
        await until(lambda: served.in_flight == 0)
        gate.open()
        async with served.client() as client:
            assert (await client.get("/load")).json()["server_load"] == 0
        await served.assert_alive()


@pytest.mark.parametrize("path", ["/embed", "/predict", "/v1/embeddings"])
async def test_a_body_that_is_too_large_is_told_in_the_words_of_the_route(path: str) -> None:
    async with serving(body_limit_bytes=1000) as served:
        async with served.client() as client:
            response = await client.post(path, json={"inputs": "a" * 2000})
    assert response.status_code == 413
    shape = {"error", "detail", "message"} if path == "/v1/embeddings" else {"error", "error_type"}
    assert set(response.json()) == shape
