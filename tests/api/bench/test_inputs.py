"""Sizes as flags give them, and the made-up texts and images of these sizes."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from staged_pool.api.bench.images import DIFFERENT, ImageMaker
from staged_pool.api.bench.sizes import ImageSize, Range, read_mix
from staged_pool.api.bench.texts import WORDS, TextMaker, TokenRate, in_turn, lines_of
from staged_pool.api.bench.workload import Inputs, MixedMaker, Target
from staged_pool.stages.errors import ConfigError


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def body(content: bytes) -> dict[str, object]:
    loaded: dict[str, object] = json.loads(content.partition(b"\r\n\r\n")[2])
    return loaded


@pytest.mark.parametrize(("text", "low", "high"), [("64", 64, 64), ("8-256", 8, 256), ("1-1", 1, 1)])
def test_a_range_is_read_and_drawn_from(text: str, low: int, high: int) -> None:
    found = Range.of("tokens", text)
    source = rng()
    drawn = [found.draw(source) for _ in range(2000)]
    assert (min(drawn), max(drawn)) == (low, high)
    assert found.mean == (low + high) / 2
    assert str(found) == (text if low != high else str(low))


@pytest.mark.parametrize("text", ["", "0", "-5", "9-8", "a", "1-", "1.5", "2000000", "1-2-3"])
def test_a_wrong_range_is_told_with_a_right_one(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 8-256"):
        Range.of("tokens", text)


@pytest.mark.parametrize("text", ["", "640", "0x480", "640x", "640 x 480", "70000x1", "99999x99999"])
def test_a_wrong_size_of_images_is_told_with_a_right_one(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 640x480"):
        ImageSize.of(text)


@pytest.mark.parametrize(
    "text", ["", "texts", "texts=1.2", "texts=0.5", "texts=0.5,texts=0.5", "videos=1", "texts=-1,images=2", "texts=x"]
)
def test_a_wrong_mix_is_told_with_a_right_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"mix="):
        read_mix(text)


def test_a_mix_is_read_and_its_shares_are_kept() -> None:
    mix = read_mix("texts=0.7, images=0.1, rerank=0.2")
    inputs = Inputs(mix=mix, image_size=ImageSize(8, 8))
    make = MixedMaker(Target(authority="a"), inputs, {}, rng())
    kinds = [make().kind for _ in range(4000)]
    for kind, share in mix.items():
        assert kinds.count(kind) / len(kinds) == pytest.approx(share, abs=0.03)
    assert str(inputs) == (
        "70% 1 text(s) of 64 tokens, 10% one image of 8x8, 20% a query with 10 documents of 64 tokens"
    )


@pytest.mark.parametrize(
    ("rate", "tokens", "words"),
    [
        (TokenRate(), 64, 64),
        (TokenRate(1.0, 2.0), 64, 62),
        (TokenRate(1.25, 2.0), 64, 50),
        (TokenRate(5.5, -1.0), 64, 12),
        (TokenRate(1.0, 10.0), 5, 1),
    ],
)
def test_a_text_has_the_words_of_its_tokens(rate: TokenRate, tokens: int, words: int) -> None:
    assert len(TextMaker(rng(), rate)(tokens).split()) == words


@pytest.mark.parametrize("tokens", [2, 3, 64])
def test_no_two_texts_are_equal(tokens: int) -> None:
    make = TextMaker(rng(), TokenRate())
    assert len({make(tokens) for _ in range(len(WORDS) * 20)}) == len(WORDS) * 20


def test_the_same_seed_gives_the_same_texts() -> None:
    first, second = (TextMaker(rng(5), TokenRate()) for _ in range(2))
    assert [first(9) for _ in range(5)] == [second(9) for _ in range(5)]


def test_lines_of_a_file_come_in_turn(tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("a\n\n b \nc\n")
    give = in_turn(lines_of(tmp_path / "texts"))
    assert [give(64) for _ in range(5)] == ["a", " b ", "c", "a", " b "]


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff"])
def test_a_file_without_texts_is_told(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "texts").write_bytes(content)
    with pytest.raises(ConfigError, match="file="):
        lines_of(tmp_path / "texts")


def image_of(url: str) -> bytes:
    return base64.b64decode(url.removeprefix("data:image/jpeg;base64,"), validate=True)


def test_images_have_their_size_and_no_two_are_equal() -> None:
    make = ImageMaker(rng())
    files = [image_of(make(ImageSize(65, 33))) for _ in range(3 * DIFFERENT)]
    assert len(set(files)) == len(files)
    pixels = set()
    for file in files:
        with Image.open(io.BytesIO(file)) as image:
            assert (image.format, image.size) == ("JPEG", (65, 33))
            pixels.add(image.tobytes())
    assert len(pixels) == DIFFERENT


@pytest.mark.parametrize("wanted_bytes", [5_000, 40_000, 200_000])
def test_an_image_of_about_a_number_of_bytes(wanted_bytes: int) -> None:
    make = ImageMaker(rng())
    file = image_of(make(make.size_of_bytes(wanted_bytes)))
    assert len(file) == pytest.approx(wanted_bytes, rel=0.4)


def test_bodies_are_those_of_the_standard_routes() -> None:
    target = Target(authority="a", prefix="/p", model="m", encoding_format="base64")
    mix = {"texts": 0.4, "images": 0.3, "rerank": 0.3}
    inputs = Inputs(mix=read_mix("texts=0.4,images=0.3,rerank=0.3"), texts_per_request=Range(2, 2),
                    documents=3, image_size=ImageSize(8, 8))  # fmt: skip
    make = MixedMaker(target, inputs, {}, rng())
    texts, image, ranking = (make.one(kind) for kind in ("texts", "images", "rerank"))
    assert [made.items for made in (texts, image, ranking)] == [2, 1, 3]
    assert {name.split(b" ")[1] for name in (texts.content, image.content)} == {b"/p/v1/embeddings"}
    assert ranking.content.startswith(b"POST /p/v1/rerank HTTP/1.1\r\n")
    assert {*body(texts.content)} == {"model", "input", "encoding_format"}
    assert {*body(image.content)} == {"model", "messages", "encoding_format"}
    assert {*body(ranking.content)} == {"model", "query", "documents"}
    assert len(mix) == 3
    (own,) = [MixedMaker(Target(authority="a", path="/rerank"), inputs, {}, rng()).one("rerank")]
    assert own.content.startswith(b"POST /rerank ")
