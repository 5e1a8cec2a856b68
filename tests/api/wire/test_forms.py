"""Forms as browsers, curl and attackers send them."""

from __future__ import annotations

import json
from email.message import EmailMessage
from email.policy import HTTP
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.api.wire.dialects import classify, openai
from staged_pool.api.wire.exchange import Exchange
from staged_pool.api.wire.forms import MAX_PARTS, boundary_of, read_form
from staged_pool.runtime.requests import ClassifyRequest, EmbedRequest, Image, TextInput
from staged_pool.stages.errors import InvalidInput, TooLarge
from tests.needed import needs
from tests.support.cards import CARD

B = b"xyzzy"
FILE = 'form-data; name="image"; filename="cat.png"'


def part(disposition: str, data: bytes, *headers: str) -> bytes:
    head = "\r\n".join((f"Content-Disposition: {disposition}", *headers)).encode()
    return b"--" + B + b"\r\n" + head + b"\r\n\r\n" + data + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--" + B + b"--\r\n"


def field(name: str, value: str) -> bytes:
    return part(f'form-data; name="{name}"', value.encode())


def read(body: bytes | bytearray, boundary: bytes = B) -> EmbedRequest:
    request = Exchange(openai.read_embeddings, body, CARD, "r", boundary=boundary).decode()
    assert isinstance(request, EmbedRequest)
    return request


def json_of(body: bytes) -> Any:
    return json.loads(read_form(body, B).json)


def rejection(body: bytes) -> str:
    with pytest.raises(InvalidInput) as caught:
        read(body)
    assert type(caught.value) is InvalidInput
    return str(caught.value)


@pytest.mark.parametrize("name", ["input", "image", "images", "images[]", "file"])
def test_a_file_is_an_image(name: str) -> None:
    disposition = f'form-data; name="{name}"; filename="../../etc/x"'
    body = form(field("model", "m"), part(disposition, b"\x89PNG\r\n--\r\n\x00", "Content-Type: image/png"))
    request = read(bytearray(body))
    assert request.inputs == (Image(b"\x89PNG\r\n--\r\n\x00"),)
    assert request.model == "m"


@pytest.mark.parametrize("headers", [(), ("Content-Type: image/png",), ("Content-Type: text/plain; charset=utf-8",)])
def test_a_part_that_names_no_file_may_be_an_image_all_the_same(headers: tuple[str, ...]) -> None:
    for data in (
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0",
        b"GIF89a\x01\x00",
        b"RIFF\x04\x00\x00\x00WEBP",
        b"BM\x3a\x00",
    ):
        body = form(part('form-data; name="image"', data, *headers))
        assert read(body).inputs == (Image(data),)
    assert read(form(part('form-data; name="image"', b"YWI\n", *headers))).inputs == (Image(b"ab"),)


def test_files_and_texts_are_inputs_in_the_order_in_which_they_come() -> None:
    body = form(
        part(FILE, b"one"),
        field("input", "a text"),
        field("input", '["b", "c"]'),
        field("image", "https://images.example/cat.png"),
        part(FILE, b"two"),
    )
    assert read(body).inputs == (
        Image(b"one"),
        TextInput("a text"),
        TextInput("b"),
        TextInput("c"),
        Image("https://images.example/cat.png"),
        Image(b"two"),
    )


def test_fields_are_those_of_the_json_with_values_of_json_where_they_are() -> None:
    body = form(
        field("input", "7"),
        field("model", "letters"),
        field("dimensions", "2"),
        field("use_activation", "false"),
        field("mm_processor_kwargs", '{"max_pixels": 4}'),
        part(FILE, b"one"),
    )
    request = read(body)
    assert (request.model, request.dimensions, request.normalize) == ("letters", 2, False)
    assert request.inputs == (TextInput("7"), Image(b"one", {"max_pixels": 4}))


def test_a_conversation_may_be_sent_in_a_form() -> None:
    [given_] = read(form(field("messages", '[{"role": "user", "content": "hi"}]'))).inputs
    assert isinstance(given_, TextInput)


def test_token_ids_may_be_sent_in_a_form() -> None:
    assert read(form(field("input", "[1, 2]"))).inputs == (TextInput((1, 2)),)


def test_what_a_client_library_writes_is_read() -> None:
    request = httpx.Request(
        "POST",
        "http://test/",
        data={"model": "m"},
        files=[("images[]", ('ä b".png', b"one", "image/png")), ("images[]", ("c.png", b"two"))],
    )
    boundary = boundary_of(request.headers["content-type"].encode())
    assert read(request.read(), boundary).inputs == (Image(b"one"), Image(b"two"))


def test_what_the_standard_library_writes_is_read() -> None:
    message = EmailMessage(policy=HTTP)
    message["Content-Type"] = "multipart/form-data"
    one = EmailMessage(policy=HTTP)
    one["Content-Disposition"] = FILE
    one.set_payload("one")
    message.attach(one)
    head, _, body = message.as_bytes().partition(b"\r\n\r\n")
    boundary = boundary_of(head.partition(b"Content-Type:")[2].strip().replace(b"\r\n", b""))
    assert read(body, boundary).inputs == (Image(b"one"),)


