from __future__ import annotations

import asyncio

from numpy.testing import assert_allclose

from tests.clients.conftest import KEY, TEXTS, WITHIN, Oracle, client_package


def test_vectors(server: Oracle) -> None:
    haystack, embedders = client_package("haystack"), client_package("haystack.components.embedders")
    secret = client_package("haystack.utils").Secret.from_token(KEY)
    settings = {"model": "embedder", "api_base_url": f"{server.url}/v1", "api_key": secret}
    wanted = server("embedder", "embed", TEXTS).embeddings
    text = embedders.OpenAITextEmbedder(**settings)
    assert_allclose(text.run(TEXTS[0])["embedding"], wanted[0], atol=WITHIN)
    assert_allclose(asyncio.run(text.run_async(TEXTS[0]))["embedding"], wanted[0], atol=WITHIN)
    documents = [haystack.Document(content=text) for text in TEXTS]
    found = embedders.OpenAIDocumentEmbedder(**settings, progress_bar=False).run(documents)["documents"]
    assert_allclose([one.embedding for one in found], wanted, atol=WITHIN)
