from __future__ import annotations

import asyncio

from numpy.testing import assert_allclose

from tests.clients.conftest import KEY, QUERY, TEXTS, WITHIN, Oracle, client_package


def test_vectors(server: Oracle) -> None:
    embeddings = client_package("llama_index.embeddings.openai_like")
    model = embeddings.OpenAILikeEmbedding(
        model_name="embedder", api_base=f"{server.url}/v1", api_key=KEY, embed_batch_size=3
    )
    wanted = server("embedder", "embed", TEXTS).embeddings
    assert_allclose(model.get_text_embedding_batch(TEXTS), wanted, atol=WITHIN)
    assert_allclose(model.get_query_embedding(TEXTS[0]), wanted[0], atol=WITHIN)
    assert_allclose(asyncio.run(model.aget_text_embedding_batch(TEXTS)), wanted, atol=WITHIN)


def test_rankings(server: Oracle) -> None:
    rerank = client_package("llama_index.postprocessor.cohere_rerank")
    schema = client_package("llama_index.core.schema")
    ranker = rerank.CohereRerank(model="ranker", api_key=KEY, base_url=server.url, top_n=3, max_retries=1)
    nodes = [schema.NodeWithScore(node=schema.TextNode(text=text)) for text in TEXTS]
    found = ranker.postprocess_nodes(nodes, query_str=QUERY)
    wanted = server("ranker", "rerank", QUERY, TEXTS, top_n=3).ranking
    assert [one.node.text for one in found] == [TEXTS[one.index] for one in wanted]
    assert_allclose([one.score for one in found], [one.score for one in wanted], atol=WITHIN)
