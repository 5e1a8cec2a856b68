"""Pages from images and PDFs, of which a bad one fails alone."""

from __future__ import annotations

import base64
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from page_regions.pages import Page, PageReader
from page_regions.request import parse_request
from staged_pool import (
    EngineConfig,
    InvalidInput,
    MediaUnavailable,
    StagedPoolError,
    TooLarge,
    UnsupportedMedia,
    UnusableMedia,
    UrlNotAllowed,
)
from tests.examples.documents.drawn_pages import TWO_COLUMNS, Block, drawn, empty_pdf, encoded, pdf

PAGE = drawn(*TWO_COLUMNS)
OTHER = drawn(Block((100, 100), "another page"))


async def not_fetched(url: str) -> bytes:
    raise AssertionError(url)


def reader(**settings: Any) -> PageReader:
    return PageReader(not_fetched, EngineConfig(**settings))


def decoded(*data: bytes, **settings: Any) -> list[Page]:
    return list(reader(**settings).decode(data))


def image_of(page: Page) -> Image.Image:
    assert isinstance(page.image, Image.Image), page.image
    return page.image


def same(one: Image.Image, other: Image.Image, *, within: float = 0.0) -> bool:
    return one.size == other.size and float(np.abs(np.asarray(one, float) - np.asarray(other, float)).mean()) <= within


@pytest.mark.parametrize(("format", "within"), [("PNG", 0), ("BMP", 0), ("WEBP", 4), ("JPEG", 4)])
def test_an_image_is_one_page(format: str, within: float) -> None:
    (page,) = decoded(encoded(PAGE, format))
    assert (page.source, page.number) == (0, 0)
    assert same(image_of(page), PAGE, within=within)


def test_a_pdf_has_its_pages_in_their_order() -> None:
    first, second, third = decoded(pdf([PAGE, OTHER]), encoded(OTHER))
    assert [(page.source, page.number) for page in (first, second, third)] == [(0, 0), (0, 1), (1, 0)]
    for page, drawn_page in ((first, PAGE), (second, OTHER)):
        image = image_of(page)
        assert abs(image.width - drawn_page.width) <= 1  # sizes in points are rounded
        assert same(image.crop((0, 0, *drawn_page.size)), drawn_page, within=3)


def test_pdfs_are_read_in_many_threads_at_once() -> None:
    """PDFium itself must not run in two of them."""
    documents = [pdf([PAGE]), pdf([OTHER, PAGE]), pdf([OTHER])] * 4
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(decoded, documents))
    for pages, document in zip(found, documents, strict=True):
        alone = decoded(document)
        assert len(pages) == len(alone)
        assert all(same(image_of(one), image_of(other)) for one, other in zip(pages, alone, strict=True))


def test_a_damaged_pdf_is_read_or_rejected_and_nothing_else() -> None:
    whole = pdf([OTHER.resize((200, 260))] * 2, dots_per_inch=40)
    random = Random(7)
    outcomes: Counter[str] = Counter()
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(random.choice((1, 4, 16, 64))):
            data[random.randrange(len(data))] = random.randrange(256)
        outcomes.update(type(page.image).__name__ for page in decoded(bytes(data), max_image_pixels=1_000_000))
    assert outcomes["Image"] > 10
    assert outcomes["UnusableMedia"] > 10
    assert outcomes.keys() <= {"Image", "UnusableMedia", "UnsupportedMedia", "TooLarge"}


def test_a_bad_page_fails_alone() -> None:
    good = encoded(OTHER)
    bad = UnusableMedia("The host of the image answered with status 404.")
    found = list(reader().decode((good, bad, good[:-400], b"GIF8 and nothing", b"no image", good)))
    assert same(image_of(found[0]), OTHER)
    assert same(image_of(found[5]), OTHER)
    assert [type(page.image) for page in found[1:5]] == [
        UnusableMedia,
        UnusableMedia,
        UnsupportedMedia,
        UnsupportedMedia,
    ]


