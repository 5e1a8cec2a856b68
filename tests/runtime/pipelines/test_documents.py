"""The examples of docs/pipelines.md run as they are written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from staged_pool import EngineConfig, open_engines
from staged_pool.runtime.pipelines.file import PipelineFile, built_on, read_pipeline
from tests.servers.tiny_models import tiny_models

pytestmark = pytest.mark.anyio

DOCUMENT = Path(__file__).parents[3] / "docs/pipelines.md"
EXAMPLES = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def models() -> Sequence[EngineConfig]:
    return tiny_models("embedder", "classifier")


@pytest.fixture
def files(tmp_path: Path) -> list[PipelineFile]:
    paths = [tmp_path / f"{number}.toml" for number in range(len(EXAMPLES))]
    for path, text in zip(paths, EXAMPLES, strict=True):
        path.write_text(text)
    return [read_pipeline(path) for path in paths]


async def test_each_file_of_the_document_runs(files: list[PipelineFile], models: Sequence[EngineConfig]) -> None:
    assert len(files) == 2
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(open_engines(models))
        search, pages = built_on(engines, files).values()
        passages = ["a passage", "another one", "a third of them"]
        found = await search.submit({"query": "a passage", "data": passages})
        labelled = await pages.submit(passages)
        vectors = await engines["embedder"].embed(passages)
    assert {item.value["text"] for item in found.items} == set(passages)
    scores = [item.value["score"] for item in found.items]
    assert scores == sorted(scores, reverse=True)
    for index, item in enumerate(labelled.items):
        assert item.value["vector"] == pytest.approx(vectors.embeddings[index], abs=1e-5)
