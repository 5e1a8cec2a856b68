"""The choice of the prompt before a text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import EmbedRequest, TextInput
from staged_pool.runtime.tasks.embed import plan
from staged_pool.stages.errors import InvalidInput
from tests.support.cards import CARD

E5 = replace(CARD, prompts={"query": "query: ", "passage": "passage: "}, default_prompt="query: ")
BGE = replace(CARD, prompts={"query": "Represent this: "})


@pytest.mark.parametrize(
    ("card", "name", "prompt"),
    [
        (E5, None, "query: "),
        (E5, "query", "query: "),
        (E5, "passage", "passage: "),
        (E5, "document", "passage: "),
        (BGE, None, ""),
        (BGE, "query", "Represent this: "),
        (BGE, "document", ""),
    ],
)
def test_a_text_gets_the_prompt_of_what_it_is_said_to_be(card: ModelCard, name: str | None, prompt: str) -> None:
    request = EmbedRequest(inputs=(TextInput("a"),), prompt_name=name)
    (given,) = plan(request, card).inputs
    assert given.prompt == prompt


@pytest.mark.parametrize(("card", "name"), [(CARD, "query"), (E5, "classification"), (BGE, "")])
def test_a_prompt_that_the_model_does_not_have_is_rejected(card: ModelCard, name: str) -> None:
    with pytest.raises(InvalidInput, match="not one of the model's prompts"):
        plan(EmbedRequest(inputs=(TextInput("a"),), prompt_name=name), card)


def test_a_prompt_of_the_requests_own_replaces_any_other() -> None:
    (given,) = plan(EmbedRequest(inputs=(TextInput("a"),), prompt="mine: "), E5).inputs
    assert given.prompt == "mine: "
