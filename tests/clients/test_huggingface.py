"""The hub's client, as it asks a text-embeddings-inference."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from numpy.testing import assert_allclose

from tests.clients.conftest import KEY, TEXTS, WITHIN, Oracle, client_package


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Offline, as the other tests have it, it would not even ask this machine."""
    hub = client_package("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub.close_session()
    yield hub
    hub.close_session()


def test_vectors(server: Oracle, hub: Any) -> None:
    wanted = server("embedder", "embed", TEXTS).embeddings
    client = hub.InferenceClient(f"{server.url}/m/embedder/embed", token=KEY)
    assert_allclose(client.feature_extraction(TEXTS[0]), wanted[:1], atol=WITHIN)
    assert_allclose(client.feature_extraction(TEXTS, normalize=True, truncate=True), wanted, atol=WITHIN)

    async def embed() -> Any:
        async with hub.AsyncInferenceClient(f"{server.url}/m/embedder/embed", token=KEY) as client:
            return await client.feature_extraction(TEXTS)

    assert_allclose(asyncio.run(embed()), wanted, atol=WITHIN)


def test_the_root(server: Oracle, hub: Any) -> None:
    """Without a route, the model and the fields select the task."""
    client = hub.InferenceClient(f"{server.url}/m/embedder", token=KEY)
    assert_allclose(client.feature_extraction(TEXTS), server("embedder", "embed", TEXTS).embeddings, atol=WITHIN)
    found = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS)
    assert_allclose(found, server("embedder", "score", TEXTS[0], TEXTS).scores, atol=WITHIN)


def test_similarities(server: Oracle, hub: Any) -> None:
    client = hub.InferenceClient(f"{server.url}/m/embedder/similarity", token=KEY)
    found = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS)
    assert_allclose(found, server("embedder", "score", TEXTS[0], TEXTS).scores, atol=WITHIN)


def test_labels(server: Oracle, hub: Any) -> None:
    """For one text the client returns the first of what text-embeddings-inference answers: the best label."""
    client = hub.InferenceClient(f"{server.url}/predict", token=KEY)
    found = client.text_classification(TEXTS[0])
    wanted = server("classifier", "classify", TEXTS[0])
    best = int(wanted.scores[0].argmax())
    assert found.label == wanted.labels[best]
    assert_allclose(found.score, wanted.scores[0][best], atol=WITHIN)
