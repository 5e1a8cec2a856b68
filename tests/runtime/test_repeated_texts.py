"""Texts that stand before each input of a request: preprocess writes a copy of them for each."""

from __future__ import annotations

import pytest

from staged_pool.runtime.engine.request_planner import MAX_REPEATED_CHARACTERS
from staged_pool.stages.errors import InvalidInput, TooLarge
from tests.servers.engines import engine_on
from tests.support.cards import CROSS_ENCODER
from tests.support.model import LetterModel

pytestmark = pytest.mark.anyio

LONG = "a" * (MAX_REPEATED_CHARACTERS // 2)
SAID = r"The text that stands before each of 3 inputs .* has 503316\d\d characters in all; a request may have 33554432"


async def test_copies_of_a_prompt_are_limited_before_they_are_made() -> None:
    model = LetterModel()
    async with engine_on(model) as engine:
        with pytest.raises(TooLarge, match=SAID):
            await engine.embed(["a", "b", "c"], prompt=LONG)
        assert model.preprocessed == []
        with pytest.raises(InvalidInput, match="too many tokens"):  # one copy is what the caller sent
            await engine.embed("a", prompt=LONG)


async def test_copies_of_a_query_and_an_instruction_are_limited() -> None:
    model = LetterModel(CROSS_ENCODER)
    async with engine_on(model) as engine:
        with pytest.raises(TooLarge, match=SAID):
            await engine.score("q", ["a", "b", "c"], instruction=LONG)
        with pytest.raises(TooLarge, match=r"each of 4 inputs .* has 50331648 characters"):  # the first is no copy
            await engine.score(LONG, ["a", "b", "c", "d"])
        assert model.preprocessed == []
        with pytest.raises(InvalidInput, match="too many tokens"):  # each pair has a query of its own
            await engine.score([LONG[:-1], LONG[:-2], LONG[:-3], LONG[:-4]], ["a", "b", "c", "d"])
