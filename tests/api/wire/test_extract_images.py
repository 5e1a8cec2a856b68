"""Images that are set aside before JSON is read: nobody may notice."""

from __future__ import annotations

import base64
import json
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.api.wire import extract_images, json_decode
from staged_pool.api.wire.dialects import openai
from staged_pool.api.wire.exchange import Exchange
from staged_pool.runtime.requests import Chat, EmbedRequest, Image, TextInput
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.work import Request
from tests.support.cards import CARD

DATA = bytes(range(256)) * 256
LONG = base64.b64encode(DATA).decode()


def read(body: bytes | bytearray) -> Request:
    return Exchange(openai.read_embeddings, body, CARD, "r").decode()


def decoded(body: bytes) -> list[int]:
    """Collect the length of each text that the parser saw."""
    seen: list[int] = []

    def reader(json_: bytes | bytearray) -> object:
        seen.append(len(json_))
        return openai.read_embeddings(json_, CARD)

    extract_images.read_json(reader, body)
    return seen


def as_json(value: object, **settings: Any) -> bytes:
    return json.dumps(value, **settings).encode()


URLSAFE = base64.urlsafe_b64encode(b"\xff" + DATA).decode().rstrip("=")

IMAGES = {
    "data url": as_json({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{LONG}"}}, {"type": "text", "text": "hi"},
    ]}]}),
    "base64": as_json({"input": [{"image": LONG}, {"text": "a"}, {"image": LONG}]}),
    "compact": as_json({"input": [{"image": LONG}]}, separators=(",", ":")),
    "indented": as_json({"input": [{"image": LONG}]}, indent=8),
    "slashes": as_json({"input": [{"image": LONG}]}).replace(b"/", b"\\/"),
    "dotnet": as_json({"input": [{"image": LONG}]}).replace(b"+", b"\\u002B").replace(b"=", b"\\u003d"),
    "lines": as_json({"input": [{"image": base64.encodebytes(DATA).decode()}]}),
    "no padding": as_json({"input": [{"image": LONG.rstrip("=")}]}),
    "percent": as_json({"input": [{"image": "data:," + "".join(f"%{byte:02X}" for byte in DATA)}]}),
    "no type": as_json({"input": [{"image": f"data:;base64,{LONG}"}]}),
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGES)
def test_a_parser_sees_no_image(name: str) -> None:
    body = IMAGES[name]
    [length] = decoded(body)
    assert length < 400
    request = read(bytearray(body))
    assert request == openai.read_embeddings(body, CARD)[0]
    assert isinstance(request, EmbedRequest)
    assert DATA in [image.source for given_ in request.inputs for image in images_of(given_)]


@pytest.mark.parametrize("slice_", range(1, 16))
def test_an_escape_stays_whole_wherever_a_piece_ends(slice_: int) -> None:
    written = b"QQ\\u002BB\\/\\u002b\\nA\\u002F\\r\\u002fAAAA\\u002B\\u003d\\u003D"
    with mock.patch.object(extract_images, "BLOCK", 8), mock.patch.object(extract_images, "SLICE", slice_):
        cut = extract_images.extract(b'{"image":"' + written + b'"}')
        [mark] = json.loads(cut.json).values()
        held = cut.take(mark)
    assert held is not None
    assert bytes(held) == b"QQ+B/+A//AAAA+=="


def test_a_parser_sees_no_image_in_the_alphabet_of_urls_either() -> None:
    assert URLSAFE.startswith("_")
    body = as_json({"input": [{"image": URLSAFE}]})
    assert max(decoded(body)) < 400
    assert read(body) == openai.read_embeddings(body, CARD)[0]


def images_of(given_: object) -> tuple[Image, ...]:
    if isinstance(given_, Image):
        return (given_,)
    assert isinstance(given_, TextInput)
    return given_.source.images if isinstance(given_.source, Chat) else ()


@pytest.mark.parametrize(
    "body",
    [
        as_json({"input": "a" * 100_000}),
        as_json({"input": ["a" * 100_000, "b"]}),
        as_json({"input": "a", "other": LONG}),
        as_json({"input": [{"text": LONG}, {"image": LONG}]}),
        as_json({"messages": [{"role": "user", "content": LONG}]}),
        as_json({"messages": [{"role": LONG, LONG: LONG, "content": "a"}]}),
        as_json({"input": [1] * 100_000}),
        as_json({"input": [[7] * 50_000, [8] * 50_000]}),
        as_json({"input": "a" + " " * 100_000}),
        b'{"input":' + b" " * 100_000 + b'"a"}',
        as_json({"input": f'he said "{LONG}" and left'}),
        as_json({"input": f'he said \\"{LONG}\\" and left'}),
        as_json({"input": f"{LONG}\\"}),
        as_json({"input": f"{LONG}\n{LONG}/"}),
        as_json({"input": LONG + "é"}, ensure_ascii=True),
        as_json({"input": LONG + "é"}, ensure_ascii=False),
    ],
)
def test_a_long_text_that_is_no_image_stays_a_text(body: bytes) -> None:
    request = read(body)
    assert request == openai.read_embeddings(body, CARD)[0]
    assert b"extracted-" not in repr(request).encode()


