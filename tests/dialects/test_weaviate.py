"""The inference containers of Weaviate's modules: requests as its Go clients send them, fields as they read them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.dialects.answers import answer
from tests.dialects.conftest import ClientOf

EMBEDDER = "jina-matryoshka"
PROMPTED = "nomic-matryoshka"
RANKER = "ce-bert-1label"
TEXTS = ["The statement is executed.", "A module", "What does the operator yield?"]
LONG = "the statement yields a module " * 60


def post(client: Any, path: str, body: Any) -> Any:
    """As `http.NewRequestWithContext` does it: without a Content-Type."""
    return client.post(path, content=json.dumps(body).encode())


def vector_request(text: str, **config: Any) -> dict[str, Any]:
    """Return a request as text2vec-transformers marshals it: the answer's fields too, empty."""
    return {"text": text, "dims": 0, "vector": None, "error": "", "config": config}


@pytest.mark.parametrize("path", ["/vectors", "/vectors/"])
@pytest.mark.parametrize(("task_type", "prompt"), [("query", "query"), ("passage", "document")])
def test_a_text_has_a_vector_for_what_it_is_for(path: str, task_type: str, prompt: str, client_of: ClientOf) -> None:
    for kind in (EMBEDDER, PROMPTED):
        client = client_of(kind)
        request = vector_request(TEXTS[0], pooling_strategy="masked_mean", task_type=task_type)
        got = post(client, path, request).json()
        assert set(got) == {"text", "vector", "dim", "dims"}
        assert (got["text"], got["dims"], got["dim"]) == (TEXTS[0], len(got["vector"]), len(got["vector"]))
        prompts = client.get("/v1/models").json()["data"][0]["staged_pool"]["prompts"]
        named = {"prompt_name": prompt} if prompts else {}
        [wanted] = answer(client, "/v1/embeddings", input=TEXTS[0], **named)["data"]
        assert_allclose(got["vector"], wanted["embedding"], atol=1e-6)


def test_dimensions_and_long_texts(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    short = post(client, "/vectors", vector_request(TEXTS[0], dimensions=8)).json()
    assert short["dims"] == 8
    assert_allclose(np.linalg.norm(short["vector"]), 1, atol=1e-5)
    assert post(client, "/vectors", vector_request(LONG)).status_code == 200


def test_documents_are_scored_in_their_order(client_of: ClientOf) -> None:
    client = client_of(RANKER)
    got = post(client, "/rerank", {"query": TEXTS[2], "documents": TEXTS, "property": ""}).json()
    assert set(got) == {"query", "scores", "property", "score"}
    assert (got["query"], got["property"], got["score"]) == (TEXTS[2], None, None)
    assert [score["document"] for score in got["scores"]] == TEXTS
    wanted = answer(client, "/score", queries=TEXTS[2], documents=TEXTS)["data"]
    assert [score["score"] for score in got["scores"]] == [entry["score"] for entry in wanted]
    single = post(client, "/rerank", {"query": TEXTS[2], "documents": None, "property": TEXTS[1]}).json()
    assert (single["property"], single["scores"]) == (TEXTS[1], None)
    assert_allclose(single["score"], wanted[1]["score"], rtol=1e-4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/vectors", {"text": 1}),
        ("/vectors", vector_request("a", dimensions=10_000)),
        ("/rerank", {"query": "a", "documents": [], "property": ""}),
    ],
)
def test_errors_are_a_text_as_the_go_client_unmarshals_them(path: str, body: Any, client_of: ClientOf) -> None:
    response = post(client_of(RANKER if path == "/rerank" else EMBEDDER), path, body)
    assert response.status_code == 400
    assert isinstance(response.json()["error"], str)


def test_meta_and_probes(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    meta = client.get("/meta").json()
    assert meta["model"]["model_name"] == EMBEDDER
    assert meta["model"]["architectures"]
    for path in ("/.well-known/live", "/.well-known/ready"):
        response = client.get(path)
        assert (response.status_code, response.content) == (204, b"")
        assert "content-length" not in response.headers


def test_texts_and_images_have_vectors_of_one_space(client_of: ClientOf, image_url: str) -> None:
    client = client_of("clip")
    bare = image_url.partition(",")[2]
    got = answer(client, "/vectorize", texts=["a", "b"], images=[bare])
    assert set(got) == {"textVectors", "imageVectors"}
    wanted = answer(client, "/v1/embeddings", input=["a", "b", {"image": image_url}])["data"]
    vectors = np.array(got["textVectors"] + got["imageVectors"])
    assert_allclose(vectors, [row["embedding"] for row in wanted], atol=1e-6)
    assert answer(client, "/vectorize", texts=["a"])["imageVectors"] == []
    broken = client.post("/vectorize", json={"texts": ["a"], "images": ["%"]})
    assert broken.json()["error"].startswith("images[0]")
    assert client.post("/vectorize", json={}).json()["error"].startswith("`texts` and `images` are empty")
