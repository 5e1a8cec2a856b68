"""Inputs in every form that clients send: texts, token ids, conversations and pairs."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.inputs import InputFields, text_inputs, text_or_pair_inputs
from staged_pool.runtime.requests import Chat, Image, PairInput, TextInput
from staged_pool.stages.errors import InvalidInput

FIELDS = msgspec.json.Decoder(InputFields)
TEXT = st.text(st.characters(codec="utf-8"))
MESSAGE = st.fixed_dictionaries({"role": TEXT, "content": TEXT}, optional={"name": TEXT})
CONVERSATION = st.lists(MESSAGE, min_size=1, max_size=3)
HELLO = {"role": "user", "content": "hello"}


def texts(**fields: Any) -> tuple[TextInput, ...]:
    return text_inputs(json_decode.decode(FIELDS, json.dumps(fields).encode()))[0]


def texts_or_pairs(**fields: Any) -> tuple[TextInput | PairInput | Image, ...]:
    return text_or_pair_inputs(json_decode.decode(FIELDS, json.dumps(fields).encode()))[0]


def chat(**fields: Any) -> Chat:
    [given_] = texts(**fields)
    assert isinstance(given_.source, Chat)
    return given_.source


@given(CONVERSATION, st.sampled_from(["input", "messages"]))
def test_a_list_of_messages_is_one_conversation(messages: list[dict[str, str]], field: str) -> None:
    assert chat(**{field: messages}).messages == tuple(messages)


@given(st.lists(CONVERSATION, min_size=1, max_size=3), st.sampled_from(["input", "messages"]))
def test_a_list_of_lists_of_messages_is_many_conversations(lists: list[list[dict[str, str]]], field: str) -> None:
    assert [given_.source for given_ in texts(**{field: lists})] == [Chat(tuple(messages)) for messages in lists]


@given(st.lists(TEXT, max_size=4))
def test_the_parts_of_a_message_become_its_lines(lines: list[str]) -> None:
    parts = [{"type": "text", "text": line} for line in lines]
    [message] = chat(messages=[{"role": "user", "content": parts}]).messages
    assert message == {"role": "user", "content": "\n".join(lines)}


def test_other_fields_of_a_message_stay() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    [message] = chat(messages=[call]).messages
    assert message == {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}


def test_settings_of_the_template_reach_it() -> None:
    conversation = chat(messages=[HELLO], add_generation_prompt=True, chat_template_kwargs={"thinking": False})
    assert conversation == Chat((HELLO,), add_generation_prompt=True, template_arguments={"thinking": False})
    assert chat(messages=[HELLO], continue_final_message=True).continue_final_message


def test_special_tokens_are_added_to_texts_and_not_to_conversations_unless_told_otherwise() -> None:
    assert texts(input="a")[0].add_special_tokens
    assert not texts(input="a", add_special_tokens=False)[0].add_special_tokens
    assert not texts(messages=[HELLO])[0].add_special_tokens
    assert texts(messages=[HELLO], add_special_tokens=True)[0].add_special_tokens


def test_a_null_field_is_one_that_was_not_sent() -> None:
    assert texts(input=None, messages=[HELLO]) == texts(messages=[HELLO])
    assert texts(input="a", messages=None) == texts(input="a")
    nulls = dict.fromkeys(("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"))
    assert texts(messages=[HELLO], **nulls) == texts(messages=[HELLO])


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({}, "input: this field is required", "input"),
        ({"input": "a", "messages": [HELLO]}, "messages: give either `input` or `messages`", "messages"),
        ({"messages": []}, "messages: at least one message is needed", "messages"),
        ({"messages": [[]]}, "messages[0]: at least one message is needed", "messages"),
        ({"messages": [[HELLO], []]}, "messages[1]: at least one message is needed", "messages"),
        ({"messages": "hi"}, "messages: expected a list of messages, or a list of such lists", "messages"),
        ({"messages": {}}, "messages: expected a list of messages, or a list of such lists", "messages"),
        ({"messages": ["hi"]}, "messages: expected a list of messages, or a list of such lists", "messages"),
        ({"messages": [HELLO, 1]}, "messages[1]: Expected `object`, got `int`", "messages"),
        ({"messages": [[HELLO], HELLO]}, "messages[1]: Expected `array`, got `object`", "messages"),
        ({"input": [HELLO, "a"]}, "input[1]: Expected `object`, got `str`", "input"),
        ({"input": [[HELLO], [1]]}, "input[1][0]: Expected `object`, got `int`", "input"),
        ({"input": [[1], [HELLO]]}, "input[1][0]: Expected `int`, got `object`", "input"),
        ({"input": [["a", "b"]]}, "input[0][0]: Expected `int`, got `str`", "input"),
        ({"messages": [{"content": "a"}]}, "messages[0].role: this field is required", "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: this field is required", "messages"),
        ({"messages": [{"role": 1, "content": "a"}]}, "messages[0].role: expected a text", "messages"),
        (
            {"messages": [HELLO, {"role": "user", "content": None}]},
            "messages[1].content: expected a text or a list of parts",
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": ["a"]}]},
            "messages[0].content[0]: expected an object with a `type`",
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": [{"words": "a"}]}]},
            "messages[0].content[0].text: this field is required",
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": 1}]}]},
            "messages[0].content[0].type: expected a text",
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text: this field is required",
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content[0].text: expected a text",
            "messages",
        ),
        (
            {"messages": [[HELLO], [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]]},
            "messages[1][0].content[0].image_url.url: this field is required",
            "messages",
        ),
        (
            {"messages": [HELLO], "chat_template": "{{ x }}"},
            "Chat template is passed with request, but only the model's own is run. Refused request with untrusted "
            "chat template.",
            "chat_template",
        ),
        (
            {"messages": [HELLO], "add_generation_prompt": True, "continue_final_message": True},
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            "continue_final_message",
        ),
        (
            {"messages": [HELLO], "chat_template_kwargs": [1]},
            "chat_template_kwargs: Expected `object | null`, got `array`",
            "chat_template_kwargs",
        ),
    ],
)
def test_what_is_wrong_is_named_in_one_line(fields: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        texts(**fields)
    assert (str(caught.value), caught.value.param) == (message, param)


def test_the_type_of_a_part_is_not_repeated_at_length() -> None:
    with pytest.raises(InvalidInput) as caught:
        texts(messages=[{"role": "user", "content": [{"type": "x" * 10_000}]}])
    assert len(str(caught.value)) < 200


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1))
def test_a_list_of_lists_of_two_texts_is_a_list_of_pairs(pairs: list[tuple[str, str]]) -> None:
    read = texts_or_pairs(input=pairs, truncate_prompt_tokens=5)
    assert read == tuple(PairInput(first=first, second=second, max_tokens=5) for first, second in pairs)


def test_a_pair_is_cut_on_the_side_that_the_request_names() -> None:
    for side in ("left", "right"):
        (pair,) = texts_or_pairs(input=[["a", "b"]], truncate_prompt_tokens=5, truncation_side=side)
        assert pair == PairInput(first="a", second="b", max_tokens=5, truncate_side=side)
    (pair,) = texts_or_pairs(input=[["a", "b"]], truncate_prompt_tokens=5)
    assert isinstance(pair, PairInput)
    assert pair.truncate_side is None  # the model's folder says it then


@given(TEXT | st.lists(TEXT, min_size=1) | CONVERSATION | st.lists(st.integers(0, 9), min_size=1))
def test_where_pairs_are_read_every_other_form_is_too(value: object) -> None:
    assert texts_or_pairs(input=value) == texts(input=value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": [["a"]]}, "input[0]: a pair has 2 texts, not 1"),
        ({"input": [["a", "b"], ["a", "b", "c"]]}, "input[1]: a pair has 2 texts, not 3"),
        ({"input": [["a", 1]]}, "input[0][1]: Expected `str`, got `int`"),
        (
            {"input": [["a", "b"]], "add_special_tokens": False},
            "add_special_tokens: a pair is not a pair without the tokens between its texts",
        ),
        (
            {"input": [["a", "b"]], "truncate_prompt_tokens": 0},
            "truncate_prompt_tokens: 0 leaves nothing of an input; expected -1 or at least 1",
        ),
    ],
)
def test_what_is_wrong_with_a_pair_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        texts_or_pairs(**fields)
    assert str(caught.value) == message
