"""Images in every place where clients put them."""

from __future__ import annotations

import base64
import json
from functools import partial
from typing import Any
from urllib.parse import quote, unquote_to_bytes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.api.wire import pipelines
from staged_pool.api.wire.dialects import classify, cohere, mixedbread, openai, pooling, rerank, score
from staged_pool.api.wire.exchange import Exchange, Read
from staged_pool.api.wire.images import read_image
from staged_pool.runtime.requests import (
    Chat,
    ClassifyRequest,
    Content,
    EmbedRequest,
    Image,
    ScoreRequest,
    TextInput,
    Video,
)
from staged_pool.runtime.results import ScoreResult, Usage
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.work import Request
from tests.support.cards import CLASSIFIER, EMBEDDER

DATA = b"\x89PNG\x00\xff not quite an image"
BASE64 = base64.b64encode(DATA).decode()
DATA_URL = f"data:image/png;base64,{BASE64}"
URL = "https://images.example/cat.png"
RERANK: Read = partial(rerank.read_rerank, version="1", kind="list", auto_truncate=True)

READ_EMBED: dict[str, Read] = {
    "/v1/embeddings": openai.read_embeddings,
    "/pooling": pooling.read_pooling,
    "/classify": classify.read_classify,
}


def read(reader: Read, **fields: Any) -> Request:
    card = CLASSIFIER if reader is classify.read_classify else EMBEDDER
    return Exchange(reader, json.dumps(fields).encode(), card, "r").decode()


def inputs(reader: Read = openai.read_embeddings, **fields: Any) -> tuple[object, ...]:
    request = read(reader, **fields)
    assert isinstance(request, EmbedRequest | ClassifyRequest)
    return request.inputs


def content(**part: Any) -> object:
    """Return the content of a message with one part."""
    [given_] = inputs(messages=[{"role": "user", "content": [part]}])
    assert isinstance(given_, TextInput)
    assert isinstance(given_.source, Chat)
    return given_.source.messages[0]["content"]


def rejection(reader: Read = openai.read_embeddings, **fields: Any) -> tuple[str, str | None, int | None]:
    with pytest.raises(InvalidInput) as caught:
        read(reader, **fields)
    return str(caught.value), caught.value.param, caught.value.index


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": DATA_URL}},
        {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "high"}},
        {"type": "image_url", "image_url": DATA_URL},
        {"type": "input_image", "image_url": DATA_URL, "detail": "auto"},
        {"type": "image", "image": DATA_URL},
        {"type": "image", "image": BASE64},
    ],
)
def test_a_part_of_a_message_shows_an_image_in_any_of_its_spellings(part: dict[str, Any]) -> None:
    assert content(**part) == (Image(DATA),)
    assert content(**part, uuid="k") == (Image(DATA, key="k"),)


def test_parts_of_a_message_keep_their_order() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "input_text", "text": "b"},
        {"type": "image_url", "image_url": {"url": DATA_URL}},
    ]
    for route in READ_EMBED.values():
        for fields in (
            {"messages": [{"role": "user", "content": parts}]},
            {"input": [{"role": "u", "content": parts}]},
        ):
            [given_] = inputs(route, **fields)
            assert isinstance(given_, TextInput)
            assert isinstance(given_.source, Chat)
            assert given_.source.messages[0]["content"] == ("a", Image(URL), "b", Image(DATA))


