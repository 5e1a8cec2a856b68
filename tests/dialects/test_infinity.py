"""Infinity's routes: the requests of its own client and of LiteLLM, and the fields that they read."""

from __future__ import annotations

from typing import Any

import pytest
from numpy.testing import assert_allclose

from tests.dialects.answers import answer, rejection
from tests.dialects.conftest import ClientOf

EMBEDDER = "jina-matryoshka"
RANKER = "ce-bert-1label"
CLASSIFIER = "seqcls-multiclass"
TEXTS = ["The statement is executed.", "A module", "What does the operator yield?"]
LONG = "the statement yields a module " * 60
NO_MODEL = "default/not-specified"
"""The model name that its client sends by default."""


def test_its_clients_request_for_vectors(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    asked: dict[str, Any] = {"input": TEXTS, "model": NO_MODEL, "dimensions": 0, "modality": "text"}
    got = answer(client, "/embeddings", **asked)
    plain = answer(client, "/v1/embeddings", input=TEXTS)
    assert [row["embedding"] for row in got["data"]] == [row["embedding"] for row in plain["data"]]
    short = answer(client, "/embeddings", input=TEXTS, model=EMBEDDER, output_dimension=8)
    assert {len(row["embedding"]) for row in short["data"]} == {8}


def test_long_texts_are_cut_on_its_path_alone(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    limit = answer(client, "/tokenize", prompt="a")["max_model_len"]
    assert answer(client, "/embeddings", input=LONG)["usage"]["prompt_tokens"] == limit
    rejection(client, "/v1/embeddings", 400, input=LONG)
    rejection(client_of(EMBEDDER, auto_truncate=False), "/embeddings", 400, input=LONG)
    labels = answer(client_of(CLASSIFIER), "/classify", input=[LONG], model=NO_MODEL, raw_scores=False)
    assert labels["object"] == "classify"
    rejection(client_of(CLASSIFIER), "/classify", 400, input=[LONG])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_documents_of_its_clients_rankings_are_texts(path: str, client_of: ClientOf) -> None:
    client = client_of(RANKER)
    asked: dict[str, Any] = {"query": TEXTS[2], "documents": TEXTS, "raw_scores": False, "model": NO_MODEL}
    got = answer(client, path, **asked, return_documents=True)
    assert [entry["document"] for entry in got["results"]] == [TEXTS[entry["index"]] for entry in got["results"]]
    bare = answer(client, path, **asked, return_documents=False)
    assert [entry["index"] for entry in bare["results"]] == [entry["index"] for entry in got["results"]]
    assert not any("document" in entry for entry in bare["results"])
    others = answer(client, path, query=TEXTS[2], documents=TEXTS)
    assert all(set(entry["document"]) == {"text", "multi_modal"} for entry in others["results"])


def test_no_model_is_the_one_that_was_made_for_it(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER, RANKER)
    assert answer(client, "/rerank", query="a", documents=["b"], model=NO_MODEL, raw_scores=False)["model"] == RANKER
    assert answer(client, "/embeddings", input="a", model=NO_MODEL)["model"] == EMBEDDER


def test_images_have_a_path_of_their_own_and_audio_is_rejected(client_of: ClientOf, image_url: str) -> None:
    client = client_of("clip")
    got = answer(client, "/embeddings_image", input=[image_url], model=NO_MODEL)
    wanted = answer(client, "/v1/embeddings", input=[{"image": image_url}])
    assert_allclose(got["data"][0]["embedding"], wanted["data"][0]["embedding"], atol=1e-6)
    said = rejection(client, "/embeddings_audio", 501, input=["https://example.org/a.mp3"])["error"]
    assert said["message"].startswith("No model here reads audio")


def test_its_client_takes_the_list_of_models(client_of: ClientOf) -> None:
    [model] = client_of(EMBEDDER).get("/models").json()["data"]
    assert model["owned_by"] == "infinity"
