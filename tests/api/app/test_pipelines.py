"""Pipelines over HTTP: answers, streams, errors, and their place in the descriptions and metrics of a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockBuster

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.pipelines.file import PipelineFile, read_pipelines
from tests.servers.in_memory import serving_in_memory
from tests.servers.tiny_models import tiny_models
from tests.support.cards import EMBEDDER
from tests.support.model import LetterModel

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]

SEARCH = """
name = "search"
output = {text = "item", score = "rerank"}

[[stage]]
name = "embed"
model = "letters"
outputs = ["multi_vector"]
on_error = "skip"

[[stage]]
name = "rerank"
task = "maxsim"
from = ["request.query", "embed"]
top_k = 2
"""


def files(folder: Path, *texts: str) -> list[PipelineFile]:
    paths = []
    for number, text in enumerate(texts):
        paths.append(folder / f"pipeline{number}.toml")
        paths[-1].write_text(text)
    return list(read_pipelines(paths))


@pytest.fixture
def search(tmp_path: Path) -> list[PipelineFile]:
    return files(tmp_path, SEARCH)


async def test_an_answer_has_the_best_items_the_errors_of_others_and_the_time_in_each_stage(
    search: list[PipelineFile],
) -> None:
    async with serving_in_memory(LetterModel(card=EMBEDDER), pipelines=search) as served, served.client() as client:
        answer = await client.post("/pipelines/search", json={"query": "abc", "data": ["xyz", "abc", "NaN", "abcd"]})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert (found["object"], found["pipeline"]) == ("pipeline.result", "search")
        assert [item["index"] for item in found["items"]] == [1, 3]
        assert found["items"][0]["value"]["text"] == "abc"
        assert found["items"][0]["value"]["score"] >= found["items"][1]["value"]["score"]
        (error,) = found["errors"]
        assert (error["index"], error["stage"], error["error"]["index"]) == (2, "embed", 2)
        assert found["usage"]["prompt_tokens"] > 0
        assert [part.partition(";")[0] for part in answer.headers["server-timing"].split(", ")] == ["embed", "rerank"]


async def test_lines_come_for_each_item_and_the_last_one_has_the_usage(search: list[PipelineFile]) -> None:
    async with serving_in_memory(LetterModel(card=EMBEDDER), pipelines=search) as served, served.client() as client:
        answer = await client.post(
            "/pipelines/search",
            json={"query": "abc", "data": ["xyz", "abc", "abcd"]},
            headers={"accept": "application/x-ndjson"},
        )
    *lines, last = [json.loads(line) for line in answer.text.splitlines()]
    assert sorted(line["index"] for line in lines) == [1, 2]
    assert last["usage"]["prompt_tokens"] > 0
    assert "items" not in last


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"data": ["a"]}, 400, "The request needs the field `query`"),
        ({"query": "a"}, 400, "The request needs the field `data`"),
        ([1], 400, ""),
        ({"query": "NaN", "data": ["a"]}, 424, ""),
        ({"query": "a", "data": [{"image": "x:y"}]}, 400, "data[0].image"),
    ],
)
async def test_a_wrong_request_has_an_error_that_names_what_is_wrong(
    search: list[PipelineFile], body: Any, status: int, message: str
) -> None:
    async with serving_in_memory(LetterModel(card=EMBEDDER), pipelines=search) as served, served.client() as client:
        answer = await client.post("/pipelines/search", json=body)
        assert answer.status_code == status, answer.text
        assert message in answer.json()["error"]["message"]


async def test_headers_give_the_deadline_and_the_priority(search: list[PipelineFile]) -> None:
    async with serving_in_memory(LetterModel(card=EMBEDDER), pipelines=search) as served, served.client() as client:
        for headers in ({"x-request-timeout": "soon"}, {"x-priority": "high"}):
            answer = await client.post("/pipelines/search", json={"query": "a", "data": "b"}, headers=headers)
            assert answer.status_code == 400
        late = await client.post(
            "/pipelines/search", json={"query": "a", "data": ["b"] * 50}, headers={"x-request-timeout": "0.000001"}
        )
        assert late.status_code == 504


async def test_pipelines_are_listed_described_and_counted(
    search: list[PipelineFile], nothing_blocks_the_event_loop: BlockBuster
) -> None:
    nothing_blocks_the_event_loop.deactivate()  # process metrics read /proc
    async with serving_in_memory(LetterModel(card=EMBEDDER), pipelines=search) as served, served.client() as client:
        await client.post("/pipelines/search", json={"query": "abc", "data": ["xyz"]})
        listed = (await client.get("/pipelines")).json()
        assert listed == {
            "pipelines": [{"name": "search", "items": "data", "fields": ["query"], "stages": ["embed", "rerank"]}]
        }
        described = (await client.get("/openapi.json")).json()["paths"]
        assert described["/pipelines/search"]["post"]["summary"] == "The pipeline search"
        assert "/pipelines" in described
        stages = (await client.get("/stages")).json()["pipelines"]["search"]
        assert stages["outcomes"]["answered"] == 1
        assert [stage["done"] for stage in stages["stages"]] == [1, 1]
        metrics = (await client.get("/metrics")).text
        assert 'staged_pool_pipeline_outcomes_total{outcome="answered",pipeline="search"} 1.0' in metrics
        assert 'staged_pool_pipeline_stage_ended_total{outcome="done",pipeline="search",stage="embed"} 1.0' in metrics
        models = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["letters"], "a pipeline is no model"


async def test_a_server_without_pipelines_has_no_route_for_them() -> None:
    async with serving_in_memory() as served, served.client() as client:
        assert (await client.post("/pipelines/search")).status_code == 404
        assert "/pipelines" not in (await client.get("/openapi.json")).json()["paths"]


@pytest.fixture(scope="module")
def models() -> Sequence[EngineConfig]:
    return tiny_models("embedder", "classifier")


LABELLED = """
name = "labelled"
output = {label = "labels.label", vector = "vectors.dense"}
stage = [{name = "labels", task = "classify", model = "classifier"},
         {name = "vectors", model = "embedder", from = "item"}]
"""


@pytest.fixture
def labelled(tmp_path: Path) -> list[PipelineFile]:
    return files(tmp_path, LABELLED)


async def test_real_models_feed_each_other(labelled: list[PipelineFile], models: Sequence[EngineConfig]) -> None:
    async with serving_in_memory(*models, pipelines=labelled) as served, served.client() as client:
        found = (await client.post("/pipelines/labelled", json={"data": ["one text", "another"]})).json()
        vectors = (await client.post("/v1/embeddings", json={"input": ["one text", "another"]})).json()["data"]
        labels = (await client.post("/classify", json={"input": ["one text"], "model": "classifier"})).json()["data"]
    assert found["items"][1]["value"]["vector"] == pytest.approx(vectors[1]["embedding"], abs=1e-5)
    assert found["items"][0]["value"]["label"] == labels[0]["label"]
