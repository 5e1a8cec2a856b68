"""Metrics beside the client's own count: requests, items, tokens and rejections agree."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio
import httpx
import pytest
from blockbuster import BlockBuster
from prometheus_client.parser import text_string_to_metric_families

from staged_pool.runtime.config import EngineConfig
from tests.servers.on_socket import serving
from tests.support.gates import Gate
from tests.support.model import LetterModel

pytestmark = pytest.mark.anyio

ROUTE = {"route": "/v1/embeddings", "model": "letters"}
CLIENTS, REQUESTS = 12, 20
"""Clients at once, and requests of each."""


@pytest.fixture(autouse=True)
def metrics_may_be_read(nothing_blocks_the_event_loop: BlockBuster) -> None:
    """Prometheus' client reads /proc in each scrape."""
    nothing_blocks_the_event_loop.deactivate()


class Scrape:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def sum(self, name: str, **labels: str) -> float:
        """Add up the samples with these labels."""
        return sum(
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        )


async def scrape(client: httpx.AsyncClient) -> Scrape:
    return Scrape((await client.get("/metrics")).text)


async def test_every_number_agrees_with_the_count_of_the_client() -> None:
    """Texts differ, so that none is coalesced; some requests are rejected by the limit, some are malformed."""
    counted: Counter[str] = Counter()

    async def one(client: httpx.AsyncClient, number: int) -> None:
        texts = [f"{number} {place}" for place in range(1 + number % 7)]
        body: dict[str, Any] = {"input": [] if number % 11 == 10 else texts}
        answer = await client.post("/v1/embeddings", json=body)
        counted[str(answer.status_code)] += 1
        counted["bytes"] += len(answer.content)
        if answer.status_code == 200:
            counted["items"] += len(answer.json()["data"])
            counted["tokens"] += answer.json()["usage"]["prompt_tokens"]

    async def send(client: httpx.AsyncClient, first: int) -> None:
        for number in range(first, first + REQUESTS):
            await one(client, number)

    engine = EngineConfig(max_requests=4)
    async with serving(engine=engine) as served, served.client() as client:
        async with anyio.create_task_group() as tasks:
            for place in range(CLIENTS):
                tasks.start_soon(send, client, place * REQUESTS)
        found = await scrape(client)
    assert counted["200"] > 0
    assert counted["400"] > 0
    for status in ("200", "400", "429"):
        assert found.sum("staged_pool_http_requests_total", route="/v1/embeddings", status=status) == counted[status]
    assert found.sum("staged_pool_refused_total") == counted["429"]
    assert found.sum("staged_pool_retry_after_seconds_count") == counted["429"]
    assert found.sum("staged_pool_http_response_bytes_total", route="/v1/embeddings") == counted["bytes"]
    assert found.sum("staged_pool_request_items_sum", **ROUTE) == counted["items"]
    assert found.sum("staged_pool_request_tokens_sum", **ROUTE) == counted["tokens"]
    assert found.sum("staged_pool_request_items_count", **ROUTE) == counted["200"]
    assert found.sum("staged_pool_request_duration_seconds_count", model="letters") == counted["200"]
    for stage in ("preprocess", "batch", "postprocess"):
        assert found.sum("staged_pool_stage_items_total", stage=stage) == counted["items"]
    assert found.sum("staged_pool_device_tokens_total") == counted["tokens"]
    assert found.sum("staged_pool_batch_items_sum") == counted["items"]
    assert found.sum("staged_pool_batch_tokens_sum") == counted["tokens"]
    assert found.sum("staged_pool_batch_items_count") == found.sum("staged_pool_batches_total")
    assert found.sum("staged_pool_admission_inside") == 0
    assert found.sum("staged_pool_stage_busy_workers") == found.sum("staged_pool_stage_waiting_items") == 0


async def test_a_scrape_under_load_shows_what_is_held() -> None:
    gate = Gate()
    async with serving(LetterModel(on_forward=gate)) as served, served.client() as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.post("/v1/embeddings", json={"input": ["a", "bc"]}))
            await gate.arrived()
            found = await scrape(client)
            gate.open()
    assert found.sum("staged_pool_admission_inside", unit="requests") == 1
    assert found.sum("staged_pool_admission_inside", unit="items") == 2
    assert found.sum("staged_pool_stage_busy_workers", stage="batch") == 1
    assert found.sum("staged_pool_stage_busy_seconds_total", stage="batch") > 0
    assert found.sum("staged_pool_device_running_seconds") > 0
    assert found.sum("staged_pool_stage_oldest_seconds", stage="batch") > 0
    assert found.sum("staged_pool_http_requests_running") == 2, "the request and the scrape"


async def test_a_thousand_odd_paths_and_names_make_no_new_series() -> None:
    async with serving() as served, served.client() as client:
        await client.post("/v1/embeddings", json={"input": "a", "model": "letters"})
        await client.post("/v1/embeddings", json={"input": "a", "model": "odd"})
        await client.get("/odd")
        await client.get("/metrics")  # its own series
        await client.post("/m/odd/v1/embeddings", json={"input": "a"})
        before = (await client.get("/metrics")).text.count("\n")
        for number in range(333):
            await client.get(f"/odd/{number}")
            await client.post("/v1/embeddings", json={"input": "a", "model": f"odd-{number}"})
            await client.post(f"/m/odd-{number}/v1/embeddings", json={"input": "a"})
        after = (await client.get("/metrics")).text
    assert after.count("\n") == before
    assert "odd" not in after
