"""The plugin on an engine with a tiny CLIP or SigLIP, on each event loop."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

import anyio
import numpy as np
import pytest
from PIL import Image as Pillow

from page_regions.plugin import PageEmbeddings, PageRegions
from staged_pool import Engine, EngineConfig, Image, InvalidInput, UnsupportedMedia, open_engine
from tests.examples.documents.drawn_pages import FOOT, TITLE, TWO_COLUMNS, Block, drawn, encoded, pdf
from tests.models.tiny import build
from tests.runtime.media.origin import LOCAL, answer, origin
from tests.servers.tiny_models import tiny
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

PAGE = drawn(*TWO_COLUMNS)
OTHER = drawn(TITLE, Block((90, 400), figure=(400, 300)), FOOT)


def data_url(data: bytes) -> str:
    return "data:;base64," + base64.b64encode(data).decode()


PAGE_PNG = encoded(PAGE)
PAGE_URL, OTHER_URL = data_url(PAGE_PNG), data_url(encoded(OTHER, "JPEG", quality=95))
PDF_URL = data_url(pdf([PAGE, OTHER]))
BLANK_URL = data_url(encoded(drawn()))


def settings(kind: str, folders: pytest.TempPathFactory) -> EngineConfig:
    return tiny(build(kind, folders.mktemp("models") / kind), allow_media_domains=(LOCAL,))


@pytest.fixture(scope="module", params=["clip", "siglip", "vit-st-mean"])
def each_config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return settings(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return settings("siglip", tmp_path_factory)


async def assert_embedded(engine: Engine, page: Any, image: Pillow.Image) -> None:
    """Compare embeddings with those of the crops, embedded without the plugin."""
    assert (page["width"], page["height"]) == image.size
    crops = []
    for region in page["regions"]:
        file = BytesIO()
        image.crop(region["box"]).save(file, "PNG")
        crops.append(Image(file.getvalue()))
    expected = (await engine.embed(crops)).embeddings
    assert np.allclose([region["embedding"] for region in page["regions"]], expected, atol=1e-5)


async def test_each_region_has_the_embedding_of_its_crop(each_config: EngineConfig) -> None:
    async with open_engine(each_config, plugins=[PageEmbeddings]) as engine:
        output = await engine.process({"pages": [PAGE_URL]})
        (page,) = output["pages"]
        assert [page["source"], page["number"]] == [0, 0]
        boxes = np.array([region["box"] for region in page["regions"]])
        assert np.abs(boxes - np.array([block.box for block in TWO_COLUMNS])).max() <= 1
        await assert_embedded(engine, page, PAGE)
        assert len({tuple(region["embedding"]) for region in page["regions"]}) == 5  # four regions have one text


async def test_images_and_pdfs_share_a_request(config: EngineConfig) -> None:
    async with open_engine(config, plugins=[PageEmbeddings]) as engine:
        pages = (await engine.process({"pages": [OTHER_URL, PDF_URL, BLANK_URL, PAGE_URL]}))["pages"]
        assert [(page["source"], page["number"]) for page in pages] == [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0)]
        assert [len(page["regions"]) for page in pages] == [3, 8, 3, 0, 8]
        await assert_embedded(engine, pages[4], PAGE)


async def test_a_page_without_ink_is_answered(config: EngineConfig) -> None:
    async with open_engine(config, plugins=[PageEmbeddings]) as engine:
        assert (await engine.process({"pages": [BLANK_URL]}))["pages"][0]["regions"] == []


async def test_one_bad_page_leaves_the_others(config: EngineConfig) -> None:
    async with origin() as host, open_engine(config, plugins=[PageEmbeddings]) as engine:
        host.pages = {"/404": answer(b"", status="404 Not Found"), "/page": answer(PAGE_PNG)}
        urls = [host.url(path, host=LOCAL) for path in ("/page", "/404")]
        pages = (await engine.process({"pages": [*urls, data_url(b"no image"), PAGE_URL]}))["pages"]
        assert pages[1] == {
            "source": 1,
            "number": 0,
            "error": {"message": "The host of the image answered with status 404.", "type": "UnusableMedia"},
        }
        assert pages[2]["error"]["type"] == "UnsupportedMedia"
        await assert_embedded(engine, pages[0], PAGE)
        assert pages[3]["regions"] == pages[0]["regions"]


async def test_a_wrong_request_is_rejected(config: EngineConfig) -> None:
    async with open_engine(config, plugins=[PageEmbeddings]) as engine:
        with pytest.raises(InvalidInput, match=r"data\.gap must be a number"):
            await engine.process({"pages": [PAGE_URL], "gap": "wide"})


async def test_many_requests_at_once_keep_their_own_pages(config: EngineConfig) -> None:
    outputs: dict[int, Any] = {}
    sources = [[PAGE_URL], [OTHER_URL, PAGE_URL], [BLANK_URL], [PDF_URL]]
    async with open_engine(config, plugins=[PageEmbeddings]) as engine:

        async def ask(index: int) -> None:
            outputs[index] = await engine.process({"pages": sources[index % 4]})

        async with anyio.create_task_group() as tasks:
            for index in range(12):
                tasks.start_soon(ask, index)
        for index in range(12):
            alone = await engine.process({"pages": sources[index % 4]})
            assert boxes(outputs[index]) == boxes(alone)
            assert np.allclose(embeddings(outputs[index]), embeddings(alone), atol=1e-5)


def boxes(output: Any) -> list[list[list[int]]]:
    return [[region["box"] for region in page["regions"]] for page in output["pages"]]


def embeddings(output: Any) -> list[list[float]]:
    return [region["embedding"] for page in output["pages"] for region in page["regions"]]


async def test_a_caller_who_leaves_ends_its_fetches(config: EngineConfig) -> None:
    async with origin() as host, open_engine(config, plugins=[PageEmbeddings]) as engine:
        waiting = 0

        async def silent(stream: Any) -> None:
            nonlocal waiting
            waiting += 1
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
            waiting -= 1

        host.pages = {"/": silent}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.process, {"pages": [host.url(host=LOCAL), PAGE_URL]})
            await until(lambda: waiting == 1)
            tasks.cancel_scope.cancel()
        await until(lambda: waiting == 0)
        assert (await engine.process({"pages": [BLANK_URL]}))["pages"][0]["regions"] == []


async def test_regions_are_given_to_other_stages_as_images(config: EngineConfig) -> None:
    async with open_engine(config, plugins=[PageRegions, PageEmbeddings]) as engine:
        regions = await engine.process(PAGE_URL, plugin="page_regions")
        (page,) = (await engine.process({"pages": [PAGE_URL]}, plugin="page_embeddings"))["pages"]
        assert [list(region.box) for region in regions] == [region["box"] for region in page["regions"]]
        vectors = (await engine.embed([region.crop for region in regions])).embeddings
        assert np.allclose(vectors, [region["embedding"] for region in page["regions"]], atol=1e-5)
        assert [region.page for region in await engine.process(PDF_URL, plugin="page_regions")] == [0] * 8 + [1] * 3
        with pytest.raises(UnsupportedMedia, match="The image is in no known format"):
            await engine.process(data_url(b"no image"), plugin="page_regions")
