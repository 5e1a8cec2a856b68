"""Entities, against the token classification pipeline of transformers."""

from __future__ import annotations

from typing import Any, get_args

import anyio
import numpy as np
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.requests import MODEL_MAX, Aggregation
from staged_pool.runtime.spans import Span
from staged_pool.runtime.tasks.classify import activated
from staged_pool.runtime.tasks.entities import entities
from tests.models import oracle, tiny
from tests.models.conftest import TinyFolder

TEXTS = [
    "Angela visited Berlin and Paris in spring.",
    "",
    "naïve café, Ωmega 🙂",
    "A function call with many arguments. " * 40,
]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)

LABELS = ["O", "B-PER", "I-PER", "LOC"]


@pytest.mark.parametrize("kind", tiny.TOKEN_CLASSIFIERS)
def test_entities_are_those_of_transformers(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)

    async def program() -> Any:
        async with open_engine(EngineConfig(model=str(folder), dtype="float32")) as engine:
            return {
                how: await engine.classify_tokens(TEXTS, aggregation=how, max_tokens=MODEL_MAX) for how in AGGREGATIONS
            }

    results = anyio.run(program)
    assert any(results["simple"].entities)
    for how, result in results.items():
        for text, found in zip(TEXTS, result.entities, strict=True):
            expected = oracle.entities(folder, text, how) if text else []
            labels = [one.get("entity", one.get("entity_group")) for one in expected]
            assert [(one.label, one.start, one.end) for one in found] == [
                (label, one["start"], one["end"]) for label, one in zip(labels, expected, strict=True)
            ]
            assert np.allclose([one.score for one in found], [one["score"] for one in expected], atol=1e-4)
            assert all(one.text == text[one.start : one.end] for one in found)


def row(label: int, probability: float) -> list[float]:
    rest = (1 - probability) / (len(LABELS) - 1)
    return [probability if place == label else rest for place in range(len(LABELS))]


TEXT = "Ann Lee in Oslo"
SPANS = [Span(0, 0, None), Span(0, 2, 0), Span(2, 3, 0), Span(4, 7, 1), Span(8, 10, 2), Span(11, 15, 3)]
ROWS = np.array([row(3, 0.9), row(1, 0.6), row(0, 0.8), row(2, 0.7), row(0, 0.9), row(3, 0.5)], np.float32)


def found(how: Aggregation, source: object = TEXT, rows: Any = ROWS) -> list[tuple[str, float, str]]:
    return [(one.label, round(one.score, 3), one.text) for one in entities(source, SPANS, rows, LABELS, how)]


def test_without_aggregation_each_token_that_has_a_label_is_one_but_no_special_token() -> None:
    assert found("none") == [("B-PER", 0.6, "An"), ("I-PER", 0.7, "Lee"), ("LOC", 0.5, "Oslo")]


def test_simple_joins_neighbours_only() -> None:
    assert found("simple") == [("PER", 0.6, "An"), ("PER", 0.7, "Lee"), ("LOC", 0.5, "Oslo")]


def test_first_has_a_word_agree_on_its_first_token() -> None:
    assert found("first") == [("PER", 0.65, "Ann Lee"), ("LOC", 0.5, "Oslo")]


def test_max_has_a_word_agree_on_its_surest_token() -> None:
    assert found("max") == [("PER", 0.7, "Lee"), ("LOC", 0.5, "Oslo")]


def test_max_tells_apart_tokens_that_are_all_sure() -> None:
    """Both have probability 1 in float32; the second leaves far less to the other labels."""
    sure = activated(np.array([[0, 20, 0, 0], [0, 0, 0, 40]], np.float32), "softmax")
    assert sure.max(axis=1).tolist() == [1, 1]
    for of_word in (sure, sure[::-1]):
        rows = np.array([ROWS[0], *of_word, *ROWS[3:]], np.float32)
        assert found("max", rows=rows)[0][::2] == ("LOC", "Ann")


def test_average_has_a_word_agree_on_the_average() -> None:
    rows = ROWS.copy()
    rows[1] = row(1, 0.99)
    assert found("average", rows=rows)[0][::2] == ("PER", "Ann Lee")


def test_an_entity_that_begins_is_not_joined_to_the_one_before() -> None:
    rows = ROWS.copy()
    rows[1:4] = [row(1, 0.9), row(2, 0.9), row(1, 0.9)]
    assert [text for _, _, text in found("simple", rows=rows)] == ["Ann", "Lee", "Oslo"]


BIOES = ["O", "B-PER", "I-PER", "E-PER", "S-PER", "B-LOC", "I-LOC", "E-LOC", "S-LOC"]
BILOU = [label.replace("E-", "L-").replace("S-", "U-") for label in BIOES]
BMES = [label.replace("I-", "M-") for label in BIOES]
SIX = [Span(2 * place, 2 * place + 1, place) for place in range(6)]


@pytest.mark.parametrize("how", ["simple", "first", "average", "max"])
@pytest.mark.parametrize("labels", [BIOES, BILOU, BMES], ids=["BIOES", "BILOU", "BMES"])
@pytest.mark.parametrize(
    ("numbers", "joined"),
    [
        ([1, 2, 3, 0, 4, 4], [("PER", "a b c"), ("PER", "e"), ("PER", "f")]),
        ([1, 3, 1, 3, 8, 0], [("PER", "a b"), ("PER", "c d"), ("LOC", "e")]),
        ([1, 3, 3, 2, 7, 5], [("PER", "a b"), ("PER", "c"), ("PER", "d"), ("LOC", "e"), ("LOC", "f")]),
        ([2, 2, 4, 2, 2, 3], [("PER", "a b"), ("PER", "c"), ("PER", "d e f")]),
    ],
)
def test_labels_that_say_where_an_entity_ends_join_its_tokens(
    labels: list[str], numbers: list[int], joined: list[tuple[str, str]], how: Aggregation
) -> None:
    rows = np.full((6, len(labels)), 0.01, np.float32)
    rows[range(6), numbers] = 0.92
    found = entities("a b c d e f", SIX, rows, labels, how)
    assert [(one.label, one.text) for one in found] == joined


def test_a_letter_before_a_dash_is_no_prefix_of_a_label_that_never_begins() -> None:
    labels = ["O", "E-MAIL", "I-MAIL"]
    rows = np.full((6, 3), 0.01, np.float32)
    rows[range(6), [1, 1, 2, 0, 1, 0]] = 0.98
    assert [one.text for one in entities("a b c d e f", SIX, rows, labels, "simple")] == ["a b", "c", "e"]


@pytest.mark.parametrize("source", [(1, 2, 3, 4, 5, 6), object()])
def test_only_a_text_has_entities(source: object) -> None:
    assert found("simple", source) == []
    assert entities(TEXT, None, ROWS, LABELS, "simple") == ()
