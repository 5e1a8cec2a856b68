from __future__ import annotations

import asyncio

from numpy.testing import assert_allclose

from tests.clients.conftest import KEY, QUERY, TEXTS, WITHIN, Oracle, client_package


def test_vectors_by_openais_embeddings(server: Oracle) -> None:
    """Told to send texts: by itself it sends the token ids of OpenAI's own models, which mean nothing to others."""
    langchain_openai = client_package("langchain_openai")
    model = langchain_openai.OpenAIEmbeddings(
        model="embedder", base_url=f"{server.url}/v1", api_key=KEY, check_embedding_ctx_length=False
    )
    wanted = server("embedder", "embed", TEXTS).embeddings
    assert_allclose(model.embed_documents(TEXTS), wanted, atol=WITHIN)
    assert_allclose(model.embed_query(TEXTS[0]), wanted[0], atol=WITHIN)
    assert_allclose(asyncio.run(model.aembed_documents(TEXTS)), wanted, atol=WITHIN)


def test_vectors_by_coheres_embeddings(server: Oracle) -> None:
    langchain_cohere = client_package("langchain_cohere")
    model = langchain_cohere.CohereEmbeddings(model="embedder", base_url=server.url, cohere_api_key=KEY)
    wanted = server("embedder", "embed", TEXTS).embeddings
    assert_allclose(model.embed_documents(TEXTS), wanted, atol=WITHIN)
    assert_allclose(model.embed_query(TEXTS[0]), wanted[0], atol=WITHIN)
    assert_allclose(asyncio.run(model.aembed_query(TEXTS[0])), wanted[0], atol=WITHIN)


def test_coheres_kinds_of_inputs_are_prompts_of_the_model(server: Oracle) -> None:
    langchain_cohere = client_package("langchain_cohere")
    model = langchain_cohere.CohereEmbeddings(model="prompted", base_url=server.url, cohere_api_key=KEY)
    passages = server("prompted", "embed", TEXTS, prompt_name="passage").embeddings
    queries = server("prompted", "embed", TEXTS[:1], prompt_name="query").embeddings
    assert abs(passages[0] - queries[0]).max() > 100 * WITHIN
    assert_allclose(model.embed_documents(TEXTS), passages, atol=WITHIN)
    assert_allclose(model.embed_query(TEXTS[0]), queries[0], atol=WITHIN)


def test_rankings_by_coheres_reranker(server: Oracle) -> None:
    langchain_cohere = client_package("langchain_cohere")
    documents = client_package("langchain_core.documents")
    ranker = langchain_cohere.CohereRerank(model="ranker", base_url=server.url, cohere_api_key=KEY, top_n=3)
    wanted = server("ranker", "rerank", QUERY, TEXTS, top_n=3).ranking
    found = ranker.rerank(TEXTS, QUERY)
    assert [one["index"] for one in found] == [one.index for one in wanted]
    assert_allclose([one["relevance_score"] for one in found], [one.score for one in wanted], atol=WITHIN)
    kept = ranker.compress_documents([documents.Document(text) for text in TEXTS], QUERY)
    assert [one.page_content for one in kept] == [TEXTS[one.index] for one in wanted]
