"""LangChain's clients of NVIDIA NIM."""

from __future__ import annotations

import asyncio

import pytest
from numpy.testing import assert_allclose

from tests.clients.conftest import KEY, QUERY, TEXTS, WITHIN, Oracle, client_package

LONG = "long " * 10_000


def test_vectors(server: Oracle) -> None:
    nvidia = client_package("langchain_nvidia_ai_endpoints")
    for name, prompts in (("embedder", (None, None)), ("prompted", ("query", "passage"))):
        model = nvidia.NVIDIAEmbeddings(model=name, base_url=f"{server.url}/v1", api_key=KEY)
        query, passages = (server(name, "embed", TEXTS, prompt_name=prompt).embeddings for prompt in prompts)
        assert_allclose(model.embed_documents(TEXTS), passages, atol=WITHIN)
        assert_allclose(model.embed_query(TEXTS[0]), query[0], atol=WITHIN)
        assert_allclose(asyncio.run(model.aembed_query(TEXTS[0])), query[0], atol=WITHIN)
    assert name in [each.id for each in model.available_models]


def test_long_texts(server: Oracle) -> None:
    nvidia = client_package("langchain_nvidia_ai_endpoints")
    model = nvidia.NVIDIAEmbeddings(model="embedder", base_url=f"{server.url}/v1", api_key=KEY)
    with pytest.raises(Exception, match="set truncate"):
        model.embed_query(LONG)
    cutting = nvidia.NVIDIAEmbeddings(model="embedder", base_url=f"{server.url}/v1", api_key=KEY, truncate="END")
    wanted = server("embedder", "embed", [LONG], max_tokens=-1).embeddings
    assert_allclose(cutting.embed_documents([LONG]), wanted, atol=WITHIN)


def test_rankings(server: Oracle) -> None:
    nvidia = client_package("langchain_nvidia_ai_endpoints")
    documents = client_package("langchain_core.documents")
    model = nvidia.NVIDIARerank(model="ranker", base_url=f"{server.url}/v1", api_key=KEY, top_n=3)
    found = model.compress_documents([documents.Document(page_content=text) for text in TEXTS], QUERY)
    wanted = server("ranker", "rerank", QUERY, TEXTS, top_n=3, activate=False).ranking
    assert [one.page_content for one in found] == [TEXTS[one.index] for one in wanted]
    assert_allclose([one.metadata["relevance_score"] for one in found], [one.score for one in wanted], atol=WITHIN)
