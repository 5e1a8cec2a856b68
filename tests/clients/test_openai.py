from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
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


@pytest.mark.parametrize("cut", [-1, 4])
def test_what_vllm_bench_sends_is_taken(server: Oracle, cut: int) -> None:
    """`vllm bench serve --backend openai-embeddings` and its reranker send every field of these."""
    import httpx

    with httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}) as client:
        embedded = client.post(
            "/v1/embeddings",
            json={"model": "embedder", "input": TEXTS[0], "truncate_prompt_tokens": cut},
        ).json()
        ranked = client.post(
            "/v1/rerank",
            json={"model": "ranker", "query": TEXTS[0], "documents": TEXTS[1:], "truncate_prompt_tokens": cut * 3},
        )
    wanted = server("embedder", "embed", TEXTS[0], max_tokens=MODEL_MAX if cut == -1 else cut)
    assert_allclose([embedded["data"][0]["embedding"]], wanted.embeddings, atol=WITHIN)
    assert embedded["usage"]["prompt_tokens"] == wanted.usage.prompt_tokens
    assert np.isfinite([one["relevance_score"] for one in ranked.json()["results"]]).all() or cut == -1
