"""Infinity's own client. Its package wants an older httpx, which it does not need: it is installed without asking."""

from __future__ import annotations

from typing import Any

from numpy.testing import assert_allclose

from tests.clients.conftest import KEY, QUERY, TEXTS, WITHIN, Oracle, client_package

LONG = "long " * 10_000


def asking(server: Oracle, route: str, body: str | None = None, **fields: Any) -> Any:
    """Return its client's reading of a route's answer to a body of this type."""
    infinity = client_package("infinity_client")
    client = infinity.AuthenticatedClient(base_url=server.url, token=KEY, raise_on_unexpected_status=True)
    route_of = client_package(f"infinity_client.api.default.{route}")
    if body is None:
        return route_of.sync(client=client)
    return route_of.sync(client=client, body=getattr(client_package("infinity_client.models"), body)(**fields))


def test_vectors(server: Oracle) -> None:
    wanted = server("embedder", "embed", TEXTS)
    found = asking(server, "embeddings", "OpenAIEmbeddingInputText", input_=TEXTS, model="embedder")
    assert_allclose([one.embedding for one in found.data], wanted.embeddings, atol=WITHIN)
    assert found.usage.prompt_tokens == wanted.usage.prompt_tokens
    cut = asking(server, "embeddings", "OpenAIEmbeddingInputText", input_=[LONG], model="embedder")
    assert_allclose(cut.data[0].embedding, server("embedder", "embed", LONG, max_tokens=-1).embeddings[0], atol=WITHIN)


def test_rankings(server: Oracle) -> None:
    asked = {"query": QUERY, "documents": TEXTS, "model": "ranker", "top_n": 3}
    wanted = server("ranker", "rerank", QUERY, TEXTS, top_n=3).ranking
    found = asking(server, "rerank", "RerankInput", **asked, return_documents=True).results
    assert [one.index for one in found] == [one.index for one in wanted]
    assert [one.document for one in found] == [TEXTS[one.index] for one in wanted]
    assert_allclose([one.relevance_score for one in found], [one.score for one in wanted], atol=WITHIN)


def test_labels(server: Oracle) -> None:
    wanted = server("classifier", "classify", TEXTS)
    found = asking(server, "classify", "ClassifyInput", input_=TEXTS, model="classifier").data
    for row, scores in zip(found, wanted.scores, strict=True):
        order = scores.argsort()[::-1]
        assert [one.label for one in row] == [wanted.labels[place] for place in order]
        assert_allclose([one.score for one in row], scores[order], atol=WITHIN)
    assert len(asking(server, "classify", "ClassifyInput", input_=[LONG], model="classifier").data) == 1


def test_models(server: Oracle) -> None:
    found = asking(server, "models").data
    assert "embedder" in [one.id for one in found]
    assert {str(one.owned_by) for one in found} == {"infinity"}


def test_health(server: Oracle) -> None:
    assert asking(server, "health").additional_properties["unix"] > 0
