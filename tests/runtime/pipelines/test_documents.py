"""The examples of docs/pipelines.md run as they are written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from staged_pool import EngineConfig, open_engines
from staged_pool.runtime.pipelines.file import PipelineFile, built_on, read_pipeline
from tests.models.tiny import build
from tests.servers.tiny_models import tiny, tiny_models

pytestmark = pytest.mark.anyio

DOCUMENT = Path(__file__).parents[3] / "docs/pipelines.md"
EXAMPLES = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Sequence[EngineConfig]:
    nli = build("ce-nli-3label", tmp_path_factory.mktemp("models") / "nli")
    return [*tiny_models("embedder", "classifier"), tiny(nli, served_name="nli")]


@pytest.fixture
def files(tmp_path: Path) -> list[PipelineFile]:
    paths = [tmp_path / f"{number}.toml" for number in range(len(EXAMPLES))]
    for path, text in zip(paths, EXAMPLES, strict=True):
        path.write_text(text)
    return [read_pipeline(path) for path in paths]


async def test_each_file_of_the_document_runs(files: list[PipelineFile], models: Sequence[EngineConfig]) -> None:
    assert len(files) == 3
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(open_engines(models))
        search, pages, topics = built_on(engines, files).values()
        passages = ["a passage", "another one", "a third of them"]
        found = await search.submit({"query": "a passage", "data": passages})
        labelled = await pages.submit(passages)
        vectors = await engines["embedder"].embed(passages)
        labels = ["food", "a program"]
        chosen = await topics.submit({"data": passages, "candidate_labels": labels})
        wanted = await engines["nli"].classify(passages, candidate_labels=labels, hypothesis_template="It is of {}.")
    assert {item.value["text"] for item in found.items} == set(passages)
    scores = [item.value["score"] for item in found.items]
    assert scores == sorted(scores, reverse=True)
    for index, item in enumerate(labelled.items):
        assert item.value["vector"] == pytest.approx(vectors.embeddings[index], abs=1e-5)
    for index, item in enumerate(chosen.items):
        assert item.value["topic"] == wanted.labels[wanted.best[index]]
        assert [*item.value["scores"].values()] == pytest.approx(wanted.scores[index], abs=1e-5)
