from __future__ import annotations

import asyncio
from typing import Any

import pytest
import trio
from numpy.testing import assert_allclose

from staged_pool.runtime.results import RerankResult
from tests.clients.conftest import KEY, QUERY, TEXTS, WITHIN, Oracle, client_package

LOOPS = pytest.mark.parametrize("run", [asyncio.run, lambda main: trio.run(lambda: main)], ids=["asyncio", "trio"])


def same_ranking(found: Any, wanted: RerankResult) -> None:
    assert [one.index for one in found.results] == [one.index for one in wanted.ranking]
    assert_allclose([one.relevance_score for one in found.results], [one.score for one in wanted.ranking], atol=WITHIN)


@pytest.mark.parametrize("version", ["Client", "ClientV2"])
def test_vectors(server: Oracle, version: str) -> None:
    cohere = client_package("cohere")
    client = getattr(cohere, version)(KEY, base_url=server.url)
    wanted = server("embedder", "embed", TEXTS).embeddings
    found = client.embed(
        model="embedder", texts=TEXTS, input_type="search_document", embedding_types=["float", "ubinary"]
    )
    vectors = found.embeddings.float_ if hasattr(found.embeddings, "float_") else found.embeddings.float
    assert_allclose(vectors, wanted, atol=WITHIN)
    assert [len(row) for row in found.embeddings.ubinary] == [wanted.shape[1] // 8] * len(TEXTS)


def test_vectors_as_the_first_version_gives_them(server: Oracle) -> None:
    cohere = client_package("cohere")
    found = cohere.Client(KEY, base_url=server.url).embed(model="embedder", texts=TEXTS, input_type="search_query")
    assert_allclose(found.embeddings, server("embedder", "embed", TEXTS).embeddings, atol=WITHIN)


@pytest.mark.parametrize("version", ["Client", "ClientV2"])
@pytest.mark.parametrize("top_n", [None, 2])
def test_rankings(server: Oracle, version: str, top_n: int | None) -> None:
    cohere = client_package("cohere")
    client = getattr(cohere, version)(KEY, base_url=server.url)
    options = {} if top_n is None else {"top_n": top_n}
    found = client.rerank(model="ranker", query=QUERY, documents=TEXTS, **options)
    same_ranking(found, server("ranker", "rerank", QUERY, TEXTS, top_n=top_n))


def test_rankings_give_the_documents_back_where_they_are_wanted(server: Oracle) -> None:
    cohere = client_package("cohere")
    client = cohere.Client(KEY, base_url=server.url)
    documents = [{"text": text} for text in TEXTS]
    found = client.rerank(model="ranker", query=QUERY, documents=documents, return_documents=True)
    same_ranking(found, server("ranker", "rerank", QUERY, TEXTS))
    assert [one.document.text for one in found.results] == [TEXTS[one.index] for one in found.results]


@LOOPS
@pytest.mark.parametrize("version", ["AsyncClient", "AsyncClientV2"])
def test_rankings_by_the_async_clients(server: Oracle, version: str, run: Any) -> None:
    cohere = client_package("cohere")

    async def rank() -> Any:
        async with getattr(cohere, version)(KEY, base_url=server.url) as client:
            return await client.rerank(model="ranker", query=QUERY, documents=TEXTS)

    same_ranking(run(rank()), server("ranker", "rerank", QUERY, TEXTS))


@LOOPS
def test_vectors_by_the_async_client(server: Oracle, run: Any) -> None:
    cohere = client_package("cohere")

    async def embed() -> Any:
        async with cohere.AsyncClientV2(KEY, base_url=server.url) as client:
            return await client.embed(
                model="embedder", texts=TEXTS, input_type="search_document", embedding_types=["float"]
            )

    found = run(embed()).embeddings.float_
    assert_allclose(found, server("embedder", "embed", TEXTS).embeddings, atol=WITHIN)


def test_errors_are_the_clients_own(server: Oracle) -> None:
    cohere = client_package("cohere")
    client = cohere.ClientV2(KEY, base_url=server.url)
    with pytest.raises(cohere.NotFoundError):
        client.rerank(model="another", query=QUERY, documents=TEXTS)
    with pytest.raises(cohere.BadRequestError):
        client.rerank(model="ranker", query=QUERY, documents=[])
    with pytest.raises(cohere.UnauthorizedError):
        cohere.ClientV2("wrong", base_url=server.url).rerank(model="ranker", query=QUERY, documents=TEXTS)
