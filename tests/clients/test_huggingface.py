"""The hub's client, as it asks a text-embeddings-inference."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
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


@pytest.mark.parametrize("path", ["/predict", "/m/classifier"])
def test_labels(server: Oracle, hub: Any, path: str) -> None:
    client = hub.InferenceClient(f"{server.url}{path}", token=KEY)
    wanted = server("classifier", "classify", TEXTS[0])
    logits = server("classifier", "classify", TEXTS[0], activate=False).scores[0]
    order = (-logits).argsort()
    for options, scores in (
        ({}, wanted.scores[0]),
        ({"function_to_apply": "none"}, logits),
        ({"function_to_apply": "sigmoid"}, 1 / (1 + np.exp(-logits))),
        ({"function_to_apply": "softmax"}, np.exp(logits) / np.exp(logits).sum()),
    ):
        for top_k in (None, 1, 2, 1000):
            found = client.text_classification(TEXTS[0], top_k=top_k, **options)
            assert [each.label for each in found] == [wanted.labels[place] for place in order[:top_k]]
            assert_allclose([each.score for each in found], scores[order[:top_k]], atol=WITHIN)


@pytest.mark.parametrize("path", ["/classify_tokens", "/m/tagger"])
def test_entities(server: Oracle, hub: Any, path: str) -> None:
    client = hub.InferenceClient(f"{server.url}{path}", token=KEY)
    for strategy in (None, "none", "simple", "first", "average", "max"):
        options = {} if strategy is None else {"aggregation_strategy": strategy}
        (wanted,) = server("tagger", "classify_tokens", TEXTS[0], aggregation=strategy or "simple").entities
        assert wanted, "the text has entities"
        found = client.token_classification(TEXTS[0], **options)
        labels = [each.entity if strategy == "none" else each.entity_group for each in found]
        assert labels == [each.label for each in wanted]
        assert [(each.start, each.end, each.word) for each in found] == [(e.start, e.end, e.text) for e in wanted]
        assert_allclose([each.score for each in found], [each.score for each in wanted], atol=WITHIN)
        left = client.token_classification(TEXTS[0], ignore_labels=["O", labels[0]], **options)
        assert len(left) == len([label for label in labels if label != labels[0]])


def test_parameters_of_entities_without_an_effect_are_named(server: Oracle, hub: Any) -> None:
    client = hub.InferenceClient(f"{server.url}/classify_tokens", token=KEY)
    with pytest.raises(hub.errors.HfHubHTTPError, match=r"parameters\.stride: is not supported"):
        client.token_classification(TEXTS[0], stride=8)
    with pytest.raises(hub.errors.HfHubHTTPError, match=r"parameters\.ignore_labels: expected `O`"):
        client.token_classification(TEXTS[0], ignore_labels=[])