@pytest.mark.parametrize(
    ("data", "settings", "kind", "says"),
    [
        (encoded(PAGE), {"max_image_pixels": 10_000}, TooLarge, "850 x 1100 pixels, which are 935000"),
        (encoded(PAGE), {"max_image_bytes": 100}, TooLarge, "at most 100 are accepted"),
        (b"%PDF-1.7 and nothing", {}, UnusableMedia, "The PDF cannot be opened: it is damaged"),
        (empty_pdf((72e3, 72e3)), {}, TooLarge, "150000 x 150000 pixels at 150 dots per inch"),
        (empty_pdf(*[(72, 72)] * 65), {}, TooLarge, "The PDF has 65 pages: at most 64 are read."),
    ],
    ids=["pixels", "bytes", "damaged pdf", "poster", "book"],
)
def test_a_page_beyond_a_limit_is_rejected(
    data: bytes, settings: dict[str, Any], kind: type[StagedPoolError], says: str
) -> None:
    (page,) = decoded(data, **settings)
    assert type(page.image) is kind
    assert says in str(page.image)


def test_a_pdf_with_one_page_too_large_keeps_its_others() -> None:
    small, poster, last = decoded(empty_pdf((72, 36), (72e3, 72e3), (36, 36)))
    assert image_of(small).size == (150, 75)
    assert isinstance(poster.image, TooLarge)
    assert image_of(last).size == (75, 75)


@pytest.mark.anyio
async def test_sources_are_fetched_and_a_failure_is_kept_in_its_place() -> None:
    async def fetch(url: str) -> bytes:
        if url.endswith("404"):
            raise UnusableMedia("The host of the image answered with status 404.")
        if url.endswith("502"):
            raise MediaUnavailable("The host of the image could not be reached, or the connection broke.")
        if url.startswith("file:"):
            raise UrlNotAllowed("The URL of the image names a file, and this server reads no files.")
        return url.encode()

    text = base64.b64encode(b"a page").decode()
    sources = (
        "https://a.example/1", "https://a.example/404", "https://a.example/502", "file:///etc/passwd",
        f"data:image/png;base64,{text}", "data:text/plain,abc", "data:;base64,%%%", f"DATA:;BASE64,{'A' * 400}",
    )  # fmt: skip
    fetched = await PageReader(fetch, EngineConfig(max_image_bytes=100)).fetch(sources)
    assert (fetched[0], fetched[4]) == (b"https://a.example/1", b"a page")
    kinds = [UnusableMedia, MediaUnavailable, UrlNotAllowed, InvalidInput, InvalidInput, TooLarge]
    assert [type(fetched[index]) for index in (1, 2, 3, 5, 6, 7)] == kinds


@pytest.mark.anyio
async def test_a_bug_of_the_fetch_is_no_bad_page() -> None:
    async def fetch(url: str) -> bytes:
        raise KeyError(url)

    with pytest.raises(ExceptionGroup) as raised:
        await PageReader(fetch, EngineConfig()).fetch(("https://a.example/1",))
    assert raised.group_contains(KeyError)


@pytest.mark.parametrize(
    ("data", "param", "says"),
    [
        (["a"], "data", "must be an object, such as"),
        ({"pages": ["a"], "page": 1}, "data", "may have the fields pages and gap, and no other"),
        ({}, "data.pages", "must be a list of URLs"),
        ({"pages": "https://a.example"}, "data.pages", "must be a list of URLs"),
        ({"pages": [1]}, "data.pages", "must be a list of URLs"),
        ({"pages": []}, "data.pages", "must have 1 to 64 entries, and has 0"),
        ({"pages": ["a"] * 65}, "data.pages", "must have 1 to 64 entries, and has 65"),
        ({"pages": ["a"], "gap": 0}, "data.gap", "must be a number from 0.002 to 0.5"),
        ({"pages": ["a"], "gap": "0.1"}, "data.gap", "must be a number"),
        ({"pages": ["a"], "gap": True}, "data.gap", "must be a number"),
        ({"pages": ["a"], "gap": float("nan")}, "data.gap", "must be a number"),
    ],
)
def test_a_wrong_field_is_named_with_its_remedy(data: Any, param: str, says: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        parse_request(data)
    assert raised.value.param == param
    assert str(raised.value).startswith(param)
    assert says in str(raised.value)


def test_a_request_has_a_usual_gap() -> None:
    assert parse_request({"pages": ["a"]}).gap == 1 / 64
    assert parse_request({"pages": ["a"], "gap": 0.1}).gap == 0.1
