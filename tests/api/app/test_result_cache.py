"""Equal inputs over HTTP: the answers, the metrics and the logs."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest
from blockbuster import BlockBuster

from staged_pool.runtime.config import EngineConfig
from tests.servers.byte_client import post
from tests.servers.on_socket import serving
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.stages import batch_stages
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def metrics_may_be_read(nothing_blocks_the_event_loop: BlockBuster) -> None:
    """Allow reads of /proc, where the metrics of the process are."""
    nothing_blocks_the_event_loop.deactivate()


def vectors(response: httpx.Response) -> list[list[float]]:
    assert response.status_code == 200, response.text
    return [row["embedding"] for row in response.json()["data"]]


async def metrics(client: httpx.AsyncClient, name: str) -> dict[str, float]:
    """The values of the metrics whose names begin so, by the rest of the name."""
    lines = (line.split() for line in (await client.get("/metrics")).text.splitlines())
    full = f"staged_pool_{name}"
    return {line[0].removeprefix(full).partition("{")[0]: float(line[1]) for line in lines if line[0].startswith(full)}


@pytest.mark.parametrize("shared", [False, True])
async def test_keys_and_salts_have_results_of_their_own(shared: bool) -> None:
    keys = ("the-first-key", "the-second-key")
    config = EngineConfig(result_cache_mb=1, share_between_tenants=shared)
    async with serving(engine=config, api_keys=keys) as served, served.client() as client:
        for key in keys * 2:
            for salt in (None, "pepper"):
                body = {"input": "same"} | ({"cache_salt": salt} if salt else {})
                answer = await client.post("/v1/embeddings", json=body, headers={"authorization": f"Bearer {key}"})
                assert vectors(answer) == [expected("same").tolist()]
        cache = served.engine.statistics().result_cache
    assert cache is not None
    assert (cache.misses, cache.hits) == ((2, 6) if shared else (4, 4))


async def test_clients_that_ask_for_the_same_at_once_share_a_forward() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    answers: dict[str, httpx.Response] = {}
    async with serving(model) as served, served.client() as client, anyio.create_task_group() as tasks:

        async def ask(name: str, path: str, body: dict[str, Any]) -> None:
            answers[name] = await client.post(path, json=body)

        tasks.start_soon(ask, "busy", "/v1/embeddings", {"input": "busy"})
        await gate.arrived()
        tasks.start_soon(ask, "openai", "/v1/embeddings", {"input": ["same", "else", "same"]})
        tasks.start_soon(ask, "tei", "/embed", {"inputs": "same"})
        tasks.start_soon(ask, "cut", "/v1/embeddings", {"input": "same", "dimensions": 2})
        await until(lambda: batch_stages(served.engine)["text"].waiting == 5)
        gate.open()
        await until(lambda: len(answers) == 4)
        assert await metrics(client, "coalesced_items") == {"_total": 3.0}
        shown = (await client.get("/stages")).json()["models"]["letters"]["device"]
        assert (shown["items"], shown["coalesced_items"]) == (3, 3)
    same, other = expected("same").tolist(), expected("else").tolist()
    assert vectors(answers["openai"]) == [same, other, same]
    assert answers["openai"].json()["usage"]["prompt_tokens"] == 12
    assert answers["tei"].json() == [same]
    assert vectors(answers["cut"]) == [same[:2]]
    assert sorted(text for texts in model.forwarded for text in texts) == ["busy", "else", "same"]


async def test_a_client_that_vanishes_takes_no_other_along() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    answers: list[httpx.Response] = []
    async with serving(model) as served, served.client() as client, anyio.create_task_group() as tasks:

        async def ask() -> None:
            answers.append(await client.post("/v1/embeddings", json={"input": "same"}))

        async with await served.connect() as vanishing:
            await vanishing.send(post(b'{"input": "same"}'))
            await gate.arrived()
            tasks.start_soon(ask)
            await until(lambda: batch_stages(served.engine)["text"].waiting == 1)
        await until(lambda: served.in_flight == 1)
        gate.open()
        await until(lambda: len(answers) == 1)
    assert vectors(answers[0]) == [expected("same").tolist()]
    assert model.forwarded == [["same"]]


async def test_the_cache_of_results_is_seen_and_can_be_emptied() -> None:
    model = LetterModel()
    async with serving(model, engine=EngineConfig(result_cache_mb=1)) as served, served.client() as client:
        first = await client.post("/v1/embeddings", json={"input": ["one", "two"]})
        again = await client.post("/v1/embeddings", json={"input": ["two", "one"]})
        assert vectors(again) == vectors(first)[::-1]
        assert again.json()["usage"] == first.json()["usage"]
        shown = (await client.get("/stages")).json()["models"]["letters"]["result_cache"]
        assert (shown["hits"], shown["misses"], shown["entries"], shown["max_bytes"]) == (2, 2, 2, 10**6)
        assert await metrics(client, "result_cache_") == {
            "hits_total": 2.0,
            "misses_total": 2.0,
            "entries": 2.0,
            "bytes": float(shown["bytes"]),
            "limit_bytes": 1e6,
        }
        assert (await client.post("/reset_mm_cache")).status_code == 200  # which is for images
        assert (await client.get("/stages")).json()["models"]["letters"]["result_cache"]["entries"] == 2
        assert (await client.post("/flush_cache")).status_code == 200
        emptied = (await client.get("/stages")).json()["models"]["letters"]["result_cache"]
        assert (emptied["entries"], emptied["bytes"], emptied["hits"]) == (0, 0, 2)
        assert vectors(await client.post("/v1/embeddings", json={"input": "one"})) == vectors(first)[:1]
    assert model.forwarded[1:] == [["one"]]


async def test_a_server_that_keeps_no_results_speaks_of_no_cache() -> None:
    async with serving() as served, served.client() as client:
        assert (await client.get("/stages")).json()["models"]["letters"]["result_cache"] is None
        assert await metrics(client, "result_cache") == {}