def test_a_batch_of_conversations_may_show_images() -> None:
    shown = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]
    found = inputs(messages=[shown, [{"role": "user", "content": "a"}]])
    assert [given_.source.images for given_ in found] == [(Image(URL),), ()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("route", READ_EMBED)
def test_objects_among_the_inputs_are_texts_and_images(route: str) -> None:
    found = inputs(READ_EMBED[route], input=[{"image": BASE64}, {"text": "a"}, {"image": URL}, {"image": DATA_URL}])
    assert found == (Image(DATA), TextInput("a"), Image(URL), Image(DATA))
    assert inputs(READ_EMBED[route], input={"image": URL}) == (Image(URL),)


def test_with_the_modality_of_images_a_text_says_where_an_image_is() -> None:
    assert inputs(input=[URL, BASE64, DATA_URL], modality="image") == (Image(URL), Image(DATA), Image(DATA))
    assert inputs(input=URL, modality="image") == (Image(URL),)
    assert inputs(input=[URL]) == (TextInput(URL),)
    assert rejection(input=["cat.png"], modality="image")[1:] == ("input", 0)


def test_coheres_images_and_inputs_are_images() -> None:
    reader: Read = partial(cohere.read_embed, version="2")
    assert inputs(reader, images=[DATA_URL, DATA_URL]) == (Image(DATA), Image(DATA))
    shown = {"type": "image_url", "image_url": {"url": DATA_URL}}
    one, two, three = inputs(
        reader,
        inputs=[{"content": [shown]}, {"content": [{"type": "text", "text": "a"}, shown]}, {"content": "b"}],
    )
    assert one == Image(DATA)
    assert isinstance(two, TextInput)
    assert two.source == Chat(({"role": "user", "content": ("a", Image(DATA))},))
    assert isinstance(three, TextInput)
    assert three.source == "b"


@pytest.mark.parametrize(
    ("given_", "wanted"),
    [
        ({"image": DATA_URL}, Image(DATA)),
        ({"image": BASE64}, Image(DATA)),
        ({"image_url": URL}, Image(URL)),
        ({"type": "image_url", "image_url": {"url": URL}}, Image(URL)),
        ({"content": [{"type": "image_url", "image_url": {"url": URL}}]}, Image(URL)),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": URL}}]},
            Chat(({"role": "user", "content": ("a", Image(URL))},)),
        ),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"text": "a"}, "a"),
        ("a", "a"),
    ],
)
def test_queries_and_documents_are_texts_images_or_both(given_: object, wanted: Content) -> None:
    for request in (
        read(score.read_score, queries=given_, documents=[given_, "b"]),
        read(RERANK, query=given_, documents=[given_, "b"]),
    ):
        assert isinstance(request, ScoreRequest)
        assert (request.queries, request.documents) == ((wanted,), (wanted, "b"))


BOTH = Chat(({"role": "user", "content": (Image(DATA), "a")},))


@pytest.mark.parametrize(
    ("given_", "wanted"),
    [
        ({"text": "a", "image": DATA_URL}, BOTH),
        ({"image": BASE64, "text": "a", "video": None, "image_url": None}, BOTH),
        ({"text": "a", "image_url": {"url": DATA_URL}}, BOTH),
        ({"content": [{"image": BASE64}, {"text": "a"}]}, BOTH),
        ({"content": [{"type": "input_image", "image_url": DATA_URL}, {"type": "input_text", "text": "a"}]}, BOTH),
        ({"content": [{"text": "a", "image": BASE64}]}, BOTH),
        (
            {"text": "a", "image": URL, "video": "https://videos.example/cat.mp4"},
            Chat(({"role": "user", "content": (Image(URL), Video("https://videos.example/cat.mp4"), "a")},)),
        ),
        ({"text": "", "image": DATA_URL}, Image(DATA)),
        ({"image_url": {"url": DATA_URL}}, Image(DATA)),
        ({"type": "image_url", "image_url": {"url": DATA_URL}}, Image(DATA)),
        ({"type": "input_text", "text": "a"}, "a"),
        ({"content": "a"}, "a"),
        ({"content": None, "text": "a"}, "a"),
    ],
)
def test_texts_and_images_of_one_object_are_one_input(given_: dict[str, Any], wanted: Content) -> None:
    for route in READ_EMBED.values():
        found = inputs(route, input=[given_, "b"])
        alone = inputs(route, input=given_)
        if isinstance(wanted, Image):
            assert found == (wanted, TextInput("b"))
        else:
            added = isinstance(wanted, str)
            assert found == (TextInput(wanted, add_special_tokens=added), TextInput("b"))
        assert alone == found[:1]
    if not isinstance(given_.get("content"), str):
        request = read(RERANK, query=given_, documents=[given_, "b"])
        assert isinstance(request, ScoreRequest)
        assert (request.queries, request.documents) == ((wanted,), (wanted, "b"))


def test_one_input_of_text_and_image_is_the_conversation_of_its_parts() -> None:
    talk = [{"role": "user", "content": [{"type": "image", "image": DATA_URL}, {"type": "text", "text": "a"}]}]
    cases: tuple[dict[str, Any], ...] = (
        {},
        {"add_generation_prompt": True, "chat_template_kwargs": {"x": 1}, "truncate_prompt_tokens": 9},
        {"mm_processor_kwargs": {"max_pixels": 4}, "add_special_tokens": True},
    )
    for fields in cases:
        assert inputs(input=[{"text": "a", "image": DATA_URL}], **fields) == inputs(messages=talk, **fields)


