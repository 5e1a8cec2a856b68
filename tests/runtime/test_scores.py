"""Score requests that are rejected early, and the ranking of documents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from staged_pool.runtime.requests import ScoreRequest
from staged_pool.runtime.results import ScoreResult, Usage
from staged_pool.runtime.tasks.score import plan, rank
from staged_pool.stages.errors import InvalidInput, Unsupported
from tests.support.cards import CARD


def request(**fields: Any) -> ScoreRequest:
    return ScoreRequest(**{"queries": ("a",), "documents": ("b", "c")} | fields)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"queries": ()}, "queries", "no query"),
        ({"queries": ("",)}, "queries", "A query is empty"),
        ({"documents": ()}, "documents", "no documents"),
        ({"queries": ("a", "b", "c")}, "queries", "3 queries and 2 documents"),
        ({"max_query_tokens": 0}, "max_query_tokens", "out of range"),
        ({"max_document_tokens": CARD.max_tokens}, "max_document_tokens", "out of range"),
        ({"instruction": "look"}, "instruction", "takes no instruction"),
    ],
)
def test_a_request_that_cannot_be_scored_says_why(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as rejected:
        plan(request(**fields), CARD)
    assert rejected.value.param == param


def test_which_query_is_empty_is_said() -> None:
    with pytest.raises(InvalidInput) as rejected:
        plan(request(queries=("a", "")), CARD)
    assert rejected.value.index == 1


def test_an_empty_document_is_a_document() -> None:
    assert len(plan(request(documents=("", "b")), CARD).inputs) == 3


def test_a_model_that_compares_nothing_says_so() -> None:
    with pytest.raises(Unsupported, match="cannot score"):
        plan(request(), replace(CARD, scoring=None))


@pytest.mark.parametrize(("top_n", "order"), [(None, [2, 0, 3, 1]), (0, [2, 0, 3, 1]), (2, [2, 0]), (9, [2, 0, 3, 1])])
def test_the_best_come_first_and_equal_ones_in_their_order(top_n: int | None, order: list[int]) -> None:
    scores = ScoreResult(scores=np.array([0.5, 0.1, 0.9, 0.5], np.float32), usage=Usage(1), model="m")
    ranked = rank(scores, top_n)
    assert [document.index for document in ranked.ranking] == order
    assert ranked.ranking[0].score == pytest.approx(0.9)


def test_logits_tell_apart_what_scores_do_not_and_nan_comes_last() -> None:
    scores, logits = np.array([1, 1, 1, 1, np.nan], np.float32), np.array([20, 30, 25, 30, np.nan], np.float32)
    ranked = rank(ScoreResult(scores=scores, usage=Usage(1), model="m", logits=logits), None)
    assert [document.index for document in ranked.ranking] == [1, 3, 2, 0, 4]
    assert ranked.ranking[0].score == 1
