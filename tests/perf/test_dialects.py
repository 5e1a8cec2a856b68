"""Requests to other servers, and reading and comparing their answers."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from perf.peers.dialects import BENTOML, INFINITY, VLLM, Dialect, least_cosine, listed_vectors, openai_vectors, scores
from perf.peers.inputs import Answers, Disagreement, agreement

VECTORS = np.array([[1.0, 0.0], [0.6, 0.8]], np.float32)


def body_of(request: bytes) -> dict[str, object]:
    body: dict[str, object] = json.loads(request.partition(b"\r\n\r\n")[2])
    return body


def test_vectors_are_read_as_base64_and_as_numbers_in_the_order_of_the_texts() -> None:
    data = [
        {"index": 1, "embedding": VECTORS[1].tolist()},
        {"index": 0, "embedding": base64.b64encode(VECTORS[0].tobytes()).decode()},
    ]
    np.testing.assert_array_equal(openai_vectors(json.dumps({"data": data}).encode()), VECTORS)


def test_a_bare_list_of_vectors_is_read() -> None:
    body = json.dumps([base64.b64encode(vector.tobytes()).decode() for vector in VECTORS]).encode()
    np.testing.assert_array_equal(listed_vectors(body), VECTORS)


def test_scores_are_read_in_the_order_of_the_documents() -> None:
    results = [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.2}]
    assert scores(json.dumps({"results": results}).encode()) == [0.2, 0.9]


@pytest.mark.parametrize(("dialect", "field"), [(VLLM, "input"), (INFINITY, "input"), (BENTOML, "texts")])
def test_every_server_is_sent_the_same_texts_in_its_own_field(dialect: Dialect, field: str) -> None:
    assert body_of(dialect.embed(["one", "two"]))[field] == ["one", "two"]


def test_the_worst_vector_decides_how_well_two_servers_agree() -> None:
    assert least_cosine(VECTORS, VECTORS * 3) == pytest.approx(1.0)
    assert least_cosine(VECTORS, VECTORS[::-1]) == pytest.approx(0.6)


@pytest.mark.parametrize(
    "theirs", [VECTORS[:1], np.zeros_like(VECTORS), np.full_like(VECTORS, np.nan)], ids=["missing", "zero", "nan"]
)
def test_vectors_that_cannot_be_compared_are_a_disagreement(theirs: np.ndarray) -> None:
    with pytest.raises(Disagreement):
        agreement(Answers(VECTORS, None), Answers(theirs, None))


def test_a_server_that_computes_something_else_is_told_by_its_cosine() -> None:
    with pytest.raises(Disagreement, match=r"0\.6000, expected at least 0\.99"):
        agreement(Answers(VECTORS, None), Answers(VECTORS[::-1], None))


def test_a_server_whose_scores_are_off_disagrees() -> None:
    ours = Answers(VECTORS, (0.5, 0.1))
    assert agreement(ours, Answers(VECTORS, (0.505, 0.1))) == pytest.approx(1.0)
    with pytest.raises(Disagreement, match=r"a score is off by 0\.100"):
        agreement(ours, Answers(VECTORS, (0.5, 0.2)))
