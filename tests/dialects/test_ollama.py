"""Ollama's routes: the requests of its Python client, LiteLLM's and LangChain's, and the fields that they read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.dialects.answers import answer, rejection
from tests.dialects.conftest import ClientOf

EMBEDDER = "jina-matryoshka"
UNNORMALISED = "bert-mean"
TEXTS = ["The statement is executed.", "A module", "What does the operator yield?"]
LONG = "the statement yields a module " * 60
OPTIONS = dict.fromkeys(("mirostat", "num_ctx", "num_gpu", "temperature", "stop", "top_k", "top_p"))
"""As LangChain sends them."""


def openai(client: Any, texts: Any, **fields: Any) -> Any:
    return [row["embedding"] for row in answer(client, "/v1/embeddings", input=texts, **fields)["data"]]


@pytest.mark.parametrize("name", [EMBEDDER, f"{EMBEDDER}:latest"])
def test_texts_are_embedded_under_the_name_with_its_tag_and_without(name: str, client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    got = answer(client, "/api/embed", model=name, input=TEXTS, options=OPTIONS, keep_alive="5m")
    assert set(got) == {"model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"}
    assert got["model"] == name
    assert got["prompt_eval_count"] == answer(client, "/v1/embeddings", input=TEXTS)["usage"]["prompt_tokens"]
    assert got["total_duration"] > 0
    assert_allclose(got["embeddings"], openai(client, TEXTS), atol=1e-6)
    alone = answer(client, "/api/embed", model=name, input=TEXTS[0])
    assert_allclose(alone["embeddings"], got["embeddings"][:1], atol=1e-5)


def test_several_models_are_told_apart_with_their_tags(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER, UNNORMALISED)
    for name in (EMBEDDER, UNNORMALISED):
        got = answer(client, "/api/embed", model=f"{name}:latest", input=TEXTS)["embeddings"]
        assert_allclose(got, openai(client, TEXTS, model=name), atol=1e-6)


def test_a_body_of_any_type_is_json(client_of: ClientOf) -> None:
    """curl labels its body as a form."""
    body = b'{"model": "%s", "input": "a"}' % EMBEDDER.encode()
    for headers in ({"content-type": "application/x-www-form-urlencoded"}, {}):
        assert client_of(EMBEDDER).post("/api/embed", content=body, headers=headers).status_code == 200


def test_long_texts_are_cut_unless_the_client_says_otherwise(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    limit = answer(client, "/tokenize", prompt="a")["max_model_len"]
    cut = answer(client, "/api/embed", model=EMBEDDER, input=LONG)
    assert cut["prompt_eval_count"] == limit
    assert answer(client, "/api/embed", model=EMBEDDER, input=LONG, options={"num_ctx": 7})["prompt_eval_count"] == 7
    for options in ({}, {"num_ctx": 7}):
        asked = {"model": EMBEDDER, "input": ["a", LONG], "truncate": False, "options": options}
        said = rejection(client, "/api/embed", 400, **asked)
        assert set(said) == {"error"}
        assert "input[1]" in said["error"]
    legacy = answer(client, "/api/embeddings", model=EMBEDDER, prompt=LONG)["embedding"]
    assert_allclose(legacy, cut["embeddings"][0], atol=1e-5)


def test_dimensions_cut_vectors_and_more_than_there_are_do_nothing(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    short = np.array(answer(client, "/api/embed", model=EMBEDDER, input=TEXTS, dimensions=8)["embeddings"])
    assert short.shape == (3, 8)
    assert_allclose(np.linalg.norm(short, axis=1), 1, atol=1e-5)
    assert_allclose(short, openai(client, TEXTS, dimensions=8), atol=1e-6)
    for dimensions in (0, 4096):
        whole = answer(client, "/api/embed", model=EMBEDDER, input=TEXTS, dimensions=dimensions)["embeddings"]
        assert_allclose(whole, openai(client, TEXTS), atol=1e-6)


@pytest.mark.parametrize("fields", [{}, {"input": ""}, {"input": []}, {"input": None}])
def test_a_request_without_a_text_has_the_model_loaded(fields: dict[str, Any], client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    assert answer(client, "/api/embed", model=EMBEDDER, **fields) == {"model": EMBEDDER, "embeddings": []}
    assert answer(client, "/api/embeddings", model=EMBEDDER) == {"embedding": []}
    assert rejection(client, "/api/embed", 404, model="other", **fields)["error"]


@pytest.mark.parametrize("header", ["X-Request-Timeout", "X-Priority"])
def test_headers_of_a_request_without_a_text_are_looked_at(header: str, client_of: ClientOf) -> None:
    response = client_of(EMBEDDER).post("/api/embed", json={"model": EMBEDDER}, headers={header: "none"})
    assert response.status_code == 400
    assert header in response.json()["error"]


def test_the_older_route_has_the_vector_as_the_folder_has_it(client_of: ClientOf) -> None:
    client = client_of(UNNORMALISED)
    got = answer(client, "/api/embeddings", model=UNNORMALISED, prompt=TEXTS[0])
    assert set(got) == {"embedding"}
    [plain] = openai(client, TEXTS[0])
    assert_allclose(got["embedding"], plain, atol=1e-6)


@pytest.mark.parametrize(("path", "fields"), [("/api/embed", {"input": "a"}), ("/api/show", {})])
def test_errors_are_a_text(path: str, fields: dict[str, Any], client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    said = rejection(client, path, 404, model="other:latest", **fields)
    assert set(said) == {"error"}
    assert "`other:latest` does not exist" in said["error"]
    wrong = client.post(path, content=b'{"model": 1}')
    assert (wrong.status_code, set(wrong.json())) == (400, {"error"})
    assert wrong.json()["error"].startswith("model: ")


def test_models_are_listed_with_their_tags(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER, "ce-bert-1label")
    models = client.get("/api/tags").json()["models"]
    assert [model["name"] for model in models] == [f"{EMBEDDER}:latest", "ce-bert-1label:latest"]
    assert [model["model"] for model in models] == [model["name"] for model in models]
    running = client.get("/api/ps").json()["models"]
    assert [model["digest"] for model in running] == [model["digest"] for model in models]
    assert len({model["digest"] for model in models}) == 2
    card = client.get("/v1/models").json()["data"][0]["staged_pool"]
    assert models[0]["size"] == 4 * card["parameters"]
    assert running[0]["context_length"] == card["max_tokens"]
    for field in ("model", "name"):
        shown = answer(client, "/api/show", **{field: f"{EMBEDDER}:latest"})
        assert shown["capabilities"] == ["embedding"]
        family = shown["details"]["family"]
        assert shown["model_info"][f"{family}.embedding_length"] == card["width"]
        assert shown["model_info"][f"{family}.context_length"] == card["max_tokens"]
        assert shown["model_info"]["general.parameter_count"] == card["parameters"]
    assert answer(client, "/api/show", model="ce-bert-1label")["capabilities"] == []
    assert "required" in rejection(client, "/api/show", 400)["error"]
    assert client.get("/api/version").json()["version"].count(".") == 2
