"""Pages through a pipeline: the plugin finds regions, and the model embeds each as an item of its own."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from page_regions.plugin import PageRegions
from staged_pool import EngineConfig, Pipeline, PipelineStage, UnsupportedMedia, open_engine
from tests.examples.documents.drawn_pages import FOOT, TITLE, TWO_COLUMNS, Block, drawn, encoded, pdf
from tests.models.tiny import build
from tests.servers.tiny_models import tiny

pytestmark = pytest.mark.anyio

PAGE = drawn(*TWO_COLUMNS)
OTHER = drawn(TITLE, Block((90, 400), figure=(400, 300)), FOOT)


def data_url(data: bytes) -> str:
    return "data:;base64," + base64.b64encode(data).decode()


ITEMS = [data_url(encoded(PAGE)), data_url(b"no image"), data_url(pdf([OTHER, drawn()])), data_url(encoded(OTHER))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("siglip", tmp_path_factory.mktemp("models") / "siglip")


@pytest.fixture
def config(folder: Path) -> EngineConfig:
    return tiny(folder)


async def test_each_region_becomes_an_item_and_a_bad_page_is_skipped(config: EngineConfig) -> None:
    async with open_engine(config, plugins=[PageRegions]) as engine:
        pages = Pipeline(
            [
                PipelineStage("regions", plugin="page_regions", expand=True, on_error="skip"),
                PipelineStage("vectors", engine=engine, source="regions.crop", on_error="skip"),
            ],
            output={"page": "regions.page", "box": "regions.box", "embedding": "vectors.dense"},
            engines={"siglip": engine},
        )
        result = await pages.submit(ITEMS)
        (error,) = result.errors
        assert (error.index, error.stage, type(error.error)) == (1, "regions", UnsupportedMedia)
        assert [(item.index, item.parts) for item in result.items] == [
            *((0, (number,)) for number in range(8)),
            *((2, (number,)) for number in range(3)),
            *((3, (number,)) for number in range(3)),
        ]
        boxes = np.array([item.value["box"] for item in result.items[:8]])
        assert np.abs(boxes - np.array([block.box for block in TWO_COLUMNS])).max() <= 1
        for url, indices in ((ITEMS[0], (0,)), (ITEMS[3], (3,))):
            regions = await engine.process(url, plugin="page_regions")
            expected = (await engine.embed([region.crop for region in regions])).embeddings
            found = [item.value["embedding"] for item in result.items if item.index in indices]
            assert np.allclose(found, expected, atol=1e-5)