def test_a_form_for_labels_is_read() -> None:
    request = Exchange(classify.read_classify, form(part(FILE, b"one")), CARD, "r", boundary=B).decode()
    assert isinstance(request, ClassifyRequest)
    assert request.inputs == (Image(b"one"),)


NOT_A_FORM = "The body is not valid multipart/form-data: "
LIMITED = needs("python-multipart", "0.0.27", "a limit on the headers of a part")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", f"{NOT_A_FORM}it ends before its last boundary"),
        (b"--" + B, f"{NOT_A_FORM}it ends before its last boundary"),
        (part(FILE, b"one"), f"{NOT_A_FORM}it ends before its last boundary"),
        (form(part(FILE, b"one"))[:-20], f"{NOT_A_FORM}it ends before its last boundary"),
        (b'{"input":"secret"}', NOT_A_FORM),
        (form(b"--" + B + b"\r\n\r\nsecret\r\n"), f"{NOT_A_FORM}a part has no name"),
        (form(part("form-data", b"secret")), f"{NOT_A_FORM}a part has no name"),
        (form(part('attachment; name="input"', b"secret")), f"{NOT_A_FORM}a part has no name"),
        pytest.param(form(part("form-data; name=a", b"1", "X: " + "y" * 2**20)), NOT_A_FORM, marks=LIMITED),
        pytest.param(form(part("form-data; name=a", b"1", *["X: y"] * 20)), NOT_A_FORM, marks=LIMITED),
        (form(part("form-data; name=a", b"1", "secret header")), NOT_A_FORM),
        (form(part('form-data; name="other"; filename="secret"', b"1")), "other: files are read in the fields file, "),
        (form(field("model", "a"), field("model", "b")), "model: this field is in the form twice"),
        (form(part('form-data; name="model"', b"secret\xff")), "model: expected UTF-8"),
        (form(part(b"form-data; name=\xff".decode("latin-1"), b"")), "input: this field is required"),
        (form(part(FILE, b"")), "input[0].image: the image is empty"),
        (form(field("image", "a secret.")), "input[0].image: expected base64"),
        (form(), "input: this field is required"),
        (form(field("input", "[" * 100_000)), ""),
        (form(field("messages", "[" * 100_000), field("input", "a")), "messages: give either `input` or `messages`"),
        (form(field("messages", "[]"), part(FILE, b"1")), "messages: give either `input` or `messages`"),
    ],
)
def test_what_is_wrong_with_a_form_is_told_and_not_repeated(body: bytes, message: str) -> None:
    if message:
        found = rejection(body)
        assert found.startswith(message)
        assert "secret" not in found
        assert len(found) < 200
    else:
        assert read(body).inputs == (TextInput("[" * 100_000),)


def test_a_form_has_a_limited_number_of_parts() -> None:
    assert len(read(form(*[field("input", "a")] * MAX_PARTS)).inputs) == MAX_PARTS
    with pytest.raises(TooLarge, match="more than 1000 parts"):
        read(form(*[field("input", "a")] * 100_000))


@pytest.mark.parametrize("boundary", ["", "; boundary=", '; boundary=""', f"; boundary={'b' * 71}", "; charset=utf-8"])
def test_a_form_says_what_separates_its_parts(boundary: str) -> None:
    with pytest.raises(InvalidInput, match="a form needs a boundary of 1 to 70 characters") as caught:
        boundary_of(f"multipart/form-data{boundary}".encode())
    assert caught.value.param == "Content-Type"


@given(st.lists(st.binary(max_size=100).filter(lambda data: B not in data), max_size=5), st.integers(0, 2))
def test_images_come_through_as_they_are(images: list[bytes], larger: int) -> None:
    sent = [image + b"\r\n--xyzz" * (10_000 * larger) + b"." for image in images]
    body = form(field("input", "a"), *(part(FILE, data) for data in sent))
    assert read(body).inputs == (TextInput("a"), *map(Image, sent))


@given(st.data())
def test_a_form_with_some_bytes_replaced_is_a_request_or_invalid_input(data: st.DataObject) -> None:
    body = bytearray(form(field("input", "a"), field("dimensions", "2"), part(FILE, b"one", "Content-Type: image/png")))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body)))
        body[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    try:
        read(body)
    except InvalidInput as error:
        rejected = error
        assert len(str(rejected)) < 300


def test_json_in_a_form_is_what_its_fields_say() -> None:
    body = form(field("a", "1"), field("b", "one"), field("c", '"1"'), field("d", "null"), field("input", '{"x": 1}'))
    assert json_of(body) == {"a": 1, "b": "one", "c": "1", "d": None, "input": [{"x": 1}]}
