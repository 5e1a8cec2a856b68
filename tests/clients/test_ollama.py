from __future__ import annotations

import asyncio
from typing import Any

import pytest
from numpy.testing import assert_allclose

from tests.clients.conftest import KEY, TEXTS, WITHIN, Oracle, client_package

HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("model", ["embedder", "embedder:latest"])
def test_vectors(server: Oracle, model: str) -> None:
    ollama = client_package("ollama")
    client = ollama.Client(host=server.url, headers=HEADERS)
    wanted = server("embedder", "embed", TEXTS)
    found = client.embed(model, TEXTS, truncate=True, options={"num_ctx": 64}, keep_alive="5m")
    assert_allclose(found.embeddings, wanted.embeddings, atol=WITHIN)
    assert (found.model, found.prompt_eval_count) == (model, wanted.usage.prompt_tokens)
    assert found.total_duration > 0
    assert_allclose(client.embeddings(model, TEXTS[0]).embedding, wanted.embeddings[0], atol=WITHIN)
    assert client.embed(model, "").embeddings == []

    async def embed() -> Any:
        return (await ollama.AsyncClient(host=server.url, headers=HEADERS).embed(model, TEXTS)).embeddings

    assert_allclose(asyncio.run(embed()), wanted.embeddings, atol=WITHIN)


def test_models(server: Oracle) -> None:
    ollama = client_package("ollama")
    client = ollama.Client(host=server.url, headers=HEADERS)
    listed = [model.model for model in client.list().models]
    assert "embedder:latest" in listed
    assert [model.model for model in client.ps().models] == listed
    shown = client.show("embedder")
    assert shown.capabilities == ["embedding"]
    assert shown.modelinfo[f"{shown.details.family}.embedding_length"] > 0


def test_errors(server: Oracle) -> None:
    ollama = client_package("ollama")
    client = ollama.Client(host=server.url, headers=HEADERS)
    with pytest.raises(ollama.ResponseError, match="`other` does not exist") as caught:
        client.embed("other", "a")
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="API key") as caught:
        ollama.Client(host=server.url).embed("embedder", "a")
    assert caught.value.status_code == 401


def test_vectors_by_langchain(server: Oracle) -> None:
    langchain_ollama = client_package("langchain_ollama")
    model = langchain_ollama.OllamaEmbeddings(
        model="embedder", base_url=server.url, client_kwargs={"headers": HEADERS}, validate_model_on_init=True
    )
    wanted = server("embedder", "embed", TEXTS).embeddings
    assert_allclose(model.embed_documents(TEXTS), wanted, atol=WITHIN)
    assert_allclose(model.embed_query(TEXTS[0]), wanted[0], atol=WITHIN)
