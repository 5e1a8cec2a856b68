"""Voyage's routes: the requests of its Python client and of LiteLLM, and the fields that they read."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests.dialects.answers import answer, openai_vectors, rejection
from tests.dialects.conftest import ClientOf

EMBEDDER = "jina-matryoshka"
PROMPTED = "nomic-matryoshka"
RANKER = "ce-bert-1label"
TEXTS = ["The statement is executed.", "A module", "What does the operator yield?"]
LONG = "the statement yields a module " * 60
CLIENT: dict[str, Any] = {
    "input_type": None,
    "truncation": True,
    "output_dtype": None,
    "output_dimension": None,
    "encoding_format": "base64",
}
"""Fields that Voyage's own client sends beside the inputs and the model."""


def unpacked(row: Any, dtype: str = "float32") -> Any:
    return np.frombuffer(base64.b64decode(row["embedding"]), dtype)


@pytest.mark.parametrize("input_type", [None, "query", "document"])
def test_its_clients_request_is_answered_whether_or_not_the_model_has_prompts(
    input_type: str | None, client_of: ClientOf
) -> None:
    for kind in (EMBEDDER, PROMPTED):
        client = client_of(kind)
        got = answer(client, "/v1/embeddings", input=TEXTS, model=kind, **(CLIENT | {"input_type": input_type}))
        prompt = {} if input_type is None or kind == EMBEDDER else {"prompt_name": input_type}
        assert_allclose([unpacked(row) for row in got["data"]], openai_vectors(client, TEXTS, **prompt), atol=1e-6)
        assert got["usage"]["total_tokens"] > 0


@pytest.mark.parametrize(("dtype", "numpy"), [("int8", "i1"), ("uint8", "u1"), ("binary", "i1"), ("ubinary", "u1")])
def test_numbers_of_other_types_are_the_same_in_base64_and_in_lists(
    dtype: str, numpy: str, client_of: ClientOf
) -> None:
    client = client_of(EMBEDDER)
    asked = CLIENT | {"output_dtype": dtype, "output_dimension": 16}
    packed = answer(client, "/v1/embeddings", input=TEXTS, **asked)["data"]
    listed = answer(client, "/v1/embeddings", input=TEXTS, **(asked | {"encoding_format": None}))["data"]
    vectors = openai_vectors(client, TEXTS, dimensions=16)
    for row, other, vector in zip(packed, listed, vectors, strict=True):
        assert_array_equal(unpacked(row, numpy), other["embedding"])
        if dtype.endswith("binary"):
            bits = np.array(other["embedding"]) + (128 if dtype == "binary" else 0)
            assert_array_equal(np.unpackbits(bits.astype(np.uint8)), vector >= 0)
        else:
            zero = 128 if dtype == "uint8" else 0
            assert_allclose((np.array(other["embedding"]) - zero) * other["scale"], vector, atol=other["scale"])


def test_the_two_names_of_dimensions_may_not_differ(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    assert_array_equal(openai_vectors(client, TEXTS, output_dimension=8), openai_vectors(client, TEXTS, dimensions=8))
    both = rejection(client, "/v1/embeddings", 400, input="a", output_dimension=8, dimensions=16)
    assert both["error"]["param"] == "output_dimension"


def test_truncation_says_whether_a_long_text_is_cut(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    limit = answer(client, "/tokenize", prompt="a")["max_model_len"]
    assert answer(client, "/v1/embeddings", input=LONG, **CLIENT)["usage"]["total_tokens"] == limit
    said = rejection(client, "/v1/embeddings", 400, input=["a", LONG], **(CLIENT | {"truncation": False}))
    assert said["error"]["index"] == 1
    ranker = client_of(RANKER)
    assert answer(ranker, "/v1/rerank", query="a", documents=[LONG], truncation=True)["usage"]["total_tokens"]
    rejected = rejection(ranker, "/v1/rerank", 400, query="a", documents=[LONG], truncation=False)
    assert "set truncation" in rejected["detail"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/multimodalembeddings"])
def test_errors_have_the_detail_that_its_client_reads(path: str, client_of: ClientOf) -> None:
    client = client_of(RANKER if "rerank" in path else EMBEDDER)
    said = rejection(client, path, 400)
    assert said["detail"] == said["error"]["message"]


def test_its_ranking_is_data_and_has_documents_where_they_are_asked_for(client_of: ClientOf) -> None:
    client = client_of(RANKER)
    plain = answer(client, "/v1/rerank", query=TEXTS[2], documents=TEXTS)
    wanted = [(entry["index"], entry["relevance_score"]) for entry in plain["results"]]
    assert "data" not in plain
    own = answer(client, "/v1/rerank", query=TEXTS[2], documents=TEXTS, model=RANKER, top_k=None, truncation=True)
    assert [(entry["index"], entry["relevance_score"]) for entry in own["data"]] == wanted
    assert set(own["data"][0]) == {"index", "relevance_score"}
    assert own["usage"]["total_tokens"] == plain["usage"]["total_tokens"]
    lite = answer(client, "/v1/rerank", query=TEXTS[2], documents=TEXTS, model=RANKER, top_k=2, return_documents=True)
    assert [(entry["index"], entry["relevance_score"]) for entry in lite["data"]] == wanted[:2]
    assert [entry["document"] for entry in lite["data"]] == [TEXTS[index] for index, _ in wanted[:2]]


def test_inputs_of_several_parts_have_one_vector_each(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    got = answer(client, "/v1/multimodalembeddings", inputs=inputs, model=EMBEDDER, **CLIENT)
    assert_allclose([unpacked(row) for row in got["data"]], openai_vectors(client, TEXTS), atol=1e-6)
    assert set(got["usage"]) == {"text_tokens", "image_pixels", "video_pixels", "total_tokens"}
    assert got["usage"]["total_tokens"] == answer(client, "/v1/embeddings", input=TEXTS)["usage"]["prompt_tokens"]
    sound = [{"content": [{"type": "audio_url", "audio_url": "https://example.org/a.mp3"}]}]
    said = rejection(client, "/v1/multimodalembeddings", 400, inputs=[*inputs, *sound])["error"]
    assert said["message"].startswith("inputs[3].content[0].type: `audio_url` is not supported")
    lacking = rejection(client, "/v1/multimodalembeddings", 400, inputs=[{"content": [{"type": "text"}]}])["error"]
    assert lacking["message"] == "inputs[0].content[0].text: this field is required"


def test_an_image_is_an_input(client_of: ClientOf, image_url: str) -> None:
    client = client_of("clip")
    inputs = [
        {"content": [{"type": "image_base64", "image_base64": image_url}]},
        {"content": [{"type": "text", "text": "a"}]},
    ]
    got = answer(client, "/v1/multimodalembeddings", inputs=inputs)
    wanted = openai_vectors(client, [{"image": image_url}, {"text": "a"}])
    assert_allclose([row["embedding"] for row in got["data"]], wanted, atol=1e-6)
