"""`/tokenize` and `/detokenize`, byte by byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.api.wire.dialects import tokens
from staged_pool.runtime.requests import Chat
from staged_pool.runtime.tokens import Tokens
from staged_pool.stages.errors import InvalidInput

HELLO = {"role": "user", "content": "hello"}


def read(**fields: Any) -> tuple[str | Chat, tokens.TokenizeBody]:
    return tokens.decode_tokenize(json.dumps(fields).encode())


def test_a_text_has_vllms_defaults() -> None:
    source, fields = read(prompt="a")
    assert (source, fields.model, fields.add_special_tokens, fields.return_token_strs) == ("a", None, True, False)
    assert read(prompt="a", messages=None, add_special_tokens=None, return_token_strs=None)[0] == "a"


def test_a_conversation_has_vllms_defaults() -> None:
    source, fields = read(messages=[HELLO])
    assert source == Chat((HELLO,), add_generation_prompt=True)
    assert fields.add_special_tokens is False


def test_settings_of_a_conversation_reach_it() -> None:
    source, fields = read(messages=[HELLO], add_generation_prompt=False, add_special_tokens=True)
    assert (source, fields.add_special_tokens) == (Chat((HELLO,)), True)
    assert read(messages=[HELLO], continue_final_message=True)[0] == Chat((HELLO,), continue_final_message=True)


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({}, "prompt: this field is required", "prompt"),
        ({"prompt": 1}, "prompt: Expected `str | null`, got `int`", "prompt"),
        ({"prompt": "a", "messages": [HELLO]}, "messages: give either `prompt` or `messages`", "messages"),
        ({"messages": [[HELLO], [HELLO]]}, "messages: expected one conversation", "messages"),
        ({"messages": []}, "messages: at least one message is needed", "messages"),
        (
            {"messages": [HELLO], "add_generation_prompt": True, "continue_final_message": True},
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            "continue_final_message",
        ),
        ({"prompt": "a", "model": "x" * 1025}, "model: Expected `str` of length <= 1024", "model"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(**fields)
    assert (str(caught.value), caught.value.param) == (message, param)


@given(st.binary(max_size=200))
def test_no_bytes_at_all_raise_anything_but_invalid_input(body: bytes) -> None:
    for decode in (tokens.decode_tokenize, tokens.decode_detokenize):
        with pytest.raises(InvalidInput):
            decode(body)


@pytest.mark.parametrize("with_strings", [True, False])
def test_tokens_are_answered_with_their_strings_only_if_asked(with_strings: bool) -> None:
    body = json.loads(
        tokens.encode_tokens(Tokens([5, 6], ["a", "b"], [(0, 1), (1, 2)]), max_tokens=9, with_strings=with_strings)
    )
    strings = ["a", "b"] if with_strings else None
    assert body == {"count": 2, "max_model_len": 9, "tokens": [5, 6], "token_strs": strings}


@given(st.lists(st.integers(0, 2**40)))
def test_tokens_are_read(ids: list[int]) -> None:
    fields = tokens.decode_detokenize(json.dumps({"tokens": ids, "model": "m"}).encode())
    assert (fields.tokens, fields.model) == (ids, "m")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{}", "tokens: this field is required"),
        (b'{"tokens":[1,-1]}', "tokens[1]: Expected `int` >= 0"),
        (b'{"tokens":["a"]}', "tokens[0]: Expected `int`, got `str`"),
        (b'{"tokens":null}', "tokens: Expected `array`, got `null`"),
    ],
)
def test_what_is_wrong_with_tokens_is_named(body: bytes, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        tokens.decode_detokenize(body)
    assert (str(caught.value), caught.value.param) == (message, "tokens")


@given(st.text(st.characters(codec="utf-8")))
def test_a_text_is_answered_as_it_is(text: str) -> None:
    assert json.loads(tokens.encode_text(text)) == {"prompt": text}
