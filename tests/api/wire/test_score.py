"""`/score` and `/rerank`, byte by byte."""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.api.wire.dialects.ranking import encode_rerank, encode_score
from staged_pool.api.wire.dialects.rerank import read_rerank
from staged_pool.api.wire.dialects.score import read_score
from staged_pool.api.wire.dialects.score_fields import PAIRS
from staged_pool.api.wire.exchange import Exchange
from staged_pool.runtime.requests import MODEL_MAX, ScoreRequest
from staged_pool.runtime.results import ScoreResult, Usage
from staged_pool.stages.errors import InvalidInput
from tests.api.wire.reading import parsed
from tests.support.cards import CROSS_ENCODER as CARD

READ_RERANK = partial(read_rerank, version="2", kind="list", auto_truncate=True)
TEXT = st.text(st.characters(codec="utf-8"))
SCORES = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9)


def scored(**fields: Any) -> ScoreRequest:
    return read_score(json.dumps(fields).encode(), CARD)[0]


def reranked(**fields: Any) -> ScoreRequest:
    return READ_RERANK(json.dumps(fields).encode(), CARD)[0]


def result(*scores: float) -> ScoreResult:
    return ScoreResult(scores=np.array(scores, np.float32), usage=Usage(7), model="m")


def ranking(scores: list[float], documents: tuple[str, ...] | None, top_n: int | None) -> Any:
    plain = {"voyage": False, "infinity": False}
    return parsed(encode_rerank(result(*scores), documents, top_n, "2", "list", **plain, request_id="r", created=1))


@given(TEXT.filter(bool), st.lists(TEXT, min_size=1))
def test_one_query_is_for_all_documents(query: str, documents: list[str]) -> None:
    request = scored(queries=query, documents=documents)
    assert (request.queries, request.documents) == ((query,), tuple(documents))
    assert request == scored(queries=[query], documents=documents)


@given(st.lists(st.tuples(TEXT.filter(bool), TEXT), min_size=1))
def test_each_query_may_have_its_own_document(pairs: list[tuple[str, str]]) -> None:
    queries, documents = [first for first, _ in pairs], [second for _, second in pairs]
    request = scored(queries=queries, documents=documents)
    assert (request.queries, request.documents) == (tuple(queries), tuple(documents))


@pytest.mark.parametrize("names", PAIRS)
def test_every_naming_of_the_pair_means_the_same(names: tuple[str, str]) -> None:
    request = scored(**dict(zip(names, ("a", ["b", "c"]), strict=True)))
    assert request == ScoreRequest(queries=("a",), documents=("b", "c"), max_tokens=MODEL_MAX)


NAMES = sorted({name for pair in PAIRS for name in pair})


@pytest.mark.parametrize(
    "names",
    [
        names
        for size in range(4)
        for names in itertools.combinations(NAMES, size)
        if names not in map(tuple, map(sorted, PAIRS))
    ],
)
def test_anything_but_one_pair_of_names_is_rejected(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput) as caught:
        scored(**dict.fromkeys(names, "a"))
    assert caught.value.param in NAMES
    assert str(caught.value).startswith(f"{caught.value.param}: ")


@pytest.mark.parametrize("first", NAMES)
def test_the_missing_one_of_a_pair_is_named(first: str) -> None:
    other = next(name for pair in PAIRS for name in pair if first in pair and name != first)
    with pytest.raises(InvalidInput, match=f"^{other}: this field is required$"):
        scored(**{first: "a"})


def test_a_text_may_come_as_parts() -> None:
    part = {"type": "text", "text": "b"}
    request = scored(
        queries=part, documents=["a", part, {"text": "c"}, {"content": [part, {"type": "text", "text": "d"}]}]
    )
    assert (request.queries, request.documents) == (("b",), ("a", "b", "c", "b\nd"))


def test_settings_reach_the_request() -> None:
    settings = {
        "model": "m",
        "use_activation": False,
        "instruction": "find",
        "truncate_prompt_tokens": 9,
        "max_tokens_per_query": 4,
        "max_tokens_per_doc": 5,
    }
    wanted = ScoreRequest(
        queries=("a",),
        documents=("b",),
        model="m",
        activate=False,
        instruction="find",
        max_tokens=9,
        max_query_tokens=4,
        max_document_tokens=5,
    )
    assert scored(queries="a", documents="b", **settings) == wanted
    assert reranked(query="a", documents=["b"], **settings) == wanted