def test_parts_without_a_type_are_what_their_fields_are() -> None:
    assert content(text="a") == "a"
    assert content(image_url={"url": DATA_URL}) == (Image(DATA),)
    assert content(image=BASE64, uuid="k") == (Image(DATA, key="k"),)
    assert content(text="a", image=BASE64) == (Image(DATA), "a")
    reader: Read = partial(cohere.read_embed, version="2")
    [one] = inputs(reader, inputs=[{"content": [{"image": BASE64}, {"text": "a"}]}])
    assert isinstance(one, TextInput)
    assert one.source == BOTH
    asked = read(mixedbread.read_reranking, query="q", input=[{"text": "a", "image": BASE64}, {"image": BASE64}])
    assert isinstance(asked, ScoreRequest)
    assert asked.documents == (BOTH, Image(DATA))
    other = read(mixedbread.read_reranking, query="q", input=[{"source": "a book"}, {"image": URL, "title": "a cat"}])
    assert isinstance(other, ScoreRequest)
    assert other.documents == ("source: a book", f"image: {URL}\ntitle: a cat")
    assert pipelines.read_request(json.dumps({"data": [{"text": "a", "image": BASE64}]}).encode()) == {"data": [BOTH]}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({}, "text: this field is required"),
        ({"image": URL, "image_url": URL}, "expected either `image_url` or `image`, or a `type`"),
        (
            {"type": "image_url", "uuid": "k"},
            "image_url: this field is required: nothing is kept under a `uuid`, so send the data each time",
        ),
        (
            {"type": "image_url", "image_url": None, "uuid": "k"},
            "image_url: this field is required: nothing is kept under a `uuid`, so send the data each time",
        ),
        (
            {"type": "video", "uuid": "k"},
            "video: this field is required: nothing is kept under a `uuid`, so send the data each time",
        ),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
            "source: Anthropic's form is not read; expected `image` with a URL, a data URL or base64",
        ),
        (
            {"type": "input_image", "file_id": "file-1"},
            "file_id: uploaded files are not read; expected `image_url` with a URL or a data URL",
        ),
        (
            {"type": "input_file", "file_id": "file-1"},
            "type: `input_file` is not supported; `text`, `input_text`, `image_url`, `input_image`, `image`, "
            "`video_url` and `video` are",
        ),
    ],
)
def test_a_part_of_another_server_is_rejected_with_what_would_be_right(part: dict[str, Any], message: str) -> None:
    said, param, _ = rejection(messages=[{"role": "user", "content": [part]}])
    assert said.partition("messages[0].content[0]")[2].lstrip(".: ") == message
    assert param == "messages"
    said, param, index = rejection(RERANK, query="q", documents=["a", {"content": [part]}])
    assert said.partition("documents[1].content[0]")[2].lstrip(".: ") == message
    assert (param, index) == ("documents", 1)
    if part:
        said, param, index = rejection(input=["a", part])
        assert said.partition("input[1]")[2].lstrip(".: ") == message
        assert (param, index) == ("input", 1)


def test_a_ranking_repeats_urls_and_no_images() -> None:
    documents = [
        {"image": DATA_URL},
        {"content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": URL}, "uuid": "k"}]},
        "b",
    ]
    exchange = Exchange(RERANK, json.dumps({"query": "q", "documents": documents}).encode(), EMBEDDER, "r")
    exchange.decode()
    written = exchange.encode(ScoreResult(scores=np.array([3, 2, 1], np.float32), usage=Usage(1), model="m"))
    body = written.content if isinstance(written.content, bytes) else b"".join(written.content)
    assert [result["document"] for result in json.loads(body)["results"]] == [
        {"text": None, "multi_modal": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
        {"text": "a", "multi_modal": [{"type": "image_url", "image_url": {"url": URL}, "uuid": "k"}]},
        {"text": "b", "multi_modal": None},
    ]


def test_settings_of_the_image_processor_go_with_each_image() -> None:
    settings: dict[str, Any] = {
        "mm_processor_kwargs": {"max_pixels": 4},
        "media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}, "video": {"num_frames": 2}},
    }
    wanted = {"max_pixels": 4, "rgba_background_color": [0, 0, 0]}
    shown = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}]}]
    [one] = inputs(messages=shown, **settings)
    [two] = inputs(input=[{"image": URL}], **settings)
    [three] = inputs(partial(cohere.read_embed, version="2"), images=[DATA_URL], **settings)
    request = read(RERANK, query="a", documents=[{"image": URL}], **settings)
    assert isinstance(request, ScoreRequest)
    assert isinstance(one, TextInput)
    assert isinstance(one.source, Chat)
    assert [image.options for image in one.source.images] == [wanted]
    assert two == Image(URL, wanted)
    assert three == Image(DATA, wanted)
    assert request.documents == (Image(URL, wanted),)


