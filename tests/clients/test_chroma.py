"""Embedding functions of chromadb that take a base URL."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from numpy.testing import assert_allclose

from tests.clients.conftest import KEY, TEXTS, WITHIN, Oracle, client_package


@pytest.mark.parametrize("path", ["", "/", "/embed"])
def test_text_embeddings_inference(server: Oracle, path: str) -> None:
    functions = client_package("chromadb.utils.embedding_functions")
    function = functions.HuggingFaceEmbeddingServer(url=f"{server.url}/m/embedder{path}", api_key=KEY)
    assert_allclose(function(TEXTS), server("embedder", "embed", TEXTS).embeddings, atol=WITHIN)


def test_openai(server: Oracle) -> None:
    functions = client_package("chromadb.utils.embedding_functions")
    function = functions.OpenAIEmbeddingFunction(api_key=KEY, api_base=f"{server.url}/v1", model_name="embedder")
    assert_allclose(function(TEXTS), server("embedder", "embed", TEXTS).embeddings, atol=WITHIN)


def test_cohere(server: Oracle) -> None:
    """In a process of its own: Cohere's package reads its base URL as it is imported."""
    client_package("chromadb.utils.embedding_functions")
    asked = (
        "import json, sys; from chromadb.utils.embedding_functions import CohereEmbeddingFunction; "
        "found = CohereEmbeddingFunction(api_key=sys.argv[1], model_name='embedder')(sys.argv[2:]); "
        "print(json.dumps([vector.tolist() for vector in found]))"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", asked, KEY, *TEXTS],
        env={**os.environ, "CO_API_URL": server.url},
        stdout=subprocess.PIPE,
        timeout=100,
        check=True,
    )
    assert_allclose(json.loads(run.stdout), server("embedder", "embed", TEXTS).embeddings, atol=WITHIN)


def test_ollama(server: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = client_package("chromadb.utils.embedding_functions")
    monkeypatch.setenv("OLLAMA_API_KEY", KEY)  # which Ollama's client sends
    function = functions.OllamaEmbeddingFunction(url=server.url, model_name="embedder")
    assert_allclose(function(TEXTS), server("embedder", "embed", TEXTS).embeddings, atol=WITHIN)
