"""Words in any case, null for absent fields, and errors about all inputs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dialects.answers import answer, rejection
from tests.dialects.conftest import ClientOf

EMBEDDER = "bge-m3"
RANKER = "ce-bert-1label"
LONG = "many words that differ at both ends " * 30 + "so this one is cut"
PASSAGES = [{"text": "a"}, {"text": LONG}]


@pytest.mark.parametrize("word", ["none", "None", "nONE"])
@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        (EMBEDDER, "/v1/embed", {"texts": ["a", LONG]}),
        (EMBEDDER, "/v2/embed", {"texts": ["a", LONG]}),
        (EMBEDDER, "/v1/embeddings", {"input": ["a", LONG]}),
        (RANKER, "/v1/ranking", {"query": {"text": "a"}, "passages": PASSAGES}),
    ],
)
def test_none_rejects_in_any_case(kind: str, path: str, body: dict[str, Any], word: str, client_of: ClientOf) -> None:
    found = rejection(client_of(kind), path, 400, **body, truncate=word)
    assert "[1]: This model's maximum context length" in found["message"]


@pytest.mark.parametrize("words", [("start", "START"), ("Start", "START"), ("end", "END"), ("End", "END")])
@pytest.mark.parametrize(("path", "field"), [("/v2/embed", "texts"), ("/v1/embeddings", "input")])
def test_an_end_is_cut_in_any_case(path: str, field: str, words: tuple[str, str], client_of: ClientOf) -> None:
    found, wanted = (answer(client_of(EMBEDDER), path, **{field: [LONG]}, truncate=word) for word in words)
    assert _vectors(found) == _vectors(wanted)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_side_is_named_in_any_case(side: str, client_of: ClientOf) -> None:
    client = client_of(EMBEDDER)
    cut: dict[str, Any] = {"input": LONG, "truncate_prompt_tokens": 9}
    wanted = _vectors(answer(client, "/v1/embeddings", **cut, truncation_side=side))
    for word in (side.upper(), side.title()):
        assert _vectors(answer(client, "/v1/embeddings", **cut, truncation_side=word)) == wanted
    teis = answer(client, "/embed", inputs=LONG, truncation_direction=side)
    for word in (side.upper(), side.title()):
        assert answer(client, "/embed", inputs=LONG, truncation_direction=word) == teis
        like = {"source_sentence": "a", "sentences": [LONG]}
        asked = answer(client, "/similarity", inputs=like, parameters={"truncation_direction": word})
        assert asked == answer(client, "/similarity", inputs=like, parameters={"truncation_direction": side})
    ranker = client_of(RANKER)
    ranking = answer(ranker, "/rerank", query="a", texts=[LONG], truncation_direction=side)
    assert answer(ranker, "/rerank", query="a", texts=[LONG], truncation_direction=side.upper()) == ranking


@pytest.mark.parametrize("path", ["/score", "/rerank"])
def test_scores_cut_the_side_that_is_named(path: str, client_of: ClientOf) -> None:
    client, names = client_of(RANKER), ("queries" if path == "/score" else "query")

    def score(document: str, **fields: Any) -> float:
        found = answer(client, path, **{names: "a query"}, documents=[document], **fields)
        [row] = found["data"] if path == "/score" else found["results"]
        value: float = row["score"] if path == "/score" else row["relevance_score"]
        return value

    other_end = "x" + LONG
    assert score(LONG) == score(LONG, truncation_side="right") != score(LONG, truncation_side="left")
    assert score(other_end, truncation_side="Left") == score(LONG, truncation_side="LEFT")


@pytest.mark.parametrize(
    ("kind", "path", "body", "known"),
    [
        (EMBEDDER, "/v2/embed", {"texts": ["a"], "truncate": "LEFT"}, "`NONE`, `START`, `END`"),
        (EMBEDDER, "/v1/embeddings", {"input": "a", "truncate": "left"}, "`NONE`, `START`, `END`"),
        (RANKER, "/v1/ranking", {"query": {"text": "a"}, "passages": PASSAGES, "truncate": "start"}, "`NONE`, `END`"),
        (EMBEDDER, "/v1/embeddings", {"input": "a", "truncation_side": "end"}, "`left`, `right`"),
        (EMBEDDER, "/embed", {"inputs": "a", "truncation_direction": "END"}, "`Left`, `Right`"),
        (EMBEDDER, "/v2/embed", {"texts": ["a"], "embedding_types": ["int4"]}, "`float`, `base64`"),
        (EMBEDDER, "/vectors", {"text": "a", "config": {"task_type": "x"}}, "`query`, `passage`"),
        (
            EMBEDDER,
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"truncation_direction": "up"}},
            "`Left`, `Right`",
        ),
    ],
)
def test_an_unknown_word_is_told_the_right_ones(
    kind: str, path: str, body: dict[str, Any], known: str, client_of: ClientOf
) -> None:
    status = 422 if path in ("/embed", "/similarity") else 400
    found = rejection(client_of(kind), path, status, **body)
    error = found.get("error", found)
    message = error if isinstance(error, str) else error["message"]
    assert f"expected one of {known}" in message


@pytest.mark.parametrize(
    ("kind", "path", "body", "param"),
    [
        (EMBEDDER, "/v1/embeddings", {"input": ["a", "b"], "truncate_prompt_tokens": 1000}, "truncate_prompt_tokens"),
        (EMBEDDER, "/pooling", {"input": ["a", "b"], "truncate_prompt_tokens": 1000}, "truncate_prompt_tokens"),
        (EMBEDDER, "/v2/embed", {"texts": ["a", "b"], "max_tokens": 1000}, "max_tokens"),
        (EMBEDDER, "/score", {"queries": "a", "documents": ["b"], "truncate_prompt_tokens": 1000}, None),
        (RANKER, "/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 1000}, None),
        (RANKER, "/score", {"queries": "a", "documents": ["b"], "instruction": "x"}, "instruction"),
        (EMBEDDER, "/v1/embeddings", {"input": "a", "encoding_format": ["float", "x"]}, "encoding_format"),
        (EMBEDDER, "/v2/embed", {"texts": ["a"], "embedding_types": ["float", "x"]}, "embedding_types"),
        (RANKER, "/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["text", 1]}, "rank_fields"),
        (EMBEDDER, "/pooling", {"input": "a", "task": ["embed", 1]}, "task"),
        (EMBEDDER, "/detokenize", {"tokens": [1, "a"]}, "tokens"),
        (EMBEDDER, "/v1/embeddings", {"messages": [{"role": "user", "content": "a"}, 1]}, "messages"),
    ],
)
def test_what_holds_for_all_inputs_has_no_index(
    kind: str, path: str, body: dict[str, Any], param: str | None, client_of: ClientOf
) -> None:
    error = rejection(client_of(kind), path, 400, **body)["error"]
    assert "index" not in error
    assert error["param"] == (param or "truncate_prompt_tokens")


def test_an_unknown_image_option_has_no_index(client_of: ClientOf, image_url: str) -> None:
    asked: dict[str, Any] = {"input": ["a", {"image": image_url}], "mm_processor_kwargs": {"no_such": 1}}
    error = rejection(client_of("clip"), "/v1/embeddings", 400, **asked)["error"]
    assert (error["param"], error.get("index")) == ("mm_processor_kwargs", None)
    assert error["message"].startswith("The image option 'no_such' is not known")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": [{"image": "http://127.0.0.1/a.png"}]}, "input"),
        ("/v2/embed", {"images": ["http://127.0.0.1/a.png"]}, "images"),
        (
            "/v1/embeddings",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "file:///a.png"}]}]},
            "messages",
        ),
    ],
)
def test_a_url_that_is_not_followed_is_told_by_the_field_that_holds_it(
    path: str, body: dict[str, Any], param: str, client_of: ClientOf
) -> None:
    error = rejection(client_of("clip"), path, 400, **body)["error"]
    assert (error["param"], error["index"]) == (param, 0)
    assert error["message"].startswith(param)


def test_two_prompts_are_told_by_their_own_names(client_of: ClientOf) -> None:
    asked = {"input": "a", "task": "retrieval.query", "input_type": "query"}
    error = rejection(client_of("e5-xlmr"), "/v1/embeddings", 400, **asked)["error"]
    assert (error["param"], error["message"]) == ("input_type", "input_type: give one of `input_type` and `task`")


def test_any_entry_of_an_object_is_named_readably(client_of: ClientOf) -> None:
    error = rejection(client_of("clip"), "/v1/embeddings", 400, input="a", media_io_kwargs={"image": []})["error"]
    assert error["message"] == "media_io_kwargs.*: Expected `object`, got `array`"


@pytest.mark.parametrize(
    ("kind", "path", "body", "same"),
    [
        (EMBEDDER, "/invocations", {"input": None, "texts": ["a"]}, {"texts": ["a"]}),
        (EMBEDDER, "/invocations", {"inputs": "a", "query": None, "messages": None}, {"inputs": "a"}),
        (EMBEDDER, "/", {"inputs": "a", "query": None}, {"inputs": "a"}),
        (EMBEDDER, "/tokenize", {"inputs": "a", "prompt": None, "messages": None}, {"inputs": "a"}),
        (RANKER, "/rerank", {"query": "a", "texts": ["b"], "documents": None}, {"query": "a", "texts": ["b"]}),
        ("tokcls-ner", "/classify_tokens", {"input": "a", "aggregation_strategy": None}, {"input": "a"}),
        (EMBEDDER, "/api/embeddings", {"prompt": None}, {}),
    ],
)
def test_null_is_what_is_left_out(
    kind: str, path: str, body: dict[str, Any], same: dict[str, Any], client_of: ClientOf
) -> None:
    found, wanted = (answer(client_of(kind), path, **each) for each in (body, same))
    for each in (found, wanted):
        if isinstance(each, dict):
            each.pop("id", None), each.pop("created", None)
    assert found == wanted


@pytest.mark.parametrize(("path", "body"), [("/rerank", {"query": "a", "texts": None}), ("/", {"query": "a"})])
def test_teis_rankings_lack_texts_and_no_documents(path: str, body: dict[str, Any], client_of: ClientOf) -> None:
    assert rejection(client_of(RANKER), path, 422, **body) == {
        "error": "texts: this field is required",
        "error_type": "Validation",
    }


def test_a_null_property_is_weaviates(client_of: ClientOf) -> None:
    got = answer(client_of(RANKER), "/rerank", query="a", documents=["b", "c"], property=None)
    assert [score["document"] for score in got["scores"]] == ["b", "c"]
    assert rejection(client_of(RANKER), "/rerank", 400, query="a", documents=None, property=None) == {
        "error": "documents: this field is required"
    }


def test_a_null_beside_documents_changes_no_words(client_of: ClientOf) -> None:
    found = rejection(client_of(RANKER), "/rerank", 400, query="a", documents=[1], texts=None)
    assert found["error"]["param"] == "documents"


def _vectors(found: dict[str, Any]) -> object:
    return found["embeddings"] if "embeddings" in found else [entry["embedding"] for entry in found["data"]]
