from __future__ import annotations

from typing import Any

import pytest
from numpy.testing import assert_allclose

from tests.clients.conftest import KEY, QUERY, TEXTS, WITHIN, Oracle, client_package


def client(server: Oracle, key: str = KEY) -> Any:
    return client_package("voyageai").Client(api_key=key, base_url=f"{server.url}/v1", max_retries=1)


@pytest.mark.parametrize("input_type", [None, "query", "document"])
def test_vectors(server: Oracle, input_type: str | None) -> None:
    found = client(server).embed(TEXTS, model="embedder", input_type=input_type)
    wanted = server("embedder", "embed", TEXTS)
    assert_allclose(found.embeddings, wanted.embeddings, atol=WITHIN)
    assert found.total_tokens == wanted.usage.prompt_tokens


def test_input_types_are_prompts_of_a_model_that_has_them(server: Oracle) -> None:
    for input_type, prompt in (("query", "query"), ("document", "passage")):
        found = client(server).embed(TEXTS, model="prompted", input_type=input_type).embeddings
        assert_allclose(found, server("prompted", "embed", TEXTS, prompt_name=prompt).embeddings, atol=WITHIN)


def test_numbers_of_other_types(server: Oracle) -> None:
    wanted = server("embedder", "embed", TEXTS).embeddings
    found = client(server).embed(TEXTS, model="embedder", output_dtype="int8").embeddings
    scales = abs(wanted).max(axis=1, keepdims=True) / 127
    assert_allclose(found * scales, wanted, atol=scales.max())


def test_rankings(server: Oracle) -> None:
    found = client(server).rerank(QUERY, TEXTS, model="ranker", top_k=3)
    wanted = server("ranker", "rerank", QUERY, TEXTS, top_n=3)
    assert [one.index for one in found.results] == [one.index for one in wanted.ranking]
    assert [one.document for one in found.results] == [TEXTS[one.index] for one in wanted.ranking]
    assert_allclose([one.relevance_score for one in found.results], [one.score for one in wanted.ranking], atol=WITHIN)
    assert found.total_tokens == wanted.usage.prompt_tokens


def test_vectors_of_inputs_with_several_parts(server: Oracle) -> None:
    found = client(server).multimodal_embed([[text] for text in TEXTS], model="embedder")
    wanted = server("embedder", "embed", TEXTS)
    assert_allclose(found.embeddings, wanted.embeddings, atol=WITHIN)
    assert (found.total_tokens, found.image_pixels) == (wanted.usage.prompt_tokens, 0)


def test_errors(server: Oracle) -> None:
    voyageai = client_package("voyageai")
    with pytest.raises(voyageai.error.InvalidRequestError, match="set truncation"):
        client(server).embed(["long " * 10_000], model="embedder", truncation=False)
    with pytest.raises(voyageai.error.AuthenticationError, match="not one of this server's"):
        client(server, "other").rerank(QUERY, TEXTS, model="ranker")
