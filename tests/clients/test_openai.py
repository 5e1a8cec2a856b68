from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import trio
from numpy.testing import assert_allclose

from staged_pool.runtime.requests import MODEL_MAX
from tests.clients.conftest import KEY, TEXTS, WITHIN, Oracle, client_package


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