@pytest.mark.parametrize(
    ("reader", "fields"),
    [
        (openai.read_embeddings, {"input": "a"}),
        (pooling.read_pooling, {"input": "a"}),
        (classify.read_classify, {"input": "a"}),
        (classify.read_classify_tokens, {"input": "a"}),
        (score.read_score, {"queries": "a", "documents": ["b"]}),
        (RERANK, {"query": "a", "documents": ["b"]}),
        (partial(cohere.read_embed, version="2"), {"texts": ["a"]}),
    ],
)
def test_the_salt_of_a_request_goes_with_it(reader: Read, fields: dict[str, Any]) -> None:
    assert read(reader, **fields).cache_salt is None
    assert read(reader, **fields, cache_salt="pepper").cache_salt == "pepper"
    for wrong in ("", "x" * 1025, 1):
        assert rejection(reader, **fields, cache_salt=wrong)[1] == "cache_salt"


@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs"])
def test_settings_of_the_image_processor_are_objects(field: str) -> None:
    assert rejection(openai.read_embeddings, **{"input": "a", field: 1})[1] == field


@pytest.mark.parametrize("colour", ["red", None, 5, [0, 0], [0, 0, 256], [0, 0, -1], [0, 0, True], [0, 0, 1.5]])
def test_a_background_is_a_colour(colour: object) -> None:
    fields = {"input": "a", "media_io_kwargs": {"image": {"rgba_background_color": colour}}}
    message, param, _ = rejection(openai.read_embeddings, **fields)
    assert message == "media_io_kwargs.image.rgba_background_color: expected three whole numbers from 0 to 255"
    assert param == "media_io_kwargs"


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("data:image/png;base64,Q", "expected base64 (RFC 4648, section 4 or 5) after the comma of a data URL"),
        ("data:image/png;base64,Q===", "expected base64 (RFC 4648, section 4 or 5) after the comma of a data URL"),
        ("data:image/png;base64,QQ==QQ==", "expected base64 (RFC 4648, section 4 or 5) after the comma of a data URL"),
        ("data:image/png;base64,QUJ\0", "expected base64 (RFC 4648, section 4 or 5) after the comma of a data URL"),
        ("data:image/png;base64,QUJé", "expected base64 (RFC 4648, section 4 or 5) after the comma of a data URL"),
        ("data:image/png;base64,", "the image is empty"),
        ("data:image/png;base64,QQ%3", "expected base64"),
        ("data:image/png;base64", "expected base64"),
        ("data:image/png", "expected base64"),
        ("data:,", "the image is empty"),
        ("data:;base64,%0A", "the image is empty"),
        ("data:,a\0", "expected base64"),
        ("data:,é", "expected base64"),
        ("ftp://images.example/a", "expected a URL (http, https, file or data)"),
        ("cat.png", "expected a URL (http, https, file or data)"),
        ("", "expected a URL (http, https, file or data)"),
        (BASE64, "expected a URL (http, https, file or data)"),
        (None, "this field is required"),
        (1, "expected a text"),
    ],
)
def test_anything_but_an_image_is_rejected_by_its_place_and_not_repeated(url: object, what: str) -> None:
    shown = {"type": "image_url", "image_url": {"url": url}}
    message, param, index = rejection(input=[[{"role": "u", "content": "a"}], [{"role": "u", "content": [shown]}]])
    assert message.startswith(f"input[1][0].content[0].image_url.url: {what}")
    assert (param, index) == ("input", 1)
    assert len(message) < 200


