"""`/classify` and `/classify_tokens`, byte by byte."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from numpy.typing import NDArray

from staged_pool.api.wire.dialects.classify import (
    encode_classify,
    encode_classify_tokens,
    read_classify,
    read_classify_tokens,
)
from staged_pool.runtime.requests import ClassifyRequest, PairInput, TextInput, TokenClassifyRequest
from staged_pool.runtime.results import ClassifyResult, Entity, TokenClassifyResult, Usage
from staged_pool.stages.errors import InvalidInput
from tests.api.wire.reading import parsed
from tests.support.cards import CARD

SCORES = st_numpy.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 5)),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


def classified(scores: NDArray[np.float32], labels: tuple[str, ...]) -> Any:
    result = ClassifyResult(scores=scores, labels=labels, usage=Usage(7), model="m")
    return parsed(encode_classify(result, request_id="r", created=1))


def test_texts_and_pairs_reach_the_request() -> None:
    request = read_classify(b'{"input":["a","b"],"model":"m","use_activation":false}', CARD)[0]
    assert request == ClassifyRequest(inputs=(TextInput("a"), TextInput("b")), model="m", activate=False)
    request = read_classify(b'{"input":[["a","b"]]}', CARD)[0]
    assert request == ClassifyRequest(inputs=(PairInput(first="a", second="b"),))


def test_the_answer_is_vllms_field_by_field() -> None:
    assert classified(np.array([[0.25, 0.75]], np.float32), ("no", "yes")) == {
        "id": "classify-r",
        "object": "list",
        "created": 1,
        "model": "m",
        "data": [{"index": 0, "label": "yes", "probs": [0.25, 0.75], "num_classes": 2}],
        "usage": {
            "prompt_tokens": 7,
            "total_tokens": 7,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
        "labels": ["no", "yes"],
    }


@given(SCORES)
def test_the_label_is_that_of_the_largest_score(scores: NDArray[np.float32]) -> None:
    labels = tuple(f"label {index}" for index in range(scores.shape[1]))
    rows = classified(scores, labels)["data"]
    np.testing.assert_array_equal(np.array([row["probs"] for row in rows], np.float32), scores)
    for row in rows:
        assert row["probs"][labels.index(row["label"])] == max(row["probs"])
        assert row["num_classes"] == len(labels)
    assert {row["label"] for row in classified(scores, ())["data"]} == {None}


def test_columns_of_wider_scores_are_written_too() -> None:
    wide = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert [row["probs"] for row in classified(wide[:, 1:3], ("x", "y"))["data"]] == [[1.0, 2.0], [5.0, 6.0]]


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_the_strategy_reaches_the_request(strategy: Any) -> None:
    body = json.dumps({"input": "a", "aggregation_strategy": strategy}).encode()
    wanted = TokenClassifyRequest(inputs=(TextInput("a"),), aggregation=strategy)
    assert read_classify_tokens(body, CARD)[0] == wanted


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"{}", "input: this field is required", "input"),
        (
            b'{"input":"a","aggregation_strategy":"mean"}',
            "aggregation_strategy: Invalid enum value 'mean'; "
            "expected one of `none`, `simple`, `first`, `average`, `max` (literal_error)",
            "aggregation_strategy",
        ),
        (
            b'{"input":[1,2]}',
            "input: expected a text or a list of texts; entities are found only in texts",
            "input",
        ),
        (
            b'{"messages":[{"role":"user","content":"a"}]}',
            "messages: expected a text or a list of texts; entities are found only in texts",
            "messages",
        ),
    ],
)
def test_what_is_wrong_is_named(body: bytes, message: str, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_classify_tokens(body, CARD)
    assert (str(caught.value), caught.value.param) == (message, param)


def test_entities_are_written_field_by_field() -> None:
    entity = Entity(label="PER", score=0.5, start=0, end=3, text="Ada")
    result = TokenClassifyResult(scores=(), entities=((entity,), ()), labels=("O", "PER"), usage=Usage(7), model="m")
    answer = parsed(encode_classify_tokens(result, request_id="r", created=1))
    assert answer["data"] == [
        {"index": 0, "entities": [{"label": "PER", "score": 0.5, "start": 0, "end": 3, "text": "Ada"}]},
        {"index": 1, "entities": []},
    ]
    assert (answer["id"], answer["usage"]["prompt_tokens"]) == ("classify-r", 7)
