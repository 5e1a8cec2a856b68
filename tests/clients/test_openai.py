from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from anyio.from_thread import start_blocking_portal
from numpy.testing import assert_allclose

from staged_pool.runtime.requests import MODEL_MAX
from tests.clients.conftest import KEY, LOOPS, TEXTS, WITHIN, Oracle, client_package
from tests.servers.on_socket import serving
from tests.servers.tiny_models import tiny_models


def rows(answer: Any) -> list[list[float]]:
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return [one.embedding for one in answer.data]


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}], ids=["base64 by default", "float"])
def test_vectors(server: Oracle, options: dict[str, Any]) -> None:
    openai = client_package("openai")
    wanted = server("embedder", "embed", TEXTS)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        found = client.embeddings.create(model="embedder", input=TEXTS, **options)
        one = client.embeddings.create(model="embedder", input=TEXTS[0], **options)
    assert_allclose(rows(found), wanted.embeddings, atol=WITHIN)
    assert_allclose(rows(one), wanted.embeddings[:1], atol=WITHIN)
    assert (found.model, found.usage.prompt_tokens) == ("embedder", wanted.usage.prompt_tokens)


def test_token_ids(server: Oracle) -> None:
    openai = client_package("openai")
    ids = [server("embedder", "tokenize", text, add_special_tokens=False).ids for text in TEXTS]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        found = client.embeddings.create(model="embedder", input=ids)
        one = client.embeddings.create(model="embedder", input=ids[0])
    wanted = server("embedder", "embed", ids).embeddings
    assert_allclose(rows(found), wanted, atol=WITHIN)
    assert_allclose(rows(one), wanted[:1], atol=WITHIN)


@pytest.mark.parametrize("run", [asyncio.run, lambda main: trio.run(lambda: main)], ids=["asyncio", "trio"])
def test_vectors_by_the_async_client(server: Oracle, run: Any) -> None:
    openai = client_package("openai")

    async def embed() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            return await client.embeddings.create(model="embedder", input=TEXTS)

    assert_allclose(rows(run(embed())), server("embedder", "embed", TEXTS).embeddings, atol=WITHIN)


def test_models_and_errors(server: Oracle) -> None:
    openai = client_package("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        assert next(iter(client.models.list())).id == "embedder"
        with pytest.raises(openai.BadRequestError, match="at least one"):
            client.embeddings.create(model="embedder", input=[])
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.embeddings.create(model="another", input="a")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            client.embeddings.create(model="embedder", input="a")


def test_what_vllms_benchmark_sends_is_taken(server: Oracle) -> None:
    """Every payload of the pooling backends of `vllm bench serve`: texts are cut at what the model takes."""
    httpx = client_package("httpx", of_the_extra=False)
    long = "A function call with many arguments and one more. " * 60
    cut = {"truncate_prompt_tokens": -1}
    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}) as client:

        def usage(path: str, body: dict[str, Any]) -> Any:
            answer = client.post(path, json=body).raise_for_status()
            body = json.loads(answer.headers["metadata"]) if "metadata" in answer.headers else answer.json()
            return body["usage"]["prompt_tokens"]

        wanted = server("embedder", "embed", long, max_tokens=MODEL_MAX).usage.prompt_tokens
        for how in ({}, {"encoding_format": "base64"}, {"encoding_format": "bytes"}):
            assert usage("/v1/embeddings", {"model": "embedder", "input": long, **cut, **how}) == wanted
            assert usage("/v1/embeddings", {"model": "embedder", "input": [long] * 2, **cut, **how}) == 2 * wanted
        assert usage("/embeddings", {"model": "embedder", "input": TEXTS[0]}) > 0  # Infinity's
        assert usage("/pooling", {"model": "embedder", "input": long, **cut}) == wanted
        wanted = server("ranker", "score", long, TEXTS, max_tokens=MODEL_MAX).usage.prompt_tokens
        assert usage("/rerank", {"model": "ranker", "query": long, "documents": TEXTS, **cut}) == wanted


def test_files_and_batches(batch_server: Oracle) -> None:
    openai = client_package("openai")
    lines = [
        {
            "custom_id": str(place),
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "embedder", "input": text},
        }
        for place, text in enumerate([*TEXTS, []])
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    with openai.OpenAI(base_url=f"{batch_server.url}/v1", api_key=KEY, max_retries=0) as client:
        expires_after = {"anchor": "created_at", "seconds": 3600}
        file = client.files.create(purpose="batch", file=("lines.jsonl", content), expires_after=expires_after)
        assert (file.bytes, file.filename, file.expires_at) == (len(content), "lines.jsonl", file.created_at + 3600)
        assert client.files.retrieve(file.id) == file
        assert client.files.content(file.id).content == content
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h", metadata={"for": "a test"}
        )
        assert (batch.status, batch.metadata) == ("validating", {"for": "a test"})
        other = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        assert client.batches.cancel(other.id).status in ("cancelling", "cancelled")
        while (batch := client.batches.retrieve(batch.id)).status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing")
            time.sleep(0.01)
        while (other := client.batches.retrieve(other.id)).status != "cancelled":
            time.sleep(0.01)
        assert [each.id for each in client.batches.list(limit=1)] == [other.id, batch.id]  # two pages
        assert batch.request_counts.model_dump() == {"total": 5, "completed": 4, "failed": 1}
        answers = {line["custom_id"]: line for line in parsed(client.files.content(batch.output_file_id).text)}
        wanted = batch_server("embedder", "embed", TEXTS).embeddings
        for place, vector in enumerate(wanted):
            body = answers[str(place)]["response"]["body"]
            assert_allclose(body["data"][0]["embedding"], vector, atol=WITHIN)
        (failed,) = parsed(client.files.content(batch.error_file_id).text)
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("4", 400)
        assert {each.purpose for each in client.files.list(limit=1)} == {"batch", "batch_output"}
        assert client.files.delete(batch.output_file_id).deleted
        with pytest.raises(openai.NotFoundError, match="no file with this id"):
            client.files.content(batch.output_file_id)
        with pytest.raises(openai.BadRequestError, match="purpose: expected batch"):
            client.files.create(purpose="fine-tune", file=("a", b"a"))


def parsed(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(params=LOOPS)
def batch_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Oracle]:
    backend, options = request.param
    with start_blocking_portal(backend, options) as portal:
        opened = serving(*tiny_models("embedder"), api_keys=(KEY,), batch_dir=tmp_path)
        with portal.wrap_async_context_manager(opened) as served:
            yield Oracle(served, portal.call)
