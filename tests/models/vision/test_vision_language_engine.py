"""Texts, images and conversations of both through a whole engine, beside each other."""

from __future__ import annotations

from typing import TypeAlias

import anyio
import numpy as np
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.engine.open import open_engine
from staged_pool.runtime.requests import Chat, EmbedRequest, Image, ScoreRequest, TextInput
from staged_pool.runtime.results import EmbedResult, ScoreResult
from staged_pool.stages.errors import InvalidInput, UnsupportedMedia
from tests.models import image_oracle as oracle
from tests.models.conftest import TinyFolder
from tests.models.encoded_images import encode
from tests.models.image_oracle import Array

pytestmark = pytest.mark.anyio

Known: TypeAlias = tuple[EngineConfig, Array]
"""Settings of an engine, and the answer that it must give."""

WIDE, TALL = encode(100, 80), encode(70, 150, "PNG", 1)
BOTH = Chat(({"role": "user", "content": ("it is", Image(WIDE))},))
INPUTS = (TextInput("a text"), Image(TALL), TextInput(BOTH, add_special_tokens=False), TextInput("another text"))
QUERY = "A function call"


@pytest.fixture(scope="module")
def conversations(tiny_folder: TinyFolder) -> Known:
    folder = tiny_folder("qwen2-vl")
    wanted = [
        oracle.text(folder, "a text"),
        oracle.conversation(folder, [("user", [TALL])]),
        oracle.conversation(folder, [("user", ["it is", WIDE])]),
        oracle.text(folder, "another text"),
    ]
    return EngineConfig(model=str(folder), dtype="float32", image_path="exact"), np.array(wanted)


@pytest.fixture(scope="module", params=["colqwen2", "colpali"])
def pages(request: pytest.FixtureRequest, tiny_folder: TinyFolder) -> Known:
    folder = tiny_folder(request.param)
    asked = oracle.query(folder, QUERY)
    wanted = [(asked @ oracle.page(folder, image).T).max(axis=1).sum() for image in (WIDE, TALL)]
    return EngineConfig(model=str(folder), dtype="float32", image_path="exact"), np.array(wanted, np.float32)


async def score(engine: Engine, *documents: Image | Chat) -> ScoreResult:
    return await engine.submit(lambda: ScoreRequest(queries=(QUERY,), documents=documents), lambda result: result)


async def test_one_request_may_hold_texts_images_and_both(conversations: Known) -> None:
    config, wanted = conversations
    found: list[EmbedResult] = []

    async def ask(engine: Engine) -> None:
        found.append(await engine.submit(lambda: EmbedRequest(inputs=INPUTS), lambda result: result))

    async with open_engine(config) as engine:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(ask, engine)
    assert len(found) == 5
    for result in found:
        assert result.dense is not None
        assert np.abs(result.dense - wanted).max() < 1e-4


async def test_an_engine_compares_a_query_with_pages(pages: Known) -> None:
    config, wanted = pages
    async with open_engine(config) as engine:
        result = await score(engine, Image(WIDE), Image(TALL))
    assert np.abs(result.scores - wanted).max() < 1e-4


async def test_what_is_wrong_with_an_image_is_said_with_its_place(pages: Known) -> None:
    config, wanted = pages
    async with open_engine(config) as engine:
        with pytest.raises(UnsupportedMedia) as caught:
            await score(engine, Image(WIDE), Image(b"no image"))
        assert (caught.value.param, caught.value.index) == ("documents", 1)
        with pytest.raises(InvalidInput, match="one image or one text at a time"):
            await score(engine, BOTH)
        assert np.abs((await score(engine, Image(WIDE))).scores - wanted[:1]).max() < 1e-4