@pytest.mark.parametrize("lines", [f"{BASE64[:8]}\n{BASE64[8:]}\n", f" {BASE64[:5]}\r\n\t{BASE64[5:]}"])
def test_base64_may_come_in_lines(lines: str) -> None:
    assert inputs(input=[{"image": lines}]) == (Image(DATA),)
    assert content(type="image_url", image_url=f"DATA:image/PNG;x=y;BASE64,{lines}") == (Image(DATA),)


ESCAPED = "".join(f"%{byte:02x}" for byte in DATA)
URLSAFE = base64.urlsafe_b64encode(DATA).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:;base64,{BASE64}",
        f"data:base64;base64,{BASE64}",
        f"data:application/octet-stream;base64,{BASE64}",
        f"data:text/plain;charset=utf-8;base64,{BASE64}",
        f"data:image/jpeg;name=x.jpg;base64,{BASE64}",
        f'data:image/jpeg;name="a, b;c.jpg";base64,{BASE64}',
        f"data:image/jpeg;name={'a' * 255};base64,{BASE64}",
        f"data:image/png; base64 ,{BASE64}",
        f"DATA:IMAGE/PNG;BASE64,{BASE64}",
        f"  data:image/png;base64,{BASE64}\n",
        f"data:image/png;base64,{BASE64.rstrip('=')}",
        f"data:image/png;base64,{URLSAFE}",
        f"data:image/png;base64,{URLSAFE.rstrip('=')}",
        f"data:image/png;base64,{BASE64.replace('=', '%3D').replace('+', '%2b').replace('/', '%2F')}",
        f"data:image/png;base64,{BASE64[:8]}%0D%0A{BASE64[8:]}",
        f"data:image/png,{ESCAPED}",
        f"data:,{ESCAPED.upper()}",
        f"data:;charset=utf-8,{ESCAPED[:30]}\r\n{ESCAPED[30:]}",
    ],
)
def test_the_bytes_of_a_data_url_decide_and_not_how_it_is_written(url: str) -> None:
    assert base64.urlsafe_b64decode(URLSAFE) == DATA
    assert URLSAFE != BASE64
    assert content(type="image_url", image_url={"url": url}) == (Image(DATA),)
    assert inputs(input=[{"image": url}]) == (Image(DATA),)
    assert inputs(input=[url], modality="image") == (Image(DATA),)


@pytest.mark.parametrize("text", [BASE64.rstrip("="), URLSAFE, URLSAFE.rstrip("="), f"\n{BASE64}\n"])
def test_bare_base64_may_be_of_either_alphabet_and_without_padding(text: str) -> None:
    assert inputs(input=[{"image": text}]) == (Image(DATA),)


@given(st.binary(min_size=1))
def test_percent_encoding_is_undone_as_by_the_standard_library(data: bytes) -> None:
    url = "data:," + quote(data)
    assert read_image(url, "a", None, bare=False) == Image(data)
    odd = "data:,%" + quote(data) + "%4"
    assert read_image(odd, "a", None, bare=False) == Image(unquote_to_bytes(odd[6:]))


def test_what_calls_an_image_is_a_text() -> None:
    part = {"type": "image_url", "image_url": {"url": URL}, "uuid": 1}
    message, _, _ = rejection(messages=[{"role": "user", "content": [part]}])
    assert message == "messages[0].content[0].uuid: expected a text"


@given(st.binary(min_size=1), st.sampled_from(["", " ", "\n", "\r\n"]), st.integers(1, 80))
def test_every_image_is_read_as_it_was_written(data: bytes, space: str, width: int) -> None:
    text = base64.b64encode(data).decode()
    lines = space.join(text[first : first + width] for first in range(0, len(text), width))
    assert read_image(f"data:image/x;base64,{lines}", "a", None, bare=False) == Image(data)
    assert read_image(lines, "a", None, bare=True) == Image(data)


@given(st.text() | st.text().map("data:image/png;base64,".__add__) | st.text(st.sampled_from("AQ=:/+-_%;, dat")))
def test_any_text_is_an_image_or_rejected(text: str) -> None:
    for bare in (True, False):
        try:
            image = read_image(text, "a[0].b", 0, bare=bare)
        except InvalidInput as error:
            rejected = error
            assert rejected.param == "a"
            continue
        if isinstance(image.source, bytes) and "base64," in text and "%" not in text:
            written = "".join(text.rpartition(",")[2].split()).rstrip("=")
            assert image.source == base64.b64decode(
                written + "=" * (-len(written) % 4), b"-_" if "-" in written or "_" in written else None
            )
