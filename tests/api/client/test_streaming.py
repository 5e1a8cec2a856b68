"""Vectors that are read as they come."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.client.errors import BadAnswer
from staged_pool.client.exchange import ServerAnswer
from staged_pool.client.streaming import VectorLines
from staged_pool.runtime.input_ranges import InputRange
from staged_pool.stages.errors import ModelFailed

Line: TypeAlias = Mapping[str, object]

IN_LINES = ServerAnswer(200, {"content-type": "application/x-ndjson"})
IN_ONE = ServerAnswer(200, {"content-type": "application/json"})
USAGE: Line = {"usage": {"prompt_tokens": 9}}


def vector(index: int) -> Line:
    return {"index": index, "embedding": base64.b64encode(np.array([index, 0.5], np.float32).tobytes()).decode()}


def written(*lines: Line) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@given(st.permutations(range(4)), st.lists(st.integers(0, 400)), st.booleans())
def test_vectors_come_whole_wherever_the_answer_is_cut(order: list[int], cuts: list[int], ended: bool) -> None:
    text = written(*map(vector, order), USAGE)
    text = text if ended else text[:-1]
    lines = VectorLines(IN_LINES, InputRange(10, 4), 20)
    found = []
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for begin, end in itertools.pairwise(places):
        found += lines.feed(text[begin:end])
    found += lines.end()
    assert [index for index, _ in found] == [10 + index for index in order]
    for index, values in found:
        assert values.tolist() == [index - 10, 0.5]
    assert lines.prompt_tokens == 9


def test_a_vector_is_given_before_the_next_one_is_there() -> None:
    lines = VectorLines(IN_LINES, InputRange(0, 2), 2)
    assert [index for index, _ in lines.feed(written(vector(1)) + b'{"index":0,')] == [1]


def test_a_server_that_answers_in_one_piece_is_understood() -> None:
    lines = VectorLines(IN_ONE, InputRange(0, 2), 2)
    text = json.dumps({"data": [vector(0), vector(1)], **USAGE}).encode()
    assert lines.feed(text[:50]) == lines.feed(text[50:]) == []
    assert [index for index, _ in lines.end()] == [0, 1]
    assert lines.prompt_tokens == 9


@pytest.mark.parametrize(
    "lines", [[vector(0), USAGE], [vector(0), vector(1)], []], ids=["a vector is missing", "no usage", "nothing"]
)
def test_an_answer_that_ends_early_is_no_answer(lines: list[Line]) -> None:
    reader = VectorLines(IN_LINES, InputRange(0, 2), 2)
    reader.feed(written(*lines))
    with pytest.raises(BadAnswer, match="ended before"):
        reader.end()


@pytest.mark.parametrize("lines", [[vector(0), vector(0)], [vector(5)]])
def test_a_vector_that_nobody_asked_for_is_an_error(lines: list[Line]) -> None:
    with pytest.raises(BadAnswer, match="an unexpected vector"):
        VectorLines(IN_LINES, InputRange(0, 2), 2).feed(written(*lines))


@pytest.mark.parametrize("text", [b"no json\n", b'{"index":"x"}\n', b"\xff\n"])
def test_a_line_that_cannot_be_read_is_an_error(text: bytes) -> None:
    with pytest.raises(BadAnswer):
        VectorLines(IN_LINES, InputRange(0, 2), 2).feed(text)


def test_an_error_in_a_line_is_the_engines_and_names_the_batch() -> None:
    problem: Line = {"error": {"message": "NaN", "type": "ModelFailedError", "param": None, "code": 424, "index": 1}}
    lines = VectorLines(IN_LINES, InputRange(10, 2), 20)
    assert len(lines.feed(written(vector(0), problem))) == 1
    with pytest.raises(ModelFailed) as raised:
        lines.end()
    assert raised.value.index == 11
    assert str(raised.value).startswith("Inputs 10 to 11 of 20: NaN")
