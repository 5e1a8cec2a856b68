"""Not in the extra: it wants older versions of what the models are loaded with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from numpy.testing import assert_allclose

from tests.clients.conftest import KEY, QUERY, TEXTS, WITHIN, Oracle, client_package


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_vectors(server: Oracle, provider: str) -> None:
    litellm = client_package("litellm", of_the_extra=False)
    asked: dict[str, Any] = {"model": f"{provider}/embedder", "input": TEXTS, "api_key": KEY}
    wanted = server("embedder", "embed", TEXTS).embeddings
    for found in (
        litellm.embedding(**asked, api_base=f"{server.url}/v1"),
        asyncio.run(litellm.aembedding(**asked, api_base=f"{server.url}/v1")),
    ):
        assert_allclose([one["embedding"] for one in found.data], wanted, atol=WITHIN)


@pytest.mark.parametrize("provider", ["cohere", "hosted_vllm", "infinity", "jina_ai"])
def test_rankings(server: Oracle, provider: str) -> None:
    litellm = client_package("litellm", of_the_extra=False)
    # Documents of infinity are texts; here they are the objects that all others want, on the path that they share.
    options = {"return_documents": False} if provider == "infinity" else {}
    base = {"cohere": "/v2/rerank", "jina_ai": "/v1/rerank"}.get(provider, "")
    found = litellm.rerank(
        model=f"{provider}/ranker",
        query=QUERY,
        documents=TEXTS,
        api_key=KEY,
        api_base=f"{server.url}{base}",
        top_n=3,
        **options,
    )
    wanted = server("ranker", "rerank", QUERY, TEXTS, top_n=3).ranking
    assert [one["index"] for one in found.results] == [one.index for one in wanted]
    assert_allclose([one["relevance_score"] for one in found.results], [one.score for one in wanted], atol=WITHIN)