@pytest.mark.parametrize("most", [512, 10**9])
def test_limits_beyond_what_the_model_takes_are_none(most: int) -> None:
    limits = {"max_tokens_per_query": most, "max_tokens_per_doc": most}
    assert scored(queries="a", documents="b", **limits) == scored(queries="a", documents="b")
    assert reranked(query="a", documents=["b"], **limits) == reranked(query="a", documents=["b"])
    assert reranked(query="a", documents=["b"], max_tokens_per_doc=511).max_document_tokens == 511


def test_of_documents_that_are_objects_the_named_fields_are_read_in_their_order() -> None:
    documents = [{"title": "t", "content": "c", "year": 7}, "plain", {"content": "d", "type": 1}]
    request = reranked(query="a", documents=documents, rank_fields=["year", "content", "title"])
    assert request.documents == ("7\nc\nt", "plain", "d")
    assert reranked(query="a", documents=[{"text": "x"}], rank_fields=None).documents == ("x",)
    assert reranked(query="a", documents=[{"text": "x"}], rank_fields=[]).documents == ("x",)
    with pytest.raises(InvalidInput, match=r"documents\[1\]: the object has none of the `rank_fields`") as caught:
        reranked(query="a", documents=["b", {"title": "t"}], rank_fields=["text"])
    assert (caught.value.param, caught.value.index) == ("documents", 1)
    with pytest.raises(InvalidInput, match="documents: expected a list of texts, or of objects"):
        reranked(query="a", documents=[1], rank_fields=["text"])


