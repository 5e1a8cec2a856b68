"""Several models behind one server: which of them a request means, and what the server says of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from blockbuster import BlockBuster

from tests.servers.in_memory import serving_in_memory
from tests.support.cards import CARD, CLASSIFIER
from tests.support.model import LetterModel, expected

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]


MODELS = (LetterModel(), LetterModel(replace(CARD, name="other")), LetterModel(replace(CLASSIFIER, name="scorer")))
"""Two models of vectors, and one of scores."""


@pytest.mark.parametrize(("name", "served_by"), [("other", "other"), ("letters", "letters")])
async def test_a_request_goes_to_the_model_that_it_names(name: str, served_by: str) -> None:
    async with serving_in_memory(*MODELS) as served, served.client() as client:
        answer = (await client.post("/v1/embeddings", json={"model": name, "input": "abc"})).json()
        models = (await client.get("/stages")).json()["models"]
    assert answer["model"] == served_by
    assert answer["data"][0]["embedding"] == expected("abc").tolist()
    assert {name: engine["admission"]["admitted"] for name, engine in models.items()} == {
        name: int(name == served_by) for name in ("letters", "other", "scorer")
    }


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/v2/embed", "/score", "/tokenize", "/pooling"])
async def test_a_request_that_could_mean_several_models_is_told_of_them(path: str) -> None:
    fields = {"input": "a", "inputs": "a", "texts": ["a"], "queries": "a", "documents": "b", "prompt": "a"}
    async with serving_in_memory(*MODELS) as served, served.client() as client:
        response = await client.post(path, json=fields)
    said = response.json()["error"] if path == "/embed" else response.json()["error"]["message"]
    assert response.status_code == (422 if path == "/embed" else 400)
    assert "letters" in said
    assert "other" in said
    assert "/m/NAME" in said


async def test_a_request_that_names_none_goes_to_the_only_one_that_can_do_its_task() -> None:
    async with serving_in_memory(*MODELS) as served, served.client() as client:
        by_task = await client.post("/classify", json={"input": "abc"})
        by_name = await client.post("/classify", json={"input": "abc", "model": "other"})
    assert (by_task.status_code, by_task.json()["model"]) == (200, "scorer")
    assert by_name.status_code == 501


async def test_a_model_that_is_not_there_is_404_on_every_route() -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": "a"},
        "/rerank": {"query": "a", "documents": ["b"]},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [97]},
    }
    async with serving_in_memory(*MODELS) as served, served.client() as client:
        for path, body in bodies.items():
            answer = await client.post(path, json=body | {"model": "nobody"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model"), path
            assert "`nobody` does not exist" in answer.json()["error"]["message"]


async def test_a_body_that_names_no_model_because_it_cannot_be_read_is_rejected_as_ever() -> None:
    async with serving_in_memory(*MODELS) as served, served.client() as client:
        for body in (b"{", b'{"model": 7, "input": "a"}', b"\xff", b'{"input": "' + b"a" * 100_000):
            answer = await client.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400, body[:20]


async def test_what_is_served_is_listed_and_counted_by_model(nothing_blocks_the_event_loop: BlockBuster) -> None:
    nothing_blocks_the_event_loop.deactivate()  # process metrics read /proc
    async with serving_in_memory(*MODELS) as served, served.client() as client:
        await client.post("/v1/embeddings", json={"model": "other", "input": "abc"})
        listed = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
        ready = (await client.get("/ready")).json()
        metrics = (await client.get("/metrics")).text
    assert listed == [card["name"] for card in ready["models"]] == ["letters", "other", "scorer"]
    assert 'staged_pool_device_tokens_total{model="other"} 3.0' in metrics
    assert 'staged_pool_device_tokens_total{model="letters"} 0.0' in metrics
    assert metrics.count("# TYPE staged_pool_device_tokens_total counter") == 1
