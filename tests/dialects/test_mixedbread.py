"""Mixedbread's routes: the requests of its Python client, and the fields that it reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests.dialects.answers import answer, rejection
from tests.dialects.conftest import ClientOf

EMBEDDER = "jina-matryoshka"
RANKER = "ce-bert-1label"
TEXTS = ["The statement is executed.", "A module", "What does the operator yield?"]


def test_vectors_come_in_each_format_that_is_asked_for(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    plain = [row["embedding"] for row in answer(client, "/v1/embeddings", input=TEXTS, dimensions=16)["data"]]
    formats = ["float", "float16", "base64", "binary", "ubinary", "int8", "uint8"]
    asked = {"model": EMBEDDER, "input": TEXTS, "dimensions": 16, "normalized": True}
    got = answer(client, "/v1/embeddings", **asked, encoding_format=formats)
    assert (got["normalized"], got["encoding_format"], got["dimensions"]) == (True, formats, 16)
    assert all(row["object"] == "embedding_dict" for row in got["data"])
    assert all(list(row["embedding"]) == formats for row in got["data"])
    assert_allclose([row["embedding"]["float"] for row in got["data"]], plain, atol=1e-6)
    for name in formats:
        alone = answer(client, "/v1/embeddings", **asked, encoding_format=name)
        assert [row["embedding"] for row in alone["data"]] == [row["embedding"][name] for row in got["data"]]
        assert (alone["encoding_format"], alone["data"][0]["object"]) == (name, "embedding")
    bits = [np.unpackbits(np.array(row["embedding"]["ubinary"], np.uint8)) for row in got["data"]]
    assert_array_equal(bits, np.array(plain) >= 0)


def test_vectors_that_are_not_normalised(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    got = answer(client, "/v1/embeddings", input=TEXTS, normalized=False, prompt="a: ")
    raw = answer(client, "/v1/embeddings", input=TEXTS, use_activation=False, prompt="a: ")
    assert got["normalized"] is False
    assert [row["embedding"] for row in got["data"]] == [row["embedding"] for row in raw["data"]]


def test_an_answer_to_others_has_no_fields_of_mixedbreads(client_of: ClientOf) -> None:
    got = answer(client_of(EMBEDDER), "/v1/embeddings", input="a", encoding_format="float")
    assert set(got) == {"id", "object", "created", "model", "data", "usage"}
    none = rejection(client_of(EMBEDDER), "/v1/embeddings", 400, input="a", encoding_format=[])["error"]
    assert none["message"] == "encoding_format: at least one type is needed"


def test_documents_are_ranked(client_of: ClientOf) -> None:
    client = client_of(RANKER)
    plain = answer(client, "/v1/rerank", query=TEXTS[2], documents=TEXTS)
    asked = {"model": RANKER, "query": TEXTS[2], "input": TEXTS}
    got = answer(client, "/v1/reranking", **asked)
    assert set(got) == {"id", "object", "model", "data", "usage", "top_k", "return_input"}
    assert [entry["index"] for entry in got["data"]] == [entry["index"] for entry in plain["results"]]
    assert [entry["score"] for entry in got["data"]] == [entry["relevance_score"] for entry in plain["results"]]
    assert got["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert (got["top_k"], got["return_input"]) == (3, False)
    assert set(got["data"][0]) == {"index", "score", "object"}
    best = answer(client, "/v1/reranking", **asked, top_k=1, return_input=True)
    assert best["data"] == [{**got["data"][0], "input": TEXTS[got["data"][0]["index"]]}]
    assert (best["top_k"], best["return_input"]) == (1, True)


def test_objects_are_read_by_the_fields_that_rank(client_of: ClientOf) -> None:
    client = client_of(RANKER)
    objects = [{"title": TEXTS[0], "body": TEXTS[1], "year": 1999}, {"title": TEXTS[2], "year": 2000}]

    def scores(documents: list[Any], **fields: Any) -> list[float]:
        got = answer(client, "/v1/reranking", query="a", input=documents, **fields)["data"]
        return [entry["score"] for entry in sorted(got, key=lambda entry: int(entry["index"]))]

    assert scores(objects, rank_fields=["title", "body"]) == scores([f"{TEXTS[0]}\n{TEXTS[1]}", TEXTS[2]])
    assert scores(objects, rank_fields=["year"]) == scores(["1999", "2000"])
    assert scores(objects) == scores(
        [f"title: {TEXTS[0]}\nbody: {TEXTS[1]}\nyear: 1999", f"title: {TEXTS[2]}\nyear: 2000"]
    )
    assert scores([{"text": TEXTS[0]}]) == scores([TEXTS[0]])
    echoed = answer(client, "/v1/reranking", query="a", input=objects, return_input=True)["data"]
    assert [entry["input"] for entry in echoed] == [objects[entry["index"]] for entry in echoed]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": []}, "`input` is empty"),
        ({"input": ["a"], "query": ""}, "query: the query is empty"),
        ({"input": ["a"], "rewrite_query": True}, "rewrite_query: not supported; expected false"),
        ({"input": ["a", {"b": "c"}], "rank_fields": ["d"]}, "input[1]: the object has none of the `rank_fields`"),
        ({"input": [{}]}, "input[0]: the object has no fields"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], said: str, client_of: ClientOf) -> None:
    error = rejection(client_of(RANKER), "/v1/reranking", 400, **({"query": "a"} | fields))["error"]
    assert error["message"].startswith(said)