def test_nulls_zeros_and_unknown_fields_mean_the_defaults() -> None:
    nulls: dict[str, Any] = dict.fromkeys(
        ("model", "use_activation", "instruction", "truncate_prompt_tokens", "max_tokens_per_query")
    )
    plain = ScoreRequest(queries=("a",), documents=("b",), max_tokens=MODEL_MAX)
    assert scored(queries="a", documents="b", max_tokens_per_doc=0, user="u", priority=2, **nulls) == plain
    assert reranked(query="a", documents=["b"], top_n=None, return_documents=None, **nulls) == plain


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        (
            {},
            "queries: give one of the pairs queries and documents, queries and items, data_1 and data_2, "
            "text_1 and text_2",
            "queries",
        ),
        (
            {"queries": ["a", "b"], "documents": ["a", "b", "c"]},
            "Input lengths must be either 1:1, 1:N or N:N; `queries` has 2, `documents` has 3",
            "queries",
        ),
        (
            {"text_1": ["a", "b"], "text_2": "c"},
            "Input lengths must be either 1:1, 1:N or N:N; `text_1` has 2, `text_2` has 1",
            "text_1",
        ),
        (
            {"data_1": ["a", ""], "data_2": ["b", "c"]},
            "data_1[1]: the query is empty; expected a text",
            "data_1",
        ),
        ({"queries": [], "documents": "a"}, "At least one text element must be given in `queries`", "queries"),
        ({"data_1": "a", "data_2": []}, "At least one text_pair element must be given in `data_2`", "data_2"),
        (
            {"queries": 1, "documents": "a"},
            "queries: Expected `str | object | array | null`, got `int`",
            "queries",
        ),
        ({"queries": "a", "items": ["a", 1]}, "items[1]: Expected `str | object`, got `int`", "items"),
        (
            {"queries": "a", "documents": ["a", {"type": "image_url", "image_url": {}}]},
            "documents[1].image_url.url: this field is required",
            "documents",
        ),
        ({"queries": {}, "documents": "a"}, "queries.text: this field is required", "queries"),
        (
            {"queries": "a", "documents": {"content": [{"type": "audio"}]}},
            "documents.content[0].type: `audio` is not supported; `text`, `input_text`, `image_url`, `input_image`, "
            "`image`, `video_url` and `video` are",
            "documents",
        ),
        ({"max_tokens_per_query": -1}, "max_tokens_per_query: Expected `int` >= 0", "max_tokens_per_query"),
        ({"max_tokens_per_doc": -1}, "max_tokens_per_doc: Expected `int` >= 0", "max_tokens_per_doc"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens: Expected `int` >= -1", "truncate_prompt_tokens"),
        (
            {"queries": "a", "documents": "b", "truncate_prompt_tokens": 0},
            "truncate_prompt_tokens: 0 leaves nothing of an input; expected -1 or at least 1",
            "truncate_prompt_tokens",
        ),
        ({"use_activation": 1}, "use_activation: Expected `bool | null`, got `int`", "use_activation"),
        ({"instruction": 1}, "instruction: Expected `str | null`, got `int`", "instruction"),
    ],
)
def test_what_is_wrong_with_a_request_for_scores_is_named(fields: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        scored(**fields)
    assert (str(caught.value), caught.value.param) == (message, param)


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"documents": ["a"]}, "query: this field is required", "query"),
        ({"query": "a"}, "documents: this field is required", "documents"),
        ({"query": ["a"], "documents": ["a"]}, "query: Expected `str | object`, got `array`", "query"),
        ({"query": "a", "documents": 1}, "documents: Expected `str | object | array | null`, got `int`", "documents"),
        ({"query": "", "documents": ["a"]}, "query: the query is empty; expected a text", "query"),
        ({"query": "a", "documents": []}, "At least one text_pair element must be given in `documents`", "documents"),
        ({"query": "a", "documents": [1]}, "documents[0]: Expected `str | object`, got `int`", "documents"),
        ({"query": "a", "documents": ["b", {}]}, "documents[1].text: this field is required", "documents"),
        (
            {"query": "a", "documents": [{"text": 1}]},
            "documents[0].text: expected a text",
            "documents",
        ),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n: Expected `int` >= 0", "top_n"),
        (
            {"query": "a", "documents": ["b"], "return_documents": "no"},
            "return_documents: Expected `bool | null`, got `str`",
            "return_documents",
        ),
    ],
)
def test_what_is_wrong_with_a_request_for_a_ranking_is_named(fields: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        reranked(**fields)
    assert (str(caught.value), caught.value.param) == (message, param)


def test_the_answer_with_scores_is_vllms_field_by_field() -> None:
    assert parsed(encode_score(result(0.5, -1), request_id="r", created=1)) == {
        "id": "score-r",
        "object": "list",
        "created": 1,
        "model": "m",
        "data": [{"index": 0, "object": "score", "score": 0.5}, {"index": 1, "object": "score", "score": -1.0}],
        "usage": {
            "prompt_tokens": 7,
            "total_tokens": 7,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
    }


def test_the_answer_with_a_ranking_has_the_fields_of_every_dialect() -> None:
    assert ranking([0.25, 0.5], ("a", "b"), None) == {
        "id": "score-r",
        "object": "list",
        "created": 1,
        "model": "m",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        "results": [
            {"index": 1, "document": {"text": "b", "multi_modal": None}, "relevance_score": 0.5},
            {"index": 0, "document": {"text": "a", "multi_modal": None}, "relevance_score": 0.25},
        ],
    }


@given(SCORES, st.integers(0, 12))
def test_a_ranking_is_sorted_complete_and_cut(scores: list[float], top_n: int) -> None:
    documents = tuple(f"document {index}" for index in range(len(scores)))
    results = ranking(scores, documents, top_n)["results"]
    assert [entry["document"]["text"] for entry in results] == [documents[entry["index"]] for entry in results]
    found = np.array([entry["relevance_score"] for entry in results], np.float32)
    np.testing.assert_array_equal(found, np.sort(np.array(scores, np.float32))[::-1][: top_n or None])
    assert len({entry["index"] for entry in results}) == len(results) == min(top_n or len(scores), len(scores))


@given(SCORES)
def test_both_routes_print_a_score_alike_and_as_it_is(scores: list[float]) -> None:
    data = parsed(encode_score(result(*scores), request_id="r", created=1))["data"]
    np.testing.assert_array_equal(
        np.array([entry["score"] for entry in data], np.float32), np.array(scores, np.float32)
    )
    by_index = {entry["index"]: entry["relevance_score"] for entry in ranking(scores, None, None)["results"]}
    assert by_index == {entry["index"]: entry["score"] for entry in data}


def test_a_ranking_leaves_out_what_was_not_wanted() -> None:
    body = json.dumps({"query": "a", "documents": ["b", "c"], "top_n": 1, "return_documents": False}).encode()
    exchange = Exchange(READ_RERANK, body, CARD, "r")
    exchange.decode()
    assert parsed(exchange.encode(result(0, 1)))["results"] == [{"index": 1, "relevance_score": 1.0}]
