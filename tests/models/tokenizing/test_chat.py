"""Conversations against `apply_chat_template` of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from staged_pool.runtime.requests import Chat, Output, TextInput
from tests.models.conftest import TinyFolder
from tests.models.reading import load, read, reader, rejection

TEMPLATE = """\
{%- if strict and messages[0].role != 'user' %}{{ raise_exception('no ' + messages[0].content) }}{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}{% if message.name is defined %} {{ message.name }}{% endif %}
{{ message.content }}{{ eos_token }}
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

MESSAGES: tuple[Mapping[str, object], ...] = (
    {"role": "system", "content": "Be kind.", "name": None},
    {"role": "user", "content": "naïve <|im_end|> question?  ", "name": "Eve"},
    {"role": "assistant", "content": "An answer"},
)


@pytest.fixture(params=["qwen3-embed-left", "bert-mean"])
def both(request: pytest.FixtureRequest, tiny_folder: TinyFolder) -> tuple[Any, Any]:
    source, theirs = load(request.param, tiny_folder)
    theirs.chat_template = TEMPLATE
    return reader(source, chat_template=TEMPLATE, special_tokens=theirs.special_tokens_map), theirs


@pytest.mark.parametrize("settings", [{}, {"add_generation_prompt": True}, {"continue_final_message": True}])
def test_a_conversation_becomes_the_tokens_of_transformers(settings: dict[str, Any], both: tuple[Any, Any]) -> None:
    ours, theirs = both
    theirs.special_tokens_map.setdefault("eos_token", "")
    for count in (1, 2, 3):
        messages = MESSAGES[:count]
        named = [{field: value for field, value in message.items() if value is not None} for message in messages]
        wanted = theirs.apply_chat_template(named, tokenize=False, **settings)
        chat = Chat(messages, **settings)
        assert (
            read(ours, TextInput(chat, add_special_tokens=False)).ids
            == theirs(wanted, add_special_tokens=False)["input_ids"]
        )
        assert read(ours, TextInput(chat)).ids == theirs(wanted)["input_ids"]
        assert (
            read(ours, TextInput(chat, max_tokens=7)).ids == theirs(wanted, truncation=True, max_length=7)["input_ids"]
        )


def test_arguments_reach_the_template_and_a_prompt_is_a_system_message(both: tuple[Any, Any]) -> None:
    ours, _ = both
    user = MESSAGES[1:2]
    plain = read(ours, TextInput(Chat(user))).ids
    assert read(ours, TextInput(Chat(user, template_arguments={"eos_token": "!"}))).ids != plain
    system = {"role": "system", "content": "query: "}
    assert read(ours, TextInput(Chat(user)), prompt="query: ").ids == read(ours, TextInput(Chat((system, *user)))).ids


def test_no_token_of_a_conversation_stands_for_a_text(both: tuple[Any, Any]) -> None:
    ours, _ = both
    assert read(ours, TextInput(Chat(MESSAGES)), outputs=frozenset({Output.TOKEN_LABELS})).spans is None


def test_many_threads_render_at_once(both: tuple[Any, Any]) -> None:
    ours, _ = both
    inputs = [TextInput(Chat(({"role": "user", "content": f"number {n}"},))) for n in range(400)]
    alone = [read(ours, given).ids for given in inputs]
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(lambda given: read(ours, given).ids, inputs)) == alone


@pytest.mark.parametrize(
    ("chat", "param", "message"),
    [
        (
            Chat(MESSAGES, add_generation_prompt=True, continue_final_message=True),
            "add_generation_prompt",
            "add_generation_prompt and continue_final_message exclude each other.",
        ),
        (Chat(()), "messages", "The conversation has no messages; it must have at least one."),
        (
            Chat(MESSAGES, template_arguments={"strict": True}),
            "messages",
            "The model's chat template does not accept these messages and arguments.",
        ),
        (
            Chat(({"role": "user", "content": None},), continue_final_message=True),
            "messages",
            "The model's chat template does not accept these messages and arguments.",
        ),
        (
            Chat(MESSAGES, template_arguments={"chat_template": "{{ 1 }}"}),
            "chat_template_kwargs",
            "chat_template is not an argument of chat templates.",
        ),
        (
            Chat(({"role": "user", "content": "\ud800"},)),
            "input",
            "The input is not valid Unicode: it has half of a surrogate pair.",
        ),
    ],
)
def test_a_conversation_that_cannot_be_used_is_rejected_in_words(
    chat: Chat, param: str, message: str, both: tuple[Any, Any]
) -> None:
    rejected = rejection(both[0], TextInput(chat))
    assert (str(rejected), rejected.param) == (message, param)
    assert rejected.__cause__ is None


def test_a_model_without_a_chat_template_takes_no_messages(tiny_folder: TinyFolder) -> None:
    source, _ = load("bert-mean", tiny_folder)
    assert source.chat_template is None
    rejected = rejection(reader(source), TextInput(Chat(MESSAGES)))
    assert "no chat template" in str(rejected)
    assert rejected.param == "messages"