@pytest.mark.parametrize(
    "body",
    [
        b'{"input":["a"' + LONG.encode() + b'"b"]}',
        b'{"input":"a' + LONG.encode(),
        b'{"input":' + LONG.encode() + b'"',
        b'"' + LONG.encode() + b'"',
        LONG.encode() * 2,
        as_json({"input": 1, "model": LONG}),
        as_json({LONG: 1}),
    ],
)
def test_what_is_wrong_is_told_as_if_nothing_had_been_extracted(body: bytes) -> None:
    with pytest.raises(InvalidInput) as expected:
        openai.read_embeddings(body, CARD)
    with pytest.raises(InvalidInput) as found:
        read(body)
    assert (str(found.value), found.value.param) == (str(expected.value), expected.value.param)
    assert "extracted-" not in str(found.value)


@pytest.mark.parametrize(
    "long",
    [LONG + "é", LONG + "\x7f", f"https://images.example/{LONG}", f"https://images.example/{LONG}é",
     f"data:text/html;base64{LONG}", f"data:image/png;base64,{LONG}A", LONG + "===="],
)  # fmt: skip
@pytest.mark.parametrize("escaped", [True, False])
def test_a_long_text_where_an_image_is_wanted_is_rejected(long: str, escaped: bool) -> None:
    with pytest.raises(InvalidInput, match=r"input\[0\].image: expected "):
        read(as_json({"input": [{"image": long}]}, ensure_ascii=escaped))


@pytest.mark.parametrize("raw", [b"\n", b"\r", b"\t", b"\x0b", b"\x00", b"\xff"])
def test_bytes_that_no_json_text_may_hold_are_rejected_in_an_image_too(raw: bytes) -> None:
    body = as_json({"input": [{"image": LONG}]})
    with pytest.raises(InvalidInput):
        openai.read_embeddings(body.replace(b"A", raw + b"A", 1), CARD)
    with pytest.raises(InvalidInput):
        read(body.replace(b"A", raw + b"A", 1))


def test_an_image_that_is_wrong_is_not_looked_at_twice() -> None:
    body = as_json({"input": [{"image": LONG + "_"}]})
    with mock.patch.object(json_decode, "decode", wraps=json_decode.decode) as parser:
        with pytest.raises(InvalidInput, match=r"input\[0\].image: expected base64"):
            read(body)
    assert max(len(call.args[1]) for call in parser.mock_calls if isinstance(call.args[1], bytes)) < 400


TEXT = st.text(st.sampled_from('aA0+/=\\" \n,:[]{}é')) | st.just("") | st.text()
LONGER = st.tuples(TEXT, st.integers(0, 200), TEXT).map(lambda parts: parts[0] + "Q" * parts[1] + parts[2])
VALUE = st.recursive(
    LONGER | st.integers() | st.none() | st.booleans(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(LONGER, values, max_size=4),
    max_leaves=8,
)


def put_back(value: object) -> object:
    """JSON with its marks undone."""
    if isinstance(value, str):
        held = extract_images.take(value)
        return value if held is None else bytes(held).decode()
    if isinstance(value, list):
        return [put_back(one) for one in value]
    if isinstance(value, dict):
        return {key if (held := extract_images.take(key)) is None else bytes(held).decode(): put_back(one)
                for key, one in value.items()}  # fmt: skip
    return value


@given(VALUE, st.booleans(), st.sampled_from([None, 1]))
def test_marks_stand_for_what_was_there(value: object, ascii_: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii_, indent=indent).encode()
    with mock.patch.object(extract_images, "BLOCK", 16), mock.patch.object(extract_images, "SLICE", 8):
        cut = extract_images.extract(body)
        found = extract_images.read_marked(lambda json_: put_back(json.loads(json_)), cut)
    unescaped = json.loads(json.dumps(value))
    assert without_breaks(found) == without_breaks(unescaped)
    assert not cut.remaining()


def without_breaks(value: object) -> object:
    """Remove ends of lines from texts like base64: they have no meaning there."""
    return json.loads(json.dumps(value).replace("\\n", "").replace("\\r", ""))


@given(st.binary(max_size=200).map(lambda some: b'"' * (len(some) % 3) + some) | st.text().map(str.encode))
def test_whatever_is_sent_is_left_as_it_is_or_cut_at_quotation_marks(body: bytes) -> None:
    with mock.patch.object(extract_images, "BLOCK", 4), mock.patch.object(extract_images, "SLICE", 3):
        cut = extract_images.extract(body)
    if not cut.remaining():
        assert cut.json == body
    assert bytes(cut.json).count(b'"') == body.count(b'"')
