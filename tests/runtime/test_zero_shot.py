"""Zero-shot classification in a running engine: a request of an item for each pair of a text and a label."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import anyio
import numpy as np
import pytest
from numpy.testing import assert_allclose

from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.errors import InvalidInput, TooLarge
from tests.servers.engines import engine_on
from tests.support.cards import CLASSIFIER
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

NLI: Final = replace(CLASSIFIER, labels=("contradiction", "neutral", "entailment"))
"""The double counts the letters a, b and c for these labels."""
TEXTS: Final = ["cc", "d"]
LABELS: Final = ["c", "acca", "e"]


async def test_scores_are_of_each_text_with_each_label() -> None:
    model = LetterModel(NLI)
    async with engine_on(model) as engine:
        found = await engine.classify(TEXTS, candidate_labels=LABELS, hypothesis_template="={}")
        apart = await engine.classify(TEXTS, candidate_labels=LABELS, hypothesis_template="={}", multi_label=True)
    assert sorted(model.preprocessed[0]) == sorted(f"{text}={label}" for text in TEXTS for label in LABELS)
    powers = np.exp([[3.0, 4.0, 2.0], [1.0, 2.0, 0.0]])
    assert_allclose(found.scores, powers / powers.sum(axis=1, keepdims=True), rtol=1e-6)
    assert_allclose(apart.scores, 1 / (1 + np.exp([[-3.0, -2.0, -2.0], [-1.0, 0.0, 0.0]])), rtol=1e-6)
    assert (found.labels, found.best.tolist()) == (tuple(LABELS), [1, 1])


async def test_each_pair_is_an_item_and_leaves_with_its_caller() -> None:
    gate = Gate()
    model = LetterModel(NLI, on_forward=gate)
    async with engine_on(model) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.classify, "first")
        await gate.arrived()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as callers:
                callers.start_soon(lambda: engine.classify(TEXTS, candidate_labels=LABELS))
                await until(lambda: engine.statistics().stages[1].done == 7)
                assert engine.statistics().admission.items == 7
                scope.cancel()
        assert engine.statistics().admission.items == 1
        gate.open()
    assert model.forwarded == [["first"]]
    assert engine.statistics().stages[2].dropped["abandoned"] == 6


async def test_pairs_are_limited_before_they_are_made() -> None:
    async with engine_on(LetterModel(NLI), EngineConfig(max_request_items=5)) as engine:
        with pytest.raises(TooLarge, match="2 texts with 3 candidate_labels are 6 pairs; a request may have 5"):
            await engine.classify(TEXTS, candidate_labels=LABELS)
        assert (await engine.classify(TEXTS, candidate_labels=LABELS[:2])).scores.shape == (2, 2)


async def test_an_error_names_the_text_and_not_the_pair() -> None:
    async with engine_on(LetterModel(NLI)) as engine:
        with pytest.raises(InvalidInput, match="too many tokens") as caught:
            await engine.classify(["a", "b" * 600], candidate_labels=LABELS)
    assert (caught.value.param, caught.value.index) == ("input", 1)
