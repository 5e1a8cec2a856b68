"""Plugins as stages: their output is expanded, and each part goes on to a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from staged_pool import EngineConfig, Pipeline, PipelineStage, PluginContext, Processor, open_engines
from tests.servers.tiny_models import tiny_models

pytestmark = pytest.mark.anyio


class Words(Processor):
    """Finds the words of a text, without a model."""

    name = "words"

    async def parse(self, data: object, context: PluginContext) -> str:
        return str(data)

    def preprocess(self, loaded: str, context: PluginContext) -> Sequence[str]:
        return [loaded]

    def forward(self, batch: Sequence[Any]) -> Sequence[Any]:
        return [text.split() for text in batch]

    def postprocess(self, rows: Sequence[Any], context: PluginContext) -> list[dict[str, str]]:
        return [{"crop": word} for row in rows for word in row]


@pytest.fixture(scope="module")
def models() -> Sequence[EngineConfig]:
    return tiny_models("embedder")


async def test_each_part_that_a_plugin_finds_is_embedded(models: Sequence[EngineConfig]) -> None:
    async with open_engines(models, plugins=[Words]) as engines:
        stages = [
            PipelineStage("regions", plugin="words", expand=True),
            PipelineStage("vectors", engine="embedder", source="regions.crop"),
        ]
        pipeline = Pipeline(stages, engines=engines, output={"word": "regions.crop", "vector": "vectors.dense"})
        result = await pipeline.submit(["one two", "three"])
        expected = await engines["embedder"].embed(["one", "two", "three"])
    assert [item.value["word"] for item in result.items] == ["one", "two", "three"]
    for item, vector in zip(result.items, expected.embeddings, strict=True):
        assert item.value["vector"] == pytest.approx(vector, abs=1e-5)
