"""The count of a body's images before it is decoded, in each dialect."""

from __future__ import annotations

import base64
import json
import random

import httpx
import pytest

from staged_pool.api.wire.image_count import BLOCK_BYTES, KEPT_BYTES, LOOK_BYTES, count_images

SIZES = (30, 3 * BLOCK_BYTES, 400_000)


def in_base64(size: int) -> str:
    return base64.b64encode(random.Random(size).randbytes(size * 3 // 4)).decode()


def data_url(size: int) -> str:
    return f"data:image/png;base64,{in_base64(size)}"


URL = "https://example.org/a.png"
PART = {"type": "image_url", "image_url": {"url": URL}}


def dialects(size: int) -> dict[str, tuple[object, int]]:
    url, bare = data_url(size), in_base64(size)
    part = {"type": "image_url", "image_url": {"url": url}}
    words = {"type": "text", "text": "what is the image?"}
    return {
        "a conversation": ({"messages": [{"role": "user", "content": [part, words, part]}]}, 2),
        "conversations": (
            {"messages": [[{"role": "user", "content": [PART]}], [{"role": "user", "content": [PART]}]]},
            2,
        ),
        "input_image": ({"messages": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}, 1),
        "an image part": ({"messages": [{"role": "user", "content": [{"type": "image", "image": bare}, words]}]}, 1),
        "Jina": ({"input": [{"image": bare}, {"text": "a"}, {"image": URL}]}, 2),
        "Cohere images": ({"images": [url, url, url], "input_type": "image"}, 3),
        "Cohere inputs": ({"inputs": [{"content": [part, words]}, {"content": [words]}]}, 1),
        "Voyage": ({"inputs": [{"content": [words, {"type": "image_base64", "image_base64": url}]}]}, 1),
        "Voyage, URL": ({"inputs": [{"content": [{"type": "image_url", "image_url": URL}]}]}, 1),
        "Infinity": ({"modality": "image", "input": [url, URL]}, 2),
        "Infinity, one": ({"input": URL, "modality": "image"}, 1),
        "NIM": ({"input": [url, "a", url], "modality": ["image", "text", "image"]}, 2),
        "Weaviate": ({"texts": ["a", "b"], "images": [bare, bare]}, 2),
        "scores": ({"query": "a", "documents": [{"content": [part]}, {"content": [words]}, {"content": [part]}]}, 2),
        "a text alone": ({"input": "a cat"}, 0),
        "texts": ({"input": ["a cat", "an image of it"] * 100}, 0),
        "a long text": ({"input": "a cat " * (size // 6)}, 0),
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", dialects(30))
def test_each_dialect_shows_its_images(name: str, size: int) -> None:
    body, images = dialects(size)[name]
    assert count_images(json.dumps(body).encode()) == images
    assert count_images(bytearray(json.dumps(body, separators=(",", ":")).encode())) == images


@pytest.mark.parametrize("size", SIZES)
def test_a_form_shows_its_images(size: int) -> None:
    file = random.Random(1).randbytes(size)
    form = httpx.Request(
        "POST", "http://test", files=[("image", ("a", file)), ("input", ("b", file))], data={"model": "a", "image": URL}
    )
    assert count_images(form.read(), form.headers["content-type"].encode()) == 3
    text = httpx.Request("POST", "http://test", files={"input": (None, "a text"), "model": (None, "b")})
    assert count_images(text.read(), text.headers["content-type"].encode()) == 0
    assert count_images(form.read(), b"multipart/form-data") is None


def test_a_route_of_images_alone_shows_them_as_texts() -> None:
    assert count_images(json.dumps({"input": [URL, URL]}).encode(), only_images=True) == 2
    assert count_images(json.dumps({"input": URL}).encode(), only_images=True) == 1
    assert count_images(b"{}", only_images=True) is None


def test_an_unclear_count_is_unknown() -> None:
    assert count_images(b'{"input":"image"}') is None
    assert count_images(b'{"input":"%s"}' % (b"a" * LOOK_BYTES)) is None
    assert count_images(b'{"input":[%s"a"]}' % (b'"a text",' * KEPT_BYTES)) is None
    assert count_images(b"") == 0
    assert count_images(b"\xff\x00") == 0


def test_of_a_very_long_body_the_beginning_is_counted() -> None:
    images = LOOK_BYTES // 2**20 + 4
    body = json.dumps({"images": [data_url(2**20)] * images}).encode()
    found = count_images(body)
    assert found is not None
    assert LOOK_BYTES // 2**20 - 1 <= found <= images
