"""`/pooling`, byte by byte."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from numpy.typing import NDArray

from staged_pool.api.wire.dialects.pooling import POOLING_TASKS, read_pooling
from staged_pool.api.wire.encodings import Form
from staged_pool.api.wire.exchange import Exchange
from staged_pool.runtime.payloads import SparseVector
from staged_pool.runtime.requests import ClassifyRequest, EmbedRequest, Output, TextInput, TokenClassifyRequest
from staged_pool.runtime.results import ClassifyResult, EmbedResult, TokenClassifyResult, Usage
from staged_pool.stages.errors import InvalidInput
from tests.api.wire.reading import parsed
from tests.support.cards import CARD

ALL = replace(CARD, outputs=(Output.DENSE, Output.SPARSE, Output.MULTI_VECTOR, Output.LABELS, Output.TOKEN_LABELS))
MATRIX = st_numpy.arrays(
    np.float32,
    st.tuples(st.integers(0, 4), st.integers(1, 4)),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)
A = (TextInput("a"),)


def read(**fields: Any) -> Any:
    return read_pooling(json.dumps({"input": "a", **fields}).encode(), ALL)[0]


def data(answer_to: dict[str, Any], result: Any) -> Any:
    """Return the answer of the only input."""
    exchange = Exchange(read_pooling, json.dumps({"input": "a", **answer_to}).encode(), ALL, "r")
    exchange.decode()
    [item] = parsed(exchange.encode(result))["data"]
    assert (item["index"], item["object"]) == (0, "pooling")
    return item["data"]


def embedded(**columns: Any) -> EmbedResult:
    return EmbedResult(**columns, usage=Usage(1), model="m")


@pytest.mark.parametrize(("output", "task"), POOLING_TASKS.items())
def test_each_task_is_a_request_for_its_output(task: str, output: Output) -> None:
    card = replace(CARD, outputs=(output,))
    body = json.dumps({"input": "a", "task": task, "use_activation": False, "model": "m"}).encode()
    request = read_pooling(body, card)[0]
    if output is Output.LABELS:
        assert request == ClassifyRequest(inputs=A, model="m", activate=False)
    elif output is Output.TOKEN_LABELS:
        assert request == TokenClassifyRequest(inputs=A, model="m", aggregation="none", activate=False)
    else:
        assert request == EmbedRequest(inputs=A, model="m", outputs=frozenset({output}), normalize=False)


def test_the_score_of_a_cross_encoder_is_its_label() -> None:
    card = replace(CARD, outputs=(Output.LABELS,), scoring="cross-encoder")
    for task in ("score", ["score"], "classify"):
        request, _ = read_pooling(json.dumps({"input": "a", "task": task}).encode(), card)
        assert request == ClassifyRequest(inputs=A)
    with pytest.raises(InvalidInput, match=r"Supported tasks: \('classify'\)"):
        read_pooling(b'{"input":"a","task":"embed"}', card)


def test_weights_of_tokens_come_from_the_forward_of_other_vectors() -> None:
    card = replace(CARD, outputs=(Output.DENSE, Output.SPARSE, Output.TOKEN_WEIGHTS))
    body = b'{"input":"a","task":["embed","token_classify","sparse"],"prompt":"q: "}'
    exchange = Exchange(read_pooling, body, card, "r")
    assert exchange.decode() == EmbedRequest(inputs=A, outputs=frozenset(card.outputs), prompt="q: ")
    weights = np.array([0.5, 0, 2], np.float32)
    sparse = SparseVector(np.array([5], np.int32), np.array([2], np.float32))
    result = embedded(dense=np.ones((1, 2), np.float32), sparse=(sparse,), token_weights=(weights,))
    [item] = parsed(exchange.encode(result))["data"]
    assert item["data"]["token_classify"] == [0.5, 0, 2]
    assert list(item["data"]) == ["embed", "token_classify", "sparse"]


@pytest.mark.parametrize("first", Output)
def test_the_default_is_the_first_output_of_the_model(first: Output) -> None:
    card = replace(CARD, outputs=(first, *Output))
    wanted = read_pooling(json.dumps({"input": "a", "task": POOLING_TASKS[first]}).encode(), card)[0]
    assert read_pooling(b'{"input":"a"}', card)[0] == wanted
    assert read_pooling(b'{"input":"a","task":null}', card)[0] == wanted


def test_several_tasks_are_one_request() -> None:
    wanted = frozenset({Output.DENSE, Output.SPARSE, Output.MULTI_VECTOR})
    request = read(task=["embed", "sparse", "token_embed", "embed"], dimensions=2)
    assert request == EmbedRequest(inputs=A, outputs=wanted, dimensions=2)
    assert read(task=["classify"]) == read(task="classify")


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        *(
            (
                {"task": task},
                f"Unsupported task: '{name}' Supported tasks: "
                "('embed', 'sparse', 'token_embed', 'classify', 'token_classify')",
                "task",
            )
            for task, name in (
                ("other", "other"),
                ("score", "score"),
                (["embed", "encode"], "encode"),
                ("plugin", "plugin"),
                ("", ""),
            )
        ),
        ({"task": 1}, "task: Expected `str | array | null`, got `int`", "task"),
        ({"task": []}, "task: at least one task is needed", "task"),
        (
            {"task": ["embed", "sparse"], "embed_dtype": "int8"},
            "embed_dtype: the weights of sparse vectors are written as floats, not as int8",
            "embed_dtype",
        ),
        (
            {"task": ["embed", "classify"]},
            "task: of the model's tasks, only embed, sparse, token_embed can be combined in one request",
            "task",
        ),
        ({"task": "sparse", "dimensions": 2}, "dimensions: only for the task embed", "dimensions"),
        ({"task": "classify", "dimensions": 2}, "dimensions: only for the task embed", "dimensions"),
        ({"dimensions": 0}, "dimensions: Expected `int` >= 1", "dimensions"),
        ({"use_activation": "no"}, "use_activation: Expected `bool | null`, got `str`", "use_activation"),
        (
            {"encoding_format": "hex"},
            "encoding_format: Invalid enum value 'hex'; "
            "expected one of `float`, `base64`, `bytes`, `bytes_only` (literal_error)",
            "encoding_format",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(**fields)
    assert (str(caught.value), caught.value.param) == (message, param)


@given(MATRIX)
def test_vectors_of_tokens_come_back_as_they_are(matrix: NDArray[np.float32]) -> None:
    plain = data({"task": "token_embed"}, embedded(multi_vector=(matrix,)))
    np.testing.assert_array_equal(np.array(plain, np.float32).reshape(matrix.shape), matrix)
    encoded = data({"task": "token_embed", "encoding_format": "base64"}, embedded(multi_vector=(matrix,)))
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(encoded), "<f4").reshape(matrix.shape), matrix)


@given(st.dictionaries(st.integers(0, 2**31 - 1), st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_sparse_vectors_come_back_as_they_are(entries: dict[int, float]) -> None:
    indices, weights = np.array(list(entries), np.int32), np.array(list(entries.values()), np.float32)
    result = embedded(sparse=(SparseVector(indices, weights),))
    plain = data({"task": "sparse"}, result)
    assert plain["indices"] == indices.tolist()
    np.testing.assert_array_equal(np.array(plain["values"], np.float32), weights)
    encoded = data({"task": "sparse", "encoding_format": "base64"}, result)
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(encoded["indices"]), "<i4"), indices)
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(encoded["values"]), "<f4"), weights)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_several_outputs_stand_under_their_names(encoding: Form) -> None:
    result = embedded(
        dense=np.ones((1, 2), np.float32),
        sparse=(SparseVector(np.array([5], np.int32), np.array([0.5], np.float32)),),
    )
    both = data({"task": ["sparse", "embed"], "encoding_format": encoding}, result)
    for task in ("sparse", "embed"):
        assert both[task] == data({"task": task, "encoding_format": encoding}, result)
    assert set(both) == {"sparse", "embed"}
    assert data({"task": ["embed"], "encoding_format": encoding}, result) == {"embed": both["embed"]}


def test_eight_bits_have_the_scale_of_each_vector() -> None:
    matrix = np.array([[1, -0.5], [0, 0.25]], np.float32)
    result = embedded(dense=np.array([[0.5, 2]], np.float32), multi_vector=(matrix,))

    def entry(task: object) -> Any:
        body = {"input": "a", "task": task, "embed_dtype": "int8"}
        exchange = Exchange(read_pooling, json.dumps(body).encode(), ALL, "r")
        exchange.decode()
        [item] = parsed(exchange.encode(result))["data"]
        return item

    assert entry("embed")["scale"] == pytest.approx(2 / 127)
    assert entry("token_embed")["data"] == [[127, -64], [0, 127]]
    assert entry("token_embed")["scale"] == pytest.approx([1 / 127, 0.25 / 127])
    both = entry(["embed", "token_embed"])["scale"]
    assert both == {task: entry(task)["scale"] for task in ("embed", "token_embed")}


def test_scores_of_labels_and_of_tokens() -> None:
    labels = ClassifyResult(scores=np.array([[0.25, 0.75]], np.float32), labels=("x", "y"), usage=Usage(1), model="m")
    assert data({"task": "classify"}, labels) == [0.25, 0.75]
    tokens = TokenClassifyResult(
        scores=(np.array([[0.25, 0.75], [1, 0]], np.float32),),
        entities=((),),
        labels=("x", "y"),
        usage=Usage(1),
        model="m",
    )
    assert data({"task": "token_classify"}, tokens) == [[0.25, 0.75], [1.0, 0.0]]
