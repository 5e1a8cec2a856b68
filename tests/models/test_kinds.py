"""The tiny models and their oracles are sound: what the tests of a server lean on, without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.models import oracle, tiny
from tests.models.conftest import TinyFolder
from tests.models.oracle import Array

TEXTS = ["A man is eating food.", "The stock market fell sharply today.", "naïve café, Ωmega 🙂", "short"]
PAIRS = [(TEXTS[0], TEXTS[1]), (TEXTS[0], "Someone has a meal."), (TEXTS[2], TEXTS[3])]
LONG = "A function call with many arguments and one more. " * 60
APART = 1e-3
"""Results that should differ do so by far more than rounding."""


def differ(rows: Array | Sequence[Array]) -> bool:
    """Whether all rows are finite and no two are the same."""
    return all(
        np.isfinite(one).all() and np.abs(one - other).max() > APART
        for place, one in enumerate(rows)
        for other in rows[:place]
    )


@pytest.mark.parametrize("kind", tiny.CROSS_ENCODERS)
def test_scores_depend_on_both_texts_and_on_their_order(kind: str, tiny_folder: TinyFolder) -> None:
    logits = oracle.scores(tiny_folder(kind), [*PAIRS, *((b, a) for a, b in PAIRS)], activate=False)
    assert logits.shape[0] == 6
    assert differ(logits)


@pytest.mark.parametrize("kind", [kind for kind in tiny.CROSS_ENCODERS if kind != "ce-qwen3-lm"])
def test_a_pair_that_is_too_long_is_cut(kind: str, tiny_folder: TinyFolder) -> None:
    found = oracle.scores(tiny_folder(kind), [(TEXTS[0], LONG), (LONG, TEXTS[0]), (LONG, LONG)], activate=False)
    assert differ(found)


@pytest.mark.parametrize("kind", ["ce-bert-1label", "ce-xlmr-reranker", "ce-modernbert", "ce-qwen3-seqcls"])
def test_the_activation_is_a_sigmoid_where_the_folder_says_it_or_nothing(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    logits = oracle.scores(folder, PAIRS, activate=False)
    assert np.allclose(oracle.scores(folder, PAIRS), 1 / (1 + np.exp(-logits)), atol=1e-6)


@pytest.mark.parametrize("kind", ["ce-bert-identity", "ce-bert-old", "ce-nli-3label", "ce-qwen3-lm"])
def test_no_activation_where_the_folder_says_so_or_has_several_labels(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    assert np.array_equal(oracle.scores(folder, PAIRS), oracle.scores(folder, PAIRS, activate=False))


def test_types_of_tokens_change_the_score_of_a_pair(tiny_folder: TinyFolder) -> None:
    model = oracle.loaded_cross_encoder(tiny_folder("ce-bert-1label"))
    features = model.preprocess([PAIRS[0]])
    assert features["token_type_ids"].sum() > 0
    with_types = model.model(**_inputs(features)).logits.item()
    features["token_type_ids"] *= 0
    assert abs(with_types - model.model(**_inputs(features)).logits.item()) > APART


def test_a_language_model_scores_by_its_template(tiny_folder: TinyFolder) -> None:
    folder = tiny_folder("ce-qwen3-lm")
    plain = oracle.scores(folder, PAIRS)
    assert differ([plain, oracle.scores(folder, PAIRS, prompt="Find something else")])
    model = oracle.loaded_cross_encoder(folder)
    prompt = model.tokenizer.decode(model.preprocess([PAIRS[0]])["input_ids"][0])
    assert prompt.startswith("<|im_start|>system\nJudge whether")
    assert f"<Query>: {PAIRS[0][0]}\n<Document>: {PAIRS[0][1]}<|im_end|>" in prompt
    assert prompt.endswith("<think>\n\n</think>\n\n")


def test_the_folder_of_a_language_model_is_the_one_that_is_saved(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("ce-qwen3-lm")
    oracle.loaded_cross_encoder(folder).save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    for name in ("modules.json", "sentence_bert_config.json", "1_LogitScore/config.json", "chat_template.jinja"):
        ours, theirs = ((root / name).read_text() for root in (folder, tmp_path / "saved"))
        assert (ours if name.endswith("jinja") else json.loads(ours)) == (
            theirs if name.endswith("jinja") else json.loads(theirs)
        )


@pytest.mark.parametrize("kind", tiny.CLASSIFIERS)
def test_labels_depend_on_the_text(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    logits = oracle.labels(folder, [*TEXTS, LONG], activate=False)
    assert differ(logits)
    found = oracle.labels(folder, [*TEXTS, LONG])
    if kind == "seqcls-regression":
        assert np.array_equal(found, logits)
    elif kind in ("seqcls-multilabel", "reward-qwen3"):
        assert np.allclose(found, 1 / (1 + np.exp(-logits)), atol=1e-6)
    else:
        assert np.allclose(found.sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("kind", tiny.TOKEN_CLASSIFIERS)
def test_tokens_are_labelled(kind: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind)
    logits = oracle.token_labels(folder, TEXTS[0])
    assert logits.shape[1] == 5
    assert differ(logits)
    assert oracle.token_labels(folder, LONG).shape == (tiny.POSITIONS, 5)


@pytest.mark.parametrize("kind", tiny.TOKEN_CLASSIFIERS)
def test_entities_depend_on_the_aggregation(kind: str, tiny_folder: TinyFolder) -> None:
    text = "Unfortunately Guido van Rossum programmed extensively in Amsterdam, notwithstanding interpretability."
    found = {
        name: oracle.entities(tiny_folder(kind), text, name) for name in ("none", "simple", "first", "average", "max")
    }
    assert all(found.values())
    assert len({str(each) for each in found.values()}) == 5


def _inputs(features: dict[str, object]) -> dict[str, object]:
    return {name: features[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
