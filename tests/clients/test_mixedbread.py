from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.clients.conftest import KEY, QUERY, TEXTS, WITHIN, Oracle, client_package


def client(server: Oracle, key: str = KEY) -> Any:
    return client_package("mixedbread").Mixedbread(api_key=key, base_url=server.url, max_retries=0)


def test_vectors(server: Oracle) -> None:
    wanted = server("embedder", "embed", TEXTS)
    plain = client(server).embed(model="embedder", input=TEXTS)
    assert_allclose([one.embedding for one in plain.data], wanted.embeddings, atol=WITHIN)
    several = client(server).embed(model="embedder", input=TEXTS, normalized=True, encoding_format=["float", "ubinary"])
    assert_allclose([one.embedding.float for one in several.data], wanted.embeddings, atol=WITHIN)
    bits = [np.unpackbits(np.array(one.embedding.ubinary, np.uint8)) for one in several.data]
    assert (np.array(bits) == (wanted.embeddings >= 0)).all()
    assert (several.normalized, several.encoding_format) == (True, ["float", "ubinary"])
    assert several.usage.prompt_tokens == wanted.usage.prompt_tokens


def test_rankings(server: Oracle) -> None:
    found = client(server).rerank(model="ranker", query=QUERY, input=TEXTS, top_k=3, return_input=True)
    wanted = server("ranker", "rerank", QUERY, TEXTS, top_n=3)
    assert [one.index for one in found.data] == [one.index for one in wanted.ranking]
    assert [one.input for one in found.data] == [TEXTS[one.index] for one in wanted.ranking]
    assert_allclose([one.score for one in found.data], [one.score for one in wanted.ranking], atol=WITHIN)
    assert (found.top_k, found.return_input, found.usage.total_tokens) == (3, True, wanted.usage.prompt_tokens)


def test_documents_of_several_fields(server: Oracle) -> None:
    documents = [{"title": text, "year": 1999} for text in TEXTS]
    found = client(server).rerank(model="ranker", query=QUERY, input=documents, rank_fields=["title"])
    wanted = server("ranker", "rerank", QUERY, TEXTS).ranking
    assert [one.index for one in found.data] == [one.index for one in wanted]


def test_errors(server: Oracle) -> None:
    mixedbread = client_package("mixedbread")
    with pytest.raises(mixedbread.NotFoundError, match="`other` does not exist"):
        client(server).rerank(model="other", query=QUERY, input=TEXTS)
    with pytest.raises(mixedbread.AuthenticationError):
        client(server, "other").embed(model="embedder", input=TEXTS)
