"""NVIDIA NIM's routes: the requests of LangChain's NVIDIAEmbeddings and NVIDIARerank, and of LiteLLM."""

from __future__ import annotations

from typing import Any

import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests.dialects.answers import answer, openai_vectors, rejection
from tests.dialects.conftest import ClientOf

EMBEDDER = "jina-matryoshka"
PROMPTED = "nomic-matryoshka"
RANKER = "ce-bert-1label"
TEXTS = ["The statement is executed.", "A module", "What does the operator yield?"]
LONG = "the statement yields a module " * 60
END = "what is the name of an operator, or of a number? " * 8


@pytest.mark.parametrize(("input_type", "prompt"), [("query", "query"), ("passage", "document")])
def test_langchains_request_is_answered_whether_or_not_the_model_has_prompts(
    input_type: str, prompt: str, client_of: ClientOf
) -> None:
    asked = {"encoding_format": "float", "input_type": input_type, "truncate": "NONE"}
    client = client_of(EMBEDDER)
    assert_allclose(openai_vectors(client, TEXTS, model=EMBEDDER, **asked), openai_vectors(client, TEXTS), atol=1e-6)
    client = client_of(PROMPTED)
    assert_allclose(
        openai_vectors(client, TEXTS, model=PROMPTED, **asked), openai_vectors(client, TEXTS, prompt_name=prompt)
    )


def test_an_unknown_purpose_is_rejected_where_there_are_prompts(client_of: ClientOf) -> None:
    said = rejection(client_of(PROMPTED), "/v1/embeddings", 400, input="a", input_type="querry")["error"]
    assert said["param"] == "input_type"
    assert "Supported values: query, document, clustering" in said["message"]
    assert "passage" in said["message"]
    client = client_of(EMBEDDER)
    assert_array_equal(openai_vectors(client, "a", input_type="querry"), openai_vectors(client, "a"))


def test_truncate_names_the_end_that_is_cut(client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    text = LONG + END
    end, start = (openai_vectors(client, [text], truncate=side) for side in ("END", "START"))
    assert_allclose(end, openai_vectors(client, [text], truncate_prompt_tokens=-1), atol=1e-6)
    assert_allclose(start, openai_vectors(client, [text], truncate_prompt_tokens=-1, truncation_side="left"), atol=1e-6)
    assert float((end @ start.T).item()) < 0.999
    assert_array_equal(openai_vectors(client, [text], truncate=True), end)
    for value in ("NONE", False):
        assert rejection(client, "/v1/embeddings", 400, input=["a", text], truncate=value)["error"]["index"] == 1


def test_passages_are_ranked_by_their_logits(client_of: ClientOf) -> None:
    client = client_of(RANKER)
    asked = {"model": RANKER, "query": {"text": TEXTS[2]}, "passages": [{"text": text} for text in TEXTS]}
    got = answer(client, "/v1/ranking", **asked)
    assert set(got) == {"model", "rankings", "usage"}
    plain = answer(client, "/v1/rerank", query=TEXTS[2], documents=TEXTS, raw_scores=True)
    assert [entry["index"] for entry in got["rankings"]] == [entry["index"] for entry in plain["results"]]
    assert [entry["logit"] for entry in got["rankings"]] == [entry["relevance_score"] for entry in plain["results"]]
    assert got["usage"] == plain["usage"]
    assert answer(client, "/v1/ranking", **asked, top_k=1)["rankings"] == got["rankings"][:1]


def test_a_long_passage_is_cut_where_that_is_asked_for(client_of: ClientOf) -> None:
    client = client_of(RANKER)
    asked = {"query": {"text": "a"}, "passages": [{"text": "b"}, {"text": LONG}]}
    assert len(answer(client, "/v1/ranking", **asked, truncate="END")["rankings"]) == 2
    for fields in ({}, {"truncate": "NONE"}):
        said = rejection(client, "/v1/ranking", 400, **asked, **fields)
        assert set(said) == {"object", "message", "detail", "type"}
        assert said["message"].startswith("passages[1]")
        assert "set truncate" in said["message"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"query": {"text": "a"}, "passages": []}, "`passages` is empty"),
        ({"query": {"text": ""}, "passages": [{"text": "b"}]}, "query.text: the query is empty"),
        ({"query": {}, "passages": [{"text": "b"}]}, "query.text: this field is required"),
        ({"query": {"text": "a"}, "passages": [{"text": "b"}, {}]}, "passages[1].text: this field is required"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], said: str, client_of: ClientOf) -> None:
    assert rejection(client_of(RANKER), "/v1/ranking", 400, **fields)["message"].startswith(said)


def test_health_is_told(client_of: ClientOf) -> None:
    for path, message in (("live", "Service is live."), ("ready", "Service is ready.")):
        got = client_of(RANKER).get(f"/v1/health/{path}")
        assert (got.status_code, got.json()) == (200, {"object": "health-response", "message": message})
