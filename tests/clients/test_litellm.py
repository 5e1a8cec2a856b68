"""LiteLLM, as each of the providers that it can ask here. It has an environment of its own, see the Makefile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from numpy.testing import assert_allclose

from tests.clients.conftest import KEY, QUERY, TEXTS, WITHIN, Oracle, client_package

VECTORS: dict[str, str] = {
    "openai": "/v1",
    "hosted_vllm": "/v1",
    "infinity": "",
    "jina_ai": "/v1",
    "voyage": "/v1",
    "nvidia_nim": "/v1",
    "ollama": "",
    "cohere": "/v2/embed",
    "huggingface": "/m/embedder",  # its requests name no model
}
"""The part of `api_base` behind the server's address, by provider."""
RANKINGS: dict[str, str] = {
    "cohere": "/v2/rerank",
    "hosted_vllm": "",
    "infinity": "",
    "jina_ai": "/v1/rerank",
    "voyage": "",
    "huggingface": "",
    "nvidia_nim/ranking": "",
}


@pytest.mark.parametrize("provider", VECTORS)
def test_vectors(server: Oracle, provider: str) -> None:
    litellm = client_package("litellm", of_the_extra=False)
    base = server.url + VECTORS[provider]
    asked: dict[str, Any] = {"model": f"{provider}/embedder", "input": TEXTS, "api_key": KEY, "api_base": base}
    if provider == "huggingface":
        asked["input_type"] = "feature-extraction"  # else it asks the hub what the model is for
    if provider == "ollama":
        asked["extra_headers"] = {"Authorization": f"Bearer {KEY}"}
    wanted = server("embedder", "embed", TEXTS).embeddings
    for found in (litellm.embedding(**asked), asyncio.run(litellm.aembedding(**asked))):
        assert_allclose([one["embedding"] for one in found.data], wanted, atol=WITHIN)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "infinity", "voyage", "nvidia_nim"])
def test_purposes(server: Oracle, provider: str) -> None:
    """`input_type` names a prompt where the model has any; else it changes nothing."""
    litellm = client_package("litellm", of_the_extra=False)
    for model, prompt in (("embedder", None), ("prompted", "query")):
        asked = {"input": TEXTS, "api_key": KEY, "api_base": server.url + VECTORS[provider], "input_type": "query"}
        found = litellm.embedding(model=f"{provider}/{model}", **asked)
        wanted = server(model, "embed", TEXTS, prompt_name=prompt).embeddings
        assert_allclose([one["embedding"] for one in found.data], wanted, atol=WITHIN)


@pytest.mark.parametrize("provider", RANKINGS)
def test_rankings(server: Oracle, provider: str) -> None:
    litellm = client_package("litellm", of_the_extra=False)
    # Documents of infinity are texts; here they are the objects that vLLM's clients want, who ask in the same way.
    options = {"return_documents": False} if provider == "infinity" else {}
    found = litellm.rerank(
        model=f"{provider}/ranker",
        query=QUERY,
        documents=TEXTS,
        api_key=KEY,
        api_base=server.url + RANKINGS[provider],
        top_n=3,
        **options,
    )
    activate = provider != "nvidia_nim/ranking"
    top_n = None if provider == "huggingface" else 3  # text-embeddings-inference ranks all of them
    wanted = server("ranker", "rerank", QUERY, TEXTS, top_n=top_n, activate=activate).ranking
    assert [one["index"] for one in found.results] == [one.index for one in wanted]
    assert_allclose([one["relevance_score"] for one in found.results], [one.score for one in wanted], atol=WITHIN)
