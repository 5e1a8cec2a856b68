"""OpenAI's dialect, byte by byte: accepted requests, rejections with their words, and answers."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from staged_pool.api.wire.dialects import openai
from staged_pool.api.wire.encodings import Encoding, Form
from staged_pool.api.wire.exchange import Exchange
from staged_pool.runtime.requests import MODEL_MAX, EmbedRequest, TextInput
from staged_pool.runtime.results import EmbedResult, Usage
from staged_pool.stages.errors import InvalidInput
from tests.api.wire.reading import parsed
from tests.support.cards import CARD

OBJECT = "expected an object with `text`, `image`, `video` or several of them, or a message with a `role`"
FORMS = "`float`, `base64`, `bytes`, `bytes_only`, `float16`, `int8`, `uint8`, `binary`, `ubinary` (literal_error)"
TEXT = st.text(st.characters(codec="utf-8"))
IDS = st.lists(st.integers(0, 2**40), min_size=1)
VECTORS = st_numpy.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(1, 16)),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


def request(**fields: Any) -> EmbedRequest:
    return openai.read_embeddings(json.dumps(fields).encode(), CARD)[0]


def rejection(body: bytes) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        openai.read_embeddings(body, CARD)
    assert "\n" not in str(caught.value)
    return caught.value


@given(TEXT)
def test_any_text_is_one_input(text: str) -> None:
    assert request(input=text).inputs == (TextInput(text),)


@given(st.lists(TEXT, min_size=1))
def test_any_texts_keep_their_order(texts: list[str]) -> None:
    assert [i.source for i in request(input=texts).inputs] == texts


@given(IDS)
def test_a_list_of_token_ids_is_one_input(ids: list[int]) -> None:
    assert [i.source for i in request(input=ids).inputs] == [tuple(ids)]


@given(st.lists(IDS, min_size=1))
def test_a_list_of_lists_of_token_ids_is_many_inputs(lists: list[list[int]]) -> None:
    assert [i.source for i in request(input=lists).inputs] == [tuple(ids) for ids in lists]


@given(st.text(st.sampled_from(" \t\r\n")), st.text(st.sampled_from(" \t\r\n")))
def test_white_space_does_not_change_the_form(before: str, inside: str) -> None:
    body = f'{{"input":{before}[{inside}"a"{inside},{inside}"b"]{before}}}'
    assert [i.source for i in openai.read_embeddings(body.encode(), CARD)[0].inputs] == ["a", "b"]


def test_settings_reach_the_request() -> None:
    decoded = request(
        input=["a"],
        model="m",
        dimensions=8,
        truncate_prompt_tokens=7,
        truncation_side="left",
        add_special_tokens=False,
        use_activation=False,
    )
    text = TextInput("a", max_tokens=7, truncate_side="left", add_special_tokens=False)
    assert decoded == EmbedRequest(inputs=(text,), model="m", dimensions=8, normalize=False)


def test_nulls_and_unknown_fields_mean_the_defaults() -> None:
    nulls = dict.fromkeys(("model", "dimensions", "truncate_prompt_tokens", "truncation_side", "use_activation"))
    assert request(input="a", user="u", priority=3, extra={"x": [1]}, **nulls) == request(input="a")


def test_minus_one_cuts_at_what_the_model_takes() -> None:
    assert request(input="a", truncate_prompt_tokens=-1).inputs == (TextInput("a", max_tokens=MODEL_MAX),)


@pytest.mark.parametrize(
    ("body", "message", "param", "index"),
    [
        (b"", "The body is not valid JSON: Input data was truncated", None, None),
        (b'{"input":"a"', "The body is not valid JSON: Input data was truncated", None, None),
        (b'{\n"model":"\xff"}', "The body is not valid JSON: it is not UTF-8, from byte 10 of line 2 on", None, None),
        (b'{"input":NaN}', "The body is not valid JSON: JSON is malformed: invalid character (byte 9)", None, None),
        (b'{"input":"\xff"}', "The body is not valid JSON: it is not UTF-8", None, None),
        (b'{"input":["a","\xff"]}', "The body is not valid JSON: it is not UTF-8", None, None),
        ('{"input":"a"}'.encode("utf-16"), "The body is not valid JSON: it is UTF-16, but must be UTF-8", None, None),
        (
            '{"input":"a"}'.encode("utf-16-le"),
            "The body is not valid JSON: it is UTF-16, but must be UTF-8",
            None,
            None,
        ),
        (b'{"input":' + b"[" * 100_000, "The body is not valid JSON: it is nested too deeply", None, None),
        (b'{"x":' + b"[" * 100_000, "The body is not valid JSON: it is nested too deeply", None, None),
        (b'["a"]', "The body is wrong: Expected `object`, got `array`", None, None),
        (b'"a"', "The body is wrong: Expected `object`, got `str`", None, None),
        (b"{}", "input: this field is required", "input", None),
        (b'{"input":null}', "input: Expected `str`, got `null`", "input", None),
        (b'{"input":5}', "input: Expected `str`, got `int`", "input", None),
        (b'{"input":{}}', f"input: {OBJECT}", "input", None),
        (b'{"input":[]}', "You must pass at least one prompt", "input", None),
        (b'{"input":[[]]}', "input[0]: a list of token ids must not be empty", "input", 0),
        (b'{"input":[[1],[]]}', "input[1]: a list of token ids must not be empty", "input", 1),
        (b'{"input":[{"type":"text"}]}', "input[0].text: this field is required", "input", 0),
        (b'{"input":["a",1]}', "input[1]: Expected `str`, got `int`", "input", 1),
        (b'{"input":[1,"a"]}', "input[1]: Expected `int`, got `str`", "input", 1),
        (b'{"input":[1,true]}', "input[1]: Expected `int`, got `bool`", "input", 1),
        (b'{"input":[1.5]}', "input[0]: Expected `int`, got `float`", "input", 0),
        (b'{"input":[[1],["a"]]}', "input[1][0]: Expected `int`, got `str`", "input", 1),
        (b'{"input":[' + b"9" * 5000 + b"]}", "input[0]: Integer value out of range", "input", 0),
        (b'{"input":[3,-1]}', "Token id -1 is out of vocabulary", "input", 0),
        (b'{"input":"a","model":1}', "model: Expected `str | null`, got `int`", "model", None),
        (b'{"input":"a","dimensions":0}', "dimensions: Expected `int` >= 1", "dimensions", None),
        (b'{"input":"a","dimensions":true}', "dimensions: Expected `int | null`, got `bool`", "dimensions", None),
        (
            b'{"input":"a","encoding_format":"hex"}',
            f"encoding_format: Invalid enum value 'hex'; expected one of {FORMS}",
            "encoding_format",
            None,
        ),
        (
            b'{"input":"a","truncation_side":"middle"}',
            "truncation_side: Invalid enum value 'middle'; expected one of `left`, `right` (literal_error)",
            "truncation_side",
            None,
        ),
        (
            b'{"input":"a","truncate_prompt_tokens":-2}',
            "truncate_prompt_tokens: Expected `int` >= -1",
            "truncate_prompt_tokens",
            None,
        ),
        (
            b'{"input":"a","truncate_prompt_tokens":0}',
            "truncate_prompt_tokens: 0 leaves nothing of an input; expected -1 or at least 1",
            "truncate_prompt_tokens",
            None,
        ),
        (
            b'{"input":"a","normalize":true}',
            "Parameter `normalize` was removed; use `use_activation` instead.",
            "normalize",
            None,
        ),
    ],
)
def test_a_wrong_body_is_rejected_in_one_line_that_says_where(
    body: bytes, message: str, param: str | None, index: int | None
) -> None:
    error = rejection(body)
    assert (str(error), error.param, error.index) == (message, param, index)


@pytest.mark.parametrize(
    "body",
    [
        rb'{"input":"\ud800"}',
        rb'{"input":["a","\ud800"]}',
        rb'{"input":["\ud800","a"]}',
        rb'{"input":"\ud800\u0041"}',
        rb'{"input":"\udc00"}',
    ],
)
def test_half_of_a_surrogate_pair_is_rejected(body: bytes) -> None:
    assert str(rejection(body)) == "The body is not valid JSON: a text in it holds half of a surrogate pair"


@pytest.mark.parametrize("body", [b"", rb'{"input":"\ud83d', rb'{"input":"\ud83d\ude0'])
def test_a_body_that_is_cut_off_is_rejected_as_such(body: bytes) -> None:
    assert str(rejection(body)) == "The body is not valid JSON: Input data was truncated"


@pytest.mark.parametrize(
    "text", [rb"\ud83d", rb"\ud83d\n", rb"\ud83dx", rb"\ud83d\u0041", rb"\ud83d\ud83d", rb"\udc00"]
)
def test_half_of_a_surrogate_pair_is_told_whatever_follows_it(text: bytes) -> None:
    message = "The body is not valid JSON: a text in it holds half of a surrogate pair"
    assert str(rejection(b'{"input":"%s"}' % text)) == message


def test_of_what_the_caller_wrote_an_error_repeats_little_and_in_one_line() -> None:
    error = rejection(b'{"input":"a","encoding_format":"' + b"x" * 10**6 + b'"}')
    assert str(error) == f"encoding_format: Invalid enum value '{'x' * 39}…'; expected one of {FORMS}"
    error = rejection(b'{"input":"a","encoding_format":"it\'s ' + b"x" * 10**6 + rb'\n"}')
    assert str(error) == f"encoding_format: Invalid enum value 'it's {'x' * 34}…'; expected one of {FORMS}"
    assert len(str(rejection(b'{"input":"a","model":"' + b"x" * 10**6 + b'"}'))) < 100


@given(st.binary(max_size=200))
def test_no_bytes_at_all_raise_anything_but_invalid_input(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        openai.read_embeddings(body, CARD)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=8))
def test_no_value_of_input_raises_anything_but_invalid_input(value: object) -> None:
    try:
        openai.read_embeddings(json.dumps({"input": value}).encode(), CARD)
    except InvalidInput:
        return


def answer(vectors: np.ndarray[Any, Any], encoding: Form) -> Any:
    result = EmbedResult(dense=vectors, usage=Usage(7), model="m")
    return parsed(openai.encode_embeddings(result, {"": Encoding(encoding)}, request_id="r", created=1))


def test_eight_bits_beside_other_types_have_their_scale_too() -> None:
    body = {"input": "a", "embedding_type": ["float", "int8", "uint8"]}
    exchange = Exchange(openai.read_embeddings, json.dumps(body).encode(), CARD, "r")
    exchange.decode()
    result = EmbedResult(dense=np.array([[0.5, -1, 0, 0.25]], np.float32), usage=Usage(1), model="m")
    [row] = parsed(exchange.encode(result))["data"]
    assert row["scale"] == pytest.approx(1 / 127)
    assert row["embedding"] == {"float": [0.5, -1, 0, 0.25], "int8": [64, -127, 0, 32], "uint8": [192, 1, 128, 160]}


@given(VECTORS)
def test_both_encodings_give_the_very_same_float32_values(vectors: np.ndarray[Any, Any]) -> None:
    floats = [row["embedding"] for row in answer(vectors, "float")["data"]]
    np.testing.assert_array_equal(np.array(floats, dtype=np.float32), vectors)
    encoded = [base64.b64decode(row["embedding"]) for row in answer(vectors, "base64")["data"]]
    np.testing.assert_array_equal([np.frombuffer(row, "<f4") for row in encoded], vectors)


def test_the_answer_is_openais_field_by_field() -> None:
    assert answer(np.array([[0.5, 1], [2, 3]], np.float32), "float") == {
        "id": "embd-r",
        "object": "list",
        "created": 1,
        "model": "m",
        "data": [
            {"index": 0, "object": "embedding", "embedding": [0.5, 1.0]},
            {"index": 1, "object": "embedding", "embedding": [2.0, 3.0]},
        ],
        "usage": {
            "prompt_tokens": 7,
            "total_tokens": 7,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
    }


def test_a_view_into_wider_rows_is_encoded_too() -> None:
    wide = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert [row["embedding"] for row in answer(wide[:, 1:3], "float")["data"]] == [[1.0, 2.0], [5.0, 6.0]]


def test_a_call_answers_in_the_encoding_that_its_body_asked_for() -> None:
    call = Exchange(openai.read_embeddings, b'{"input":"a","encoding_format":"base64"}', CARD, "r")
    assert call.decode() == EmbedRequest(inputs=(TextInput("a"),))
    body = parsed(call.encode(EmbedResult(dense=np.ones((1, 2), np.float32), usage=Usage(1), model="m")))
    assert body["id"] == "embd-r"
    assert body["data"][0]["embedding"] == base64.b64encode(np.ones(2, "<f4").tobytes()).decode()


@pytest.mark.parametrize(
    ("fields", "prompt_name", "prompt"),
    [
        ({}, None, None),
        ({"input_type": "query"}, None, None),  # the model has no prompts: the purpose changes nothing
        ({"prompt_name": "query"}, "query", None),
        ({"prompt_name": "query", "input_type": "query"}, "query", None),
        ({"prompt": ""}, None, ""),
        ({"prompt": None, "input_type": None, "prompt_name": None}, None, None),
    ],
)
def test_a_prompt_is_named_in_either_way_or_given(
    fields: dict[str, object], prompt_name: str | None, prompt: str | None
) -> None:
    decoded = request(input="a", **fields)
    assert (decoded.prompt_name, decoded.prompt) == (prompt_name, prompt)


@pytest.mark.parametrize(
    "fields",
    [
        {"input_type": "query", "prompt_name": "document"},
        {"prompt": "x", "prompt_name": "q"},
        {"prompt": "", "input_type": "q"},
    ],
)
def test_two_prompts_are_rejected(fields: dict[str, str]) -> None:
    assert rejection(json.dumps({"input": "a", **fields}).encode()).param in fields


def test_the_list_of_models_holds_the_one_that_is_served() -> None:
    [model] = json.loads(openai.encode_models([CARD], created=1))["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("letters", "model", 512)


def test_the_facts_of_the_model_stand_under_one_key() -> None:
    [model] = json.loads(openai.encode_models([CARD], created=1))["data"]
    assert model["staged_pool"]["outputs"] == ["dense"]
    assert set(model["staged_pool"]) == set(CARD.__dataclass_fields__)
