"""Requests before a load: each reason not to begin is said with its next step."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.abc
import numpy as np
import pytest

from staged_pool.api.bench.address import Address
from staged_pool.api.bench.probe import Probe
from staged_pool.api.bench.sizes import Kind
from staged_pool.api.bench.texts import TokenRate
from staged_pool.api.bench.workload import Inputs, MixedMaker, Target
from staged_pool.stages.errors import ConfigError
from tests.api.bench.fake_server import CLOSE, Answering, Asked, FakeServer, answer, fake_server, routes

pytestmark = pytest.mark.anyio

MODELS = answer(200, {"object": "list", "data": [{"id": "first"}, {"id": "second"}]})
ONE_MODEL = answer(200, {"data": [{"id": "only"}]})
EMBEDDED = answer(200, {"data": [], "usage": {"prompt_tokens": 3, "total_tokens": 3}})


async def probed(server: FakeServer, kind: Kind = "texts", timeout_s: float = 20.0, **target: Any) -> Probe:
    """Send all requests before a load."""
    address = Address.of(server.url)
    probe = Probe(address, Target(authority=address.authority, **target), timeout_s)
    try:
        await probe.find_model()
        await probe.calibrate(kind)
        make = MixedMaker(
            probe.findings.target, Inputs(mix={kind: 1.0}), probe.findings.rates, np.random.default_rng(1)
        )
        await probe.try_request(make, kind)
    finally:
        await probe.close()
    return probe


async def error_of(answering: Answering, **target: Any) -> str:
    async with fake_server(answering) as server:
        with pytest.raises(ConfigError) as caught:
            await probed(server, **target)
        return str(caught.value).replace(server.url, "URL")


async def test_the_only_model_of_a_server_is_named_by_the_requests() -> None:
    async with fake_server(routes(v1_models=ONE_MODEL, v1_embeddings=EMBEDDED)) as server:
        probe = await probed(server)
    assert probe.findings.target.model == "only"
    assert [asked.json["model"] for asked in server.asked if asked.path == "/v1/embeddings"] == ["only"] * 3
    assert probe.findings.statuses == {"/v1/models": {"200": 1}, "/v1/embeddings": {"200": 3}}
    assert server.connections == 1


@pytest.mark.parametrize(
    "models",
    [
        MODELS,
        answer(404),
        answer(200, []),
        answer(200, {"data": "x"}),
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx",
    ],
    ids=["two", "no-route", "list", "text", "no-json"],
)
async def test_without_one_model_requests_name_none(models: bytes) -> None:
    async with fake_server(routes(v1_models=models, v1_embeddings=EMBEDDED)) as server:
        probe = await probed(server)
    assert probe.findings.target.model is None
    assert "model" not in server.asked[-1].json


async def test_a_named_model_is_sent_as_named() -> None:
    async with fake_server(routes(v1_models=MODELS, v1_embeddings=EMBEDDED)) as server:
        await probed(server, model="second")
    assert server.asked[-1].json["model"] == "second"


async def test_a_wrong_model_is_told_with_those_served() -> None:
    said = await error_of(routes(v1_models=MODELS), model="third")
    assert said == "model='third': URL does not serve it; it serves first, second"


@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_that_is_missing_or_wrong_is_told_with_how_to_give_it(status: int) -> None:
    how = "give it by --api-key or the variable STAGED_POOL_API_KEY"
    missing, wrong = f"URL asks for an API key ({status}): {how}", f"URL does not accept the API key ({status}): {how}"
    assert await error_of(lambda _: answer(status)) == missing
    assert await error_of(lambda _: answer(status), api_key="k") == wrong
    assert await error_of(routes(v1_models=MODELS, v1_embeddings=answer(status))) == missing


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            answer(404, {"error": {"message": "no\n route."}}),
            "URL has no /v1/embeddings for the model 'first' (404: no route); it serves the models first, second: "
            "give another --model, or the route by --path or --route",
        ),
        (answer(400, {"detail": "too long"}), "does not accept such a request (400: too long): give other sizes"),
        (answer(422, {"detail": [1]}), "does not accept such a request (422): give other sizes"),
        (answer(429, {"message": "busy"}), "URL is overloaded before the load begins (429: busy): wait until"),
        (answer(503, {"error": "loading"}), "URL is not ready (503: loading): wait until it is"),
        (answer(500, [1]), "URL answers /v1/embeddings with 500: see its log"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "URL does not speak HTTP/1.1: "),
        (CLOSE, "URL does not speak HTTP/1.1: the server closed the connection without an answer"),
    ],
    ids=["404", "400", "422", "429", "503", "500", "ssh", "closed"],
)
async def test_an_answer_that_is_no_success_is_told_with_the_next_step(content: bytes, said: str) -> None:
    assert said in await error_of(routes(v1_models=MODELS, v1_embeddings=content), model="first")


async def test_a_server_that_is_not_there_is_told(free_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{free_tcp_port}"
    with pytest.raises(ConfigError) as caught:
        await probed(FakeServer(free_tcp_port))
    assert str(caught.value) == (
        f"no server answers at {url}: Connection refused; start it (`staged-pool serve`), or correct the address"
    )


async def test_a_server_that_does_not_answer_in_time_is_told() -> None:
    async def never(_: Asked) -> bytes:
        await anyio.sleep_forever()
        return b""

    async with fake_server(never) as server:
        with pytest.raises(ConfigError, match=r"gave no answer to /v1/models within 0\.05 s; see whether it is busy"):
            await probed(server, timeout_s=0.05)


async def test_plain_http_on_a_port_of_https_is_told() -> None:
    async def reject(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, reject)
        address = Address.of(f"https://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}")
        probe = Probe(address, Target(authority=address.authority), 20.0)
        with pytest.raises(ConfigError, match=r"no TLS with .*; give its authority by --ca-file, or http:// if it has"):
            await probe.find_model()
        await probe.close()
        tasks.cancel_scope.cancel()


def words_counted(per_word: int, per_text: int, field: str = "total_tokens") -> Answering:
    def answering(asked: Asked) -> bytes:
        if asked.path != "/v1/embeddings":
            return answer(404)
        text = asked.json["input"]
        return answer(200, {"usage": {field: per_word * len(text.split()) + per_text}})

    return answering


@pytest.mark.parametrize(("per_word", "per_text"), [(1, 2), (3, 0), (2, 7)])
async def test_the_tokens_of_a_word_follow_from_the_usage(per_word: int, per_text: int) -> None:
    async with fake_server(words_counted(per_word, per_text)) as server:
        probe = await probed(server)
        assert probe.findings.rates["texts"] == TokenRate(per_word, per_text, "usage")
        sent = server.asked[-1].json["input"]
    assert per_word * len(sent.split()) + per_text == pytest.approx(64, abs=per_word)


async def test_without_usage_the_tokenizer_is_asked() -> None:
    def answering(asked: Asked) -> bytes:
        if asked.path == "/tokenize":
            return answer(200, {"count": 2 * len(asked.json["prompt"].split()) + 1})
        return answer(200 if asked.path == "/v1/embeddings" else 404)

    async with fake_server(answering) as server:
        probe = await probed(server, model="m")
    assert probe.findings.rates["texts"] == TokenRate(2.0, 1.0, "/tokenize")


@pytest.mark.parametrize(
    "counted",
    [words_counted(0, 5), words_counted(1, 0, "other"), words_counted(-1, 100)],
    ids=["same", "none", "fewer"],
)
async def test_without_any_count_a_token_a_word_is_assumed(counted: Answering) -> None:
    async with fake_server(counted) as server:
        probe = await probed(server)
    assert probe.findings.rates["texts"] == TokenRate(1.0, 0.0, "assumed")


async def test_rankings_are_counted_with_their_query() -> None:
    def answering(asked: Asked) -> bytes:
        if asked.path != "/v1/rerank":
            return answer(404)
        (query, (document,)) = (asked.json["query"], asked.json["documents"][:1])
        return answer(200, {"usage": {"total_tokens": len(query.split()) + len(document.split()) + 3}, "results": []})

    async with fake_server(answering) as server:
        probe = await probed(server, "rerank")
    assert probe.findings.rates["rerank"] == TokenRate(1.0, 11.0, "usage")
