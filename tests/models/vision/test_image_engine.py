"""Image models inside an engine: both lanes of one request, and the errors that callers see."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.requests import (
    Chat,
    ClassifyRequest,
    Content,
    EmbedRequest,
    Image,
    Output,
    ScoreRequest,
    TextInput,
)
from staged_pool.runtime.results import ClassifyResult, EmbedResult, ScoreResult
from staged_pool.stages.errors import InvalidInput, UnusableMedia
from staged_pool.stages.work import Request
from tests.models.conftest import LoadTiny, TinyFolder
from tests.models.images.drawing import image
from tests.models.requests import embed

TEXTS = ["A man is eating food.", "short"]
IMAGES = [image(640, 480, 1, "JPEG"), image(90, 120, 2), image(300, 300, 3, "WEBP")]

pytestmark = pytest.mark.anyio


def settings(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", torch_threads=1)


@pytest.fixture
def clip_folder(tiny_folder: TinyFolder) -> Path:
    """Built before the event loop runs, which must not be blocked."""
    return tiny_folder("clip")


@pytest.fixture
def labels_folder(tiny_folder: TinyFolder) -> Path:
    return tiny_folder("dinov2-labels")


@pytest.fixture
def alone(load_tiny: LoadTiny) -> Encoder:
    """The model of `clip` without an engine."""
    return load_tiny("clip")


@pytest.fixture
async def clip(clip_folder: Path) -> AsyncIterator[Engine]:
    async with open_engine(settings(clip_folder)) as engine:
        yield engine


async def ask(engine: Engine, request: Request) -> object:
    return await engine.submit(lambda: request, lambda result: result)


async def test_one_request_holds_texts_and_images(clip: Engine, alone: Encoder) -> None:
    mixed: list[str | Image] = [IMAGES[0], TEXTS[0], IMAGES[1], TEXTS[1], IMAGES[2]]
    sources = tuple(one if isinstance(one, Image) else TextInput(one) for one in mixed)
    found = await ask(clip, EmbedRequest(inputs=sources))
    wanted = embed(alone, mixed, Output.DENSE).dense
    assert isinstance(found, EmbedResult)
    assert found.dense is not None
    assert wanted is not None
    assert np.abs(found.dense - wanted).max() < 1e-5
    tokens = sum(len(alone.tokenize(text, add_special_tokens=True).ids) for text in TEXTS)
    assert found.usage.prompt_tokens == 3 * 17 + tokens


@pytest.fixture(params=["clip", "qwen2-vl"])
def any_folder(request: pytest.FixtureRequest, tiny_folder: TinyFolder) -> Path:
    return tiny_folder(request.param)


@pytest.mark.parametrize("shared", [False, True])
async def test_tenants_and_salts_have_prepared_images_of_their_own(any_folder: Path, shared: bool) -> None:
    config = replace(settings(any_folder), image_cache_mb=10, share_between_tenants=shared)
    asked = [{"tenant": "a"}, {"tenant": "b"}, {}, {"tenant": "a", "cache_salt": "x"}, {"tenant": "a"}]
    async with open_engine(config) as engine:
        for each in asked:
            await engine.embed(IMAGES[1], **each)  # type: ignore[arg-type]
        cache = engine.statistics().image_cache
    assert cache is not None
    assert (cache.hits, cache.misses) == ((3, 2) if shared else (1, 4))


async def test_a_text_finds_images(clip: Engine) -> None:
    request = ScoreRequest(queries=(TEXTS[0],), documents=(*IMAGES, TEXTS[0]))
    found = await ask(clip, request)
    assert isinstance(found, ScoreResult)
    assert found.scores.shape == (4,)
    assert found.scores[3] == pytest.approx(1, abs=1e-5)
    assert found.scores[:3].max() < 0.99


async def test_what_is_wrong_with_an_image_is_said_of_its_place(clip: Engine) -> None:
    bad = Image(IMAGES[0].source[:400])
    with pytest.raises(UnusableMedia) as rejected:
        await ask(clip, EmbedRequest(inputs=(TextInput(TEXTS[0]), IMAGES[0], bad)))
    assert (rejected.value.param, rejected.value.index) == ("input", 2)
    found = await ask(clip, EmbedRequest(inputs=(IMAGES[0],)))
    assert isinstance(found, EmbedResult)


async def test_what_is_wrong_with_an_image_that_is_compared_names_the_field_that_holds_it(clip: Engine) -> None:
    bad = Image(IMAGES[0].source[:400])
    talk = Chat(({"role": "user", "content": (IMAGES[0], "and words")},))
    cases: list[tuple[tuple[Content, ...], tuple[Content, ...], tuple[str, int]]] = [
        ((bad,), (IMAGES[0], "a text"), ("queries", 0)),
        (("a text",), (IMAGES[0], bad), ("documents", 1)),
        (("a text",), (IMAGES[0], talk), ("documents", 1)),
        (("a text",), (IMAGES[0], Image("http://example.com/cat.png")), ("documents", 1)),
    ]
    for queries, documents, place in cases:
        with pytest.raises(InvalidInput) as rejected:
            await ask(clip, ScoreRequest(queries=queries, documents=documents))
        assert (rejected.value.param, rejected.value.index) == place


async def test_images_are_classified(labels_folder: Path) -> None:
    async with open_engine(settings(labels_folder)) as engine:
        found = await ask(engine, ClassifyRequest(inputs=tuple(IMAGES)))
    assert isinstance(found, ClassifyResult)
    assert found.labels == ("cat", "dog", "tree")
    assert np.allclose(found.scores.sum(axis=1), 1, atol=1e-5)
    assert found.usage.prompt_tokens == 3 * 17
